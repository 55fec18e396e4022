"""Every Triton kernel of kvloom on this machine's GPU: correctness, speed, and the papers' tables.

    python benchmarks/gpu.py                       # all of it, 8 minutes at most
    python benchmarks/gpu.py --sections check,attend
    python benchmarks/gpu.py --dry-run             # no GPU: all of it in Triton's interpreter, tiny

Sections: check (every kernel against the reference), attend (a decode step's attention by context
and batch), kernels (the others), trained (a real model, with --trained), generate, throughput,
kivi, minikv, keyformer, clusterkv (whole models with random weights; nothing is downloaded).
Figures are printed when they are measured, and written to benchmarks/results/<machine>/gpu.json
after every section; omitted measurements are listed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

TOTAL = 465  # seconds
SECONDS = {  # the limit of a section; its last row may exceed it
    "copy": 5, "check": 90, "attend": 45, "kernels": 25, "trained": 60, "generate": 90,
    "throughput": 70, "kivi": 50, "minikv": 60, "keyformer": 45, "clusterkv": 50,
}  # fmt: skip
NO_GPU = "without CUDA there is nothing to measure; --dry-run runs all of it in the interpreter"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sections", default=",".join(SECONDS), help="some of " + ", ".join(SECONDS)
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, without a GPU")
    parser.add_argument("--fast", action="store_true", help="the smallest set of cases of check")
    parser.add_argument(
        "--trained", type=Path, metavar="FOLDER", help="of gpu_trained.py, for section trained"
    )
    parser.add_argument(
        "--out", type=Path, help="the file to write, instead of results/<machine>/gpu.json"
    )
    options = parser.parse_args(words)
    sections = [name.strip() for name in options.sections.split(",")]
    if options.trained is None:
        sections = [name for name in sections if name != "trained"]
    unknown = sorted(set(sections) - set(SECONDS))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECONDS)}")
    if options.dry_run:  # before Triton is imported
        os.environ.update(TRITON_INTERPRET="1", KVLOOM_KERNELS="gpu")

    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device here: {NO_GPU}.")
        return 1
    return _run(sections, options)


def _run(sections: list[str], options: argparse.Namespace) -> int:
    import gpu_check
    import gpu_papers
    import gpu_speed
    import gpu_trained
    import record
    from gpu_clock import Bench

    bench = Bench(options.dry_run)
    device = _device(bench)
    if options.out is not None:
        out = options.out
    elif options.dry_run:
        out = Path(tempfile.gettempdir()) / "kvloom-gpu-dry-run.json"
    else:
        out = record.results(device["gpu"]) / "gpu.json"
    parts: dict[str, Callable[[Bench], None]] = {
        "copy": gpu_speed.bandwidth,
        "check": lambda bench: gpu_check.check(bench, options.fast),
        "attend": gpu_speed.attend,
        "kernels": gpu_speed.kernels,
        "trained": lambda bench: gpu_trained.trained(bench, options.trained),
    }
    work = {name: parts.get(name) or getattr(gpu_papers, name) for name in SECONDS}
    environment = record.environment(**device)
    print("  ".join(f"{k} {v}" for k, v in environment.items()))
    took: dict[str, float] = {}
    begin = time.perf_counter()
    if "copy" not in sections and {"attend", "kernels"} & set(sections):
        sections = ["copy", *sections]
    for name in sections:
        print(f"\n== {name}")
        start = time.perf_counter()
        left = TOTAL - (start - begin)
        bench.begin(name, min(SECONDS[name], left))
        with bench.guarded(name):
            work[name](bench)
        took[name] = round(time.perf_counter() - start, 1)
        _write(out, environment, took, bench)
    print(f"\n{time.perf_counter() - begin:.0f} s in all; written: {out}")
    if bench.skipped:
        print(f"no time for {len(bench.skipped)}: " + "; ".join(bench.skipped))
    failed = [row.name for row in bench.rows if row.figures.get("ok") is False]
    if failed:
        print(f"NOT CORRECT: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _device(bench: Any) -> dict[str, Any]:
    import torch
    import triton

    from kvloom.kernels import dispatch

    found: dict[str, Any] = {"triton": triton.__version__, "kernels": dispatch.setting()}
    if not bench.dry:
        about = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": about.name, "memory GB": round(about.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
        }  # fmt: skip
    return found


def _write(out: Path, environment: dict[str, Any], took: dict[str, float], bench: Any) -> None:
    from kvloom.kernels import dispatch

    out.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "environment": environment,
        "dry run": bench.dry,
        "seconds": took,
        "skipped": bench.skipped,
        "left to the reference": {
            f"{operation}: {why}": times
            for (operation, backend, why), times in dispatch.ran.items()
            if backend == "ref"
        },
        "rows": [asdict(row) for row in bench.rows],
    }
    out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
