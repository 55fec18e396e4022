"""Write a benchmark's figures to results/<machine>/<script>.json, where they can be compared later.

<machine> is the short name of the processor, and of the GPU where one is measured.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvloom.kernels import companion
from kvloom_lab.workload.machine import cpu_name, versions

companion.disable()  # the first round compiles all kernels

RESULTS = Path(__file__).parent / "results"


def options(about: str, **defaults: Any) -> argparse.Namespace:
    """Read the options of a script from the command line.

    about: its docstring. defaults: by name; they decide the types. A list takes several values,
    and False makes a flag.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    for name, default in defaults.items():
        kind: dict[str, Any] = {"action": "store_true"}
        if default is not False:
            kind = {"type": type(default), "default": default}
        if isinstance(default, list):
            kind = {"type": type(default[0]), "default": default, "nargs": "+"}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    return parser.parse_args()


def environment(**more: Any) -> dict[str, Any]:
    """Return the commit, versions and hardware, and further conditions of the figures."""
    return {"commit": git("rev-parse", "HEAD"), **versions(), **more}


def git(*command: str) -> str | None:
    """Return what git prints; None without git or outside a checkout."""
    try:
        done = subprocess.run(
            ["git", *command], cwd=RESULTS.parent, capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def peak_bytes() -> int:
    """Return the most memory that this process has had, as the operating system counts it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """Return the memory that this process has now, as the operating system counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def machine(cpu: str, gpu: str | None = None) -> str:
    """Return the folder name of a machine: "Intel(R) Xeon(R) Processor" is intel-xeon."""
    parts = []
    for name in filter(None, (cpu, gpu)):
        name = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b|@.*", " ", name.lower())
        parts.append(re.sub(r"[^a-z0-9]+", "-", name).strip("-"))
    return "-".join(parts)


def results(gpu: str | None = None) -> Path:
    """Return the folder of this machine's results, and create it."""
    folder = RESULTS / machine(cpu_name(), gpu)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(name: str, figures: dict[str, Any]) -> None:
    """Write figures to results/<machine>/<name>.json."""
    path = results() / f"{name}.json"
    path.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {path}")


def write_samples(name: str, lines: Iterable[dict[str, Any]]) -> None:
    """Write samples to results/<machine>/<name>.samples.jsonl.gz; equal ones give equal bytes."""
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path = results() / f"{name}.samples.jsonl.gz"
    path.write_bytes(gzip.compress(content.encode(), mtime=0))
