"""Processes that compare models, so that a crash or a hang of one leaves the others alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any

import comparison
import torch

CONTEXT = multiprocessing.get_context("spawn")
LIMIT = 300  # seconds for all forms of a model
Pair = tuple[str, str]  # a model type and a class name
Records = list[dict[str, Any]]


def sweep(pairs: list[Pair], processes: int) -> Iterator[tuple[Pair, Records]]:
    """Yield each pair and its records when they are known, and print the progress."""
    start = time.monotonic()
    idle: Queue[Worker | None] = Queue()
    for _ in range(processes):
        idle.put(None)  # a process starts with its first model

    def run(pair: Pair) -> Records:
        worker = idle.get() or Worker()
        records = worker.records(pair)
        idle.put(worker if worker.process.is_alive() else None)
        return records

    with ThreadPoolExecutor(processes) as threads:
        futures = {threads.submit(run, pair): pair for pair in pairs}
        for done, future in enumerate(as_completed(futures), 1):
            pair, records = futures[future], future.result()
            left = (time.monotonic() - start) / done * (len(pairs) - done)
            gave = ", ".join(f"{r['form']} {r['outcome']}".strip() for r in records)
            print(f"[{done}/{len(pairs)}, {left:.0f} s left] {' '.join(pair)}: {gave}", flush=True)
            if len(pairs) < 10:
                for record in records:
                    print(f"    {json.dumps(record)}")
            yield pair, records


class Worker:
    """A process that compares one model after another; it ends with this process."""

    def __init__(self) -> None:
        self.connection, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def records(self, pair: Pair) -> Records:
        """Return the records of a model; a record says so if the process ended or took too long."""
        try:
            self.connection.send(pair)
            if self.connection.poll(LIMIT):
                return self.connection.recv()
            detail = f"more than {LIMIT} s"
        except (EOFError, OSError):
            self.process.join()
            detail = f"the process ended, with exit status {self.process.exitcode}"
        self.process.kill()
        self.process.join()
        return [{**comparison.start_of_record(*pair), "outcome": "crash", "detail": detail}]


def work(connection: Connection) -> None:
    """Answer each pair by its records, without what models print."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.environ["KVLOOM_KERNELS"] = "ref"
    torch.set_num_threads(1)
    while True:
        connection.send(comparison.outcomes(*connection.recv()))
