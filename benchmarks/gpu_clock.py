"""What the sections of `gpu.py` share: the device, the clock, the rows.

A figure is the median of calls timed by CUDA events, each after a write over twice the L2 cache, so
that nothing is found there. On a machine without CUDA (a dry run) the same calls are made once and
timed by the host: to see that they run, not how fast.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Row:
    """One line: what was measured, its figures, what the paper says of it, and remarks."""

    section: str
    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    paper: str = ""
    note: str = ""

    def __str__(self) -> str:
        shown = "  ".join(f"{k} {_short(v)}" for k, v in self.figures.items())
        paper = f"  | paper: {self.paper}" if self.paper else ""
        return f"{self.name:<44} {shown}{paper}{'  | ' + self.note if self.note else ''}"


class Bench:
    """The device, how large everything is, and the time that a section has left."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        self.section = ""
        self.end = 0.0
        self.copy_gb_s = self.memory_gb = 0.0
        self.models: dict[str, Any] = {}
        if dry:
            return
        about = torch.cuda.get_device_properties(0)
        self.memory_gb = about.total_memory / 1e9
        l2 = getattr(about, "L2_cache_size", 64 << 20)
        self._flush = torch.empty(2 * l2, dtype=torch.uint8, device=self.device)

    def begin(self, section: str, seconds: float) -> None:
        """Start a section that may take so long."""
        self.section, self.end = section, time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds that the running section has left."""
        return self.end - time.perf_counter()

    def skip(self, name: str, seconds: float = 0.0) -> bool:
        """Whether there is no time for something that takes so long; it is noted then."""
        if self.dry or self.left > seconds:
            return False
        self.skipped.append(f"{self.section}: {name}")
        return True

    def row(self, name: str, figures: dict[str, Any], paper: str = "", note: str = "") -> Row:
        """Add a row and print it."""
        row = Row(self.section, name, figures, paper, note)
        self.rows.append(row)
        print(row, flush=True)
        return row

    @contextmanager
    def guarded(self, name: str, paper: str = "") -> Iterator[None]:
        """Note an error in a row of its own and go on; free what is left behind."""
        try:
            yield
        except torch.OutOfMemoryError:
            traceback.print_exc(limit=-4)
            self.row(name, {}, paper, "out of memory")
        except Exception as error:  # a row must not end the run
            if self.dry:
                raise
            self.row(name, {}, paper, f"{type(error).__name__}: {str(error)[:200]}")
        finally:
            self.free()

    def free(self) -> None:
        """Give unused memory back."""
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def limited(self, gb: float) -> Iterator[None]:
        """Let tensors take so much memory and no more, where there is as much."""
        if self.dry or self.memory_gb <= gb:
            yield
            return
        whole, self.memory_gb = self.memory_gb, gb
        torch.cuda.set_per_process_memory_fraction(gb / whole)
        try:
            yield
        finally:
            self.memory_gb = whole
            torch.cuda.set_per_process_memory_fraction(1.0)

    def room_gb(self) -> float:
        """Memory that is left, in GB."""
        if self.dry:
            return 0.001
        return self.memory_gb - self.held_gb()

    def held_gb(self) -> float:
        """Memory that tensors take, in GB."""
        return 0.0 if self.dry else torch.cuda.memory_allocated() / 1e9

    def peak_gb(self) -> float:
        """The most memory that tensors took since `free`, in GB."""
        return 0.0 if self.dry else torch.cuda.max_memory_allocated() / 1e9

    def now(self) -> float:
        """Seconds, once the device is done."""
        if not self.dry:
            torch.cuda.synchronize()
        return time.perf_counter()

    def kernels_ms(self, call: Callable[[], object], repeats: int = 15) -> float:
        """The median time of a call's kernels in ms, replayed as a CUDA graph: without Python."""
        if self.dry:
            return self.ms(call)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.ms(graph.replay, repeats)

    def ms(self, call: Callable[[], object], repeats: int = 15) -> float:
        """The median time of a call in ms, the cache flushed before each."""
        if self.dry:
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        for _ in range(3):
            call()
        times = []
        for _ in range(repeats):
            self._flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            times.append((start, stop))
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in times)


def _short(x: Any) -> str:
    if isinstance(x, float):
        return f"{x:.3g}" if abs(x) < 100 else f"{x:,.0f}"
    return str(x)
