"""Write a benchmark's figures where they can be compared later, and print them."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import kvloom
from kvloom.report.machine import cpu_name

RESULTS = Path(__file__).parent / "results"


def environment(**more: Any) -> dict[str, Any]:
    """Versions and hardware, and what else the figures depend on."""
    return {
        "python": platform.python_version(),
        "kvloom": kvloom.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        **more,
    }


def write(name: str, figures: dict[str, Any]) -> None:
    """Store figures as results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"written: benchmarks/results/{name}.json")
