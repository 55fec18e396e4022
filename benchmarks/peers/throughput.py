"""Output tokens per second of as many requests as fit into equal memory, in other engines.

    python benchmarks/peers/throughput.py vllm|llama.cpp [--rounds 5]

DynamicCache and `near-lossless` run as in `kvloom bench throughput`, each row of the engine in a
process of its environment, all in turns: vLLM in `.venv-vllm`, which `make .venv-vllm/ready` makes,
llama.cpp in the environment of `run.py`. Figures have the schema of `kvloom bench throughput
--json`; ratios are to DynamicCache. The texts are other pieces of the same text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import run
import torch

import record
from kvloom.recipe import resolve
from kvloom_lab.bench import serving, throughput
from kvloom_lab.models import load_config_and_tokenizer, load_model, located

MODEL, DTYPE, PROMPT, NEW = "smollm2", "bfloat16", 1024, 64
MEMORY = 96 << 20
SMALLEST = 8  # no peer's cache is so many times smaller than an exact one
UNPREDICTED = 1  # bytes of a request: the planner knows no peer's cache
ROWS = {
    "vllm": ("vLLM", "vLLM fp8", "vLLM near-lossless"),
    "llama.cpp": ("llama.cpp f16", "llama.cpp q4_0"),
}


def python(peer: str, venvs: Path) -> Path:
    """Return the Python of a peer's environment."""
    if peer in run.PEERS:
        return run.environment(peer, run.PEERS[peer], venvs / f".venv-{peer}")
    found = run.ROOT / ".venv-vllm/bin/python"
    if not found.exists():
        sys.exit(f"there is no {found}; run: make .venv-vllm/ready")
    return found


@torch.inference_mode()
def exact_distributions(ids: torch.Tensor) -> np.ndarray:
    """Return log-probabilities of exact attention after the tokens of answers [B, new - 1, V]."""
    model = load_model(MODEL, DTYPE)
    rows = [model(row[None, :-1], use_cache=False, logits_to_keep=NEW - 1).logits for row in ids]
    return torch.log_softmax(torch.cat(rows).float(), -1).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peer", choices=ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--venvs", type=Path, default=run.HERE, help="Folder for environments.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = options.peer.replace(".", "_")
    config, tokenizer = load_config_and_tokenizer(MODEL, DTYPE)
    (requests,) = throughput.requests_of(config, tokenizer, DTYPE, MEMORY, [(PROMPT, NEW)])
    jobs = throughput.jobs(requests, [resolve("near-lossless")], ["dynamic"])
    own = throughput.measure(jobs, (MODEL, DTYPE, 1), options.rounds, lambda job, units: None)
    texts = SMALLEST * (MEMORY // requests.exact_nbytes(PROMPT + NEW))  # as many as fit are read
    peers = [requests.job(row, serving.DYNAMIC, UNPREDICTED, texts) for row in ROWS[options.peer]]
    measured: list[throughput.Measured] = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        np.save(work / "exact.npy", exact_distributions(peers[0].ids[: serving.KL_ROWS]))
        command = [python(options.peer, options.venvs), run.HERE / f"{name}_throughput.py"]
        for i in range(options.rounds):
            measured += islice(own, len(jobs))
            for job in peers:
                settings: dict[str, Any] = {
                    "row": job.name, "model": located(MODEL), "memory": MEMORY, "prompt": PROMPT,
                    "new": NEW, "first": i == 0, "ids": job.ids.tolist(),
                }  # fmt: skip
                (work / "job.json").write_text(json.dumps(settings))
                subprocess.run([*command, work], check=True)
                figures = json.loads((work / "figures.json").read_text())
                versions |= figures.pop("versions")
                measured.append((job, serving.RunFigures(**figures)))
            write(name, throughput.make_rows([*jobs, *peers], measured),
                  {**versions, "memory": MEMORY, "rounds": i + 1})  # fmt: skip


def write(name: str, rows: list[throughput.ThroughputRow], conditions: dict[str, Any]) -> None:
    """Write the rows of all rounds until now."""
    for row in rows:
        if row.predicted_bytes == UNPREDICTED:
            row.predicted_bytes = None
        print(row.name, row.batch, row.processor_tokens_s, row.times_dynamic, row.kl, flush=True)
    settings = {"threads": 1, "dtype": DTYPE, "model": MODEL, **conditions}
    figures = {"environment": record.environment(**settings), "rows": [asdict(x) for x in rows]}
    record.write(f"throughput_{name}", figures)


if __name__ == "__main__":
    main()
