"""Run the sweep: `full` against plain transformers on a small model of every architecture.

    python tests/sweep                # all: writes results/VERSION.json and the page
    python tests/sweep gpt_oss llama  # some: prints what they give

Model types run in processes of their own, so that a crash or a hang leaves the others alone. What
is finished is written at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as NoAnswer
from pathlib import Path
from queue import Queue
from typing import Any

import page

LIMIT = 300  # seconds for all forms of a model


def main() -> None:
    """Run the sweep over the models that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], prog="tests/sweep")
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--output", type=Path, help="JSON file; results/VERSION.json by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    import outcome

    known = outcome.models()
    unknown = set(arguments.types) - {model_type for model_type, _ in known}
    if unknown:
        parser.error(f"transformers has no causal or image-text model type {sorted(unknown)}")
    chosen = [pair for pair in known if not arguments.types or pair[0] in arguments.types]
    target = arguments.output
    if target is None and not arguments.types:
        target = page.RESULTS / f"{versions()['transformers']}.json"
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair, records in sweep(chosen, arguments.processes):
        results[pair] = records
        if target is not None:
            write(target, [record for pair in chosen for record in results.get(pair, [])])
    print(dict(Counter(r["outcome"] for records in results.values() for r in records)))
    if arguments.output is None and not arguments.types:
        page.write()


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import torch
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__}


def write(target: Path, records: list[dict[str, Any]]) -> None:
    """Write the records, one a line: what they give, without times."""
    lines = [
        json.dumps({name: value for name, value in record.items() if name != "seconds"})
        for record in records
    ]
    head = json.dumps(versions())[1:-1]
    target.write_text(f'{{{head}, "models": [\n' + ",\n".join(lines) + "\n]}\n")


def sweep(pairs, processes: int):
    """Yield (pair, records) of each (model type, class name) as they finish, with progress."""
    start, idle = time.monotonic(), Queue()
    for _ in range(processes):
        idle.put(None)  # a process starts with its first model

    def run(pair):
        worker = idle.get() or Worker()
        records = worker.records(pair)
        idle.put(worker if worker.alive() else None)
        return records

    with ThreadPoolExecutor(processes) as threads:
        futures = {threads.submit(run, pair): pair for pair in pairs}
        for done, future in enumerate(as_completed(futures), 1):
            pair, records = futures[future], future.result()
            passed = time.monotonic() - start
            left = passed / done * (len(pairs) - done)
            gave = ", ".join(f"{r['form']} {r['outcome']}".strip() for r in records)
            print(f"[{done}/{len(pairs)}, {left:.0f} s left] {' '.join(pair)}: {gave}", flush=True)
            if len(pairs) < 10:
                for record in records:
                    print(f"    {json.dumps(record)}")
            yield pair, records
    while not idle.empty():
        if (worker := idle.get()) is not None:
            worker.process.kill()


class Worker:
    """A process that runs one model after another."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent), "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "KVLOOM_KERNELS": "ref"},
        )  # fmt: skip

    def alive(self) -> bool:
        """Return whether the process can take another model."""
        return self.process.poll() is None

    def records(self, pair: tuple[str, str]) -> list[dict[str, Any]]:
        """Return the records of a model; a record says so if the process ended or took too long."""
        with ThreadPoolExecutor(1) as reader:
            answer = reader.submit(self._ask, pair)
            try:
                return json.loads(answer.result(LIMIT))
            except NoAnswer:
                detail = f"more than {LIMIT} s"
            except (ValueError, OSError):
                detail = f"the process ended, with exit status {self.process.wait()}"
            finally:
                if not answer.done():
                    self.process.kill()
        self.process.kill()
        self.process.wait()
        model_type, class_name = pair
        return [{"type": model_type, "class": class_name, "form": "", "outcome": "crash",
                 "detail": detail, "seconds": 0.0}]  # fmt: skip

    def _ask(self, pair: tuple[str, str]) -> str:
        print(*pair, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()


def work() -> None:
    """Answer each line "TYPE CLASS" of stdin by a line of records on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # models print
    import outcome

    for line in sys.stdin:
        print(json.dumps(outcome.outcomes(*line.split())), file=answers, flush=True)


if __name__ == "__main__":
    main()
