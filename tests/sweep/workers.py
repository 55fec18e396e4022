"""Processes that compare models, so that a crash or a hang of one leaves the others alone.

python tests/sweep/workers.py  # such a process: answers each line "TYPE CLASS" by its records
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as NoAnswer
from queue import Queue
from typing import Any

import comparison

LIMIT = 300  # seconds for all forms of a model


def sweep(
    pairs: list[tuple[str, str]], processes: int
) -> Iterator[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """Yield (pair, records) of each (model type, class name) as they finish, with progress."""
    start = time.monotonic()
    idle: Queue[Worker | None] = Queue()
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
            [sys.executable, __file__],
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
        return [{**comparison.start_of_record(*pair), "outcome": "crash", "detail": detail}]

    def _ask(self, pair: tuple[str, str]) -> str:
        print(*pair, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()


def work() -> None:
    """Answer each line "TYPE CLASS" of stdin by a line of records on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # models print
    for line in sys.stdin:
        print(json.dumps(comparison.outcomes(*line.split())), file=answers, flush=True)


if __name__ == "__main__":
    work()
