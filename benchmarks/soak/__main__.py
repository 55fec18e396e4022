"""Run the reliability campaign, print a table, and write results/<machine>/soak.json.

    python -m soak [--minutes 180] [--jobs 2] [--only laws hostile] [--seed 0]

Each campaign runs in a process of its own, and gets its share of the minutes of all jobs. A process
that ends early, or does not end, is a failure. Finished rows are written at once; rows of campaigns
that are not run again stay in the file. `--only laws --seed N` goes on with a row of N cases. Exits
with status 1 if a case fails. Runs of less than 30 minutes write soak_quick.json.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("KVLOOM_KERNELS", "ref")
import record

from .tally import Tally

SHARES = {
    "laws": 0.48, "endurance": 0.14, "hostile": 0.09, "faults": 0.09, "platforms": 0.09,
    "forged": 0.04, "threads": 0.03, "values": 0.02, "batches": 0.02,
}  # fmt: skip
"""The campaigns, and what share of the time each may take."""


def worker(name: str, seconds: float, seed: int, out: Path) -> None:
    """Run one campaign in this process."""
    faulthandler.enable()
    torch.set_num_threads(1)
    tally = Tally(name, seconds, seed, out.with_suffix(".case"))
    campaign = importlib.import_module(f"soak.{name}")
    gc.freeze()  # what the imports have made is not searched again and again
    campaign.run_all(tally)
    out.write_text(json.dumps(tally.row()))


def start(name: str, seconds: float, seed: int, folder: Path) -> subprocess.Popen:
    """Start the process of a campaign."""
    command = [sys.executable, "-m", "soak", "--worker", name, str(seconds), str(seed)]
    return subprocess.Popen([*command, str(folder / f"{name}.json")])


def finished(name: str, process: subprocess.Popen, began: float, folder: Path) -> dict[str, Any]:
    """Return the row of a campaign whose process has ended."""
    out = folder / f"{name}.json"
    if out.exists() and process.returncode == 0:
        return json.loads(out.read_text())
    case = out.with_suffix(".case")
    where = case.read_text() if case.exists() else "its beginning"
    text = f"the process ended with status {process.returncode} in {where}"
    seconds = round(time.monotonic() - began, 1)
    return {
        "campaign": name, "cases": 0, "failures": 1, "seconds": seconds, "figures": {},
        "failed": [text],
    }  # fmt: skip


def continued(former: dict[str, Any] | None, row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a row with the cases of a former one, too, if it begins where that ended."""
    if former is None or row["campaign"] != "laws" or seed == 0 or former["cases"] != seed:
        return row
    sums = {name: former[name] + row[name] for name in ("cases", "failures", "seconds", "failed")}
    operations = former["figures"]["operations"] + row["figures"].get("operations", 0)
    return {
        **row, **sums, "figures": {"operations": operations},
        "earlier": [*former.get("earlier", []), former["environment"]],
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    figures = ", ".join(f"{name} {value}" for name, value in row["figures"].items())
    return (
        f"{row['campaign']:<11}{row['cases']:>10,}{row['failures']:>10}{row['seconds']:>10.0f}"
        f"  {figures}"
    )


def main() -> None:
    """Run the campaigns, a few at a time."""
    options = record.options(__doc__, minutes=180.0, jobs=2, seed=0, only=list(SHARES))
    name = "soak" if options.minutes >= 30 else "soak_quick"
    path = record.results() / f"{name}.json"
    former = json.loads(path.read_text())["campaigns"] if path.exists() else []
    rows = {row["campaign"]: row for row in former}
    budget = 60 * options.minutes * options.jobs
    waiting = sorted(options.only, key=lambda name: -SHARES[name])
    running: dict[str, tuple[subprocess.Popen, float, float]] = {}
    failed = 0
    print(f"{'campaign':<11}{'cases':>10}{'failures':>10}{'seconds':>10}  figures", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        while waiting or running:
            while waiting and len(running) < options.jobs:
                campaign = waiting.pop(0)
                seconds = budget * SHARES[campaign]
                process = start(campaign, seconds, options.seed, folder)
                running[campaign] = process, time.monotonic(), 1.5 * seconds + 600
            time.sleep(0.2)
            for campaign, (process, began, limit) in list(running.items()):
                if process.poll() is None and time.monotonic() - began > limit:
                    process.kill()
                    process.wait()
                if process.returncode is None:
                    continue
                del running[campaign]
                row = finished(campaign, process, began, folder)
                failed += row["failures"]
                row |= {"minutes": options.minutes, "jobs": options.jobs}
                row["environment"] = record.environment()
                row = rows[campaign] = continued(rows.get(campaign), row, options.seed)
                print("\n".join([line(row), *(f"  {text}" for text in row["failed"])]), flush=True)
                ordered = [rows[x] for x in SHARES if x in rows]
                path.write_text(json.dumps({"campaigns": ordered}, indent=2) + "\n")
    print(f"{failed} failures; written: {path}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        campaign, seconds, seed, out = sys.argv[2:]
        worker(campaign, float(seconds), int(seed), Path(out))
    else:
        main()
