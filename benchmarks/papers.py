"""The five papers' claims on SmolLM2: the verdicts of `kvloom papers`, claim after claim.

A claim that has a verdict in results/<machine>/papers.json is not tested again, so an interrupted
run continues. `--claims` tests the named claims again. `papers_page.py` writes the page.

    python benchmarks/papers.py
    python benchmarks/papers.py --papers clusterkv --claims "recall rate"
"""

from __future__ import annotations

import json

import record
from kvloom_lab.models import load
from kvloom_lab.papers import CALIBRATED, DEFAULT, PAPERS, QUICK, Lab, check
from kvloom_lab.papers.tables import verdict_data, verdict_line
from kvloom_lab.workload.machine import conditions
from kvloom_lab.workload.text import library_text

NAME, DTYPE = "smollm2", "bfloat16"


def main() -> None:
    options = record.options(__doc__, papers=list(PAPERS), claims=[""], quick=False)
    path = record.results() / "papers.json"
    verdicts = json.loads(path.read_text())["verdicts"] if path.exists() else {}
    model, tokenizer = load(NAME, DTYPE)
    size = QUICK if options.quick else DEFAULT
    environment = conditions(model, NAME, "CPython's library", seed=0, **vars(size))
    lab = Lab(model, tokenizer, library_text(), size=size, name=NAME)
    for paper in options.papers:
        lab.check_calibration(CALIBRATED.get(paper, ()))
        of_paper = verdicts.setdefault(paper, {})
        claims = {claim.name: claim for claim in PAPERS[paper][1]}
        names = options.claims if any(options.claims) else [x for x in claims if x not in of_paper]
        for name in names:
            verdict = check(claims[name], lab)
            print(f"{paper}, {verdict_line(verdict)}", flush=True)
            of_paper[name] = verdict_data(paper, [verdict], {})["claims"][0]
            record.write("papers", {"environment": environment, "verdicts": verdicts})


if __name__ == "__main__":
    main()
