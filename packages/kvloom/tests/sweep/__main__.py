"""Run the sweep: `full` against plain transformers on a small model of every architecture.

    python tests/sweep                # all: writes results/VERSION.json, and what is made of it
    python tests/sweep gpt_oss llama  # some: prints what they give

What is finished is written at once.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from typing import Any

import comparison
import published
import tested
import torch
import transformers
import workers


def main() -> None:
    """Run the sweep over the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="tests/sweep")
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    known = comparison.models()
    unknown = set(arguments.types) - {model_type for model_type, _ in known}
    if unknown:
        parser.error(f"transformers has no causal or image-text model type {sorted(unknown)}")
    chosen = [pair for pair in known if not arguments.types or pair[0] in arguments.types]
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair, records in workers.sweep(chosen, arguments.processes):
        results[pair] = records
        if not arguments.types:
            write([record for pair in known for record in results.get(pair, [])])
    print(dict(Counter(r["outcome"] for records in results.values() for r in records)))
    if not arguments.types:
        published.PAGE.write_text(published.page())
        tested.PATH.write_text(tested.text())


def write(records: list[dict[str, Any]]) -> None:
    """Write the records of this version of transformers, one a line, without times."""
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(_rounded(record)) for record in records)
    target = published.RESULTS / f"{transformers.__version__}.json"
    target.write_text(json.dumps(versions).rstrip("}") + f', "models": [\n{lines}\n]}}\n')


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record that is the same on every machine: two digits, no times."""
    return {
        name: float(f"{value:.1e}") if isinstance(value, float) else value
        for name, value in record.items()
        if name != "seconds"
    }


if __name__ == "__main__":
    main()
