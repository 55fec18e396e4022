"""How kernels are compiled, and how several threads run one.

A kernel is one function of the address of a job: int64 numbers, the first a counter from which
every thread that runs the function takes tasks until none is left. Nobody waits for a thread that
has not begun. The threads are those of torch's own OpenMP, found through libtorch: a second pool
would fight with torch's for the cores, since idle workers spin. Where torch has none (macOS,
Windows), Python's threads run the kernel.

Compiled code is cached on the disk beside the source (`__pycache__`), in the user's cache directory
where that cannot be written, or where NUMBA_CACHE_DIR says; where nothing can be written, every
process compiles. Importing this imports Numba.
"""

from __future__ import annotations

import ctypes
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

seconds: dict[str, float] = {}
"""What compiling (or reading from the disk) took this process, by kernel."""

_SIGNATURE = types.void(types.int64)


class Kernel:
    """A compiled kernel, and how to run it."""

    def __init__(self, fn: Callable, name: str) -> None:
        begin = time.perf_counter()
        try:
            self.code = cfunc(_SIGNATURE, cache=True, error_model="numpy")(fn)
        except RuntimeError:  # no place on the disk can be written
            self.code = cfunc(_SIGNATURE, error_model="numpy")(fn)
        seconds[name] = time.perf_counter() - begin
        self.address = self.code.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.address)

    def run(self, numbers: Sequence[int], counters: int, threads: int) -> array:
        """Run the kernel on a job: its counter, these numbers and more counters.

        Returns the job as the kernel has left it.
        """
        job = array("q", (0, *numbers, *(0,) * counters))
        address, _ = job.buffer_info()
        parallel = _openmp() if threads > 1 else None
        if threads < 2:
            self.call(address)
        elif parallel is not None:
            parallel(self.address, address, threads, 0)
        else:
            others = [_pool().submit(self.call, address) for _ in range(threads - 1)]
            self.call(address)
            for other in others:
                other.result()
        return job


def sources(*modules: ModuleType) -> int:
    """A number that changes with the source of these modules, never 0.

    Numba looks for cached code by a kernel's own source and the constants around it alone.
    """
    texts = (Path(module.__file__ or "").read_bytes() for module in modules)
    return 1 + zlib.crc32(b"".join(texts))


@lru_cache(64)
def bits(x: float) -> int:
    """A float64's bits, as a job holds it."""
    return int(struct.unpack("q", struct.pack("d", x))[0])


@cache
def _openmp() -> Any:
    """Torch's own GOMP_parallel, if it has one."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            parallel = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
            if parallel is not None:
                parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                parallel.restype = None
            return parallel
    return None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="kvloom")


def _at(builder: Any, job: Any, i: Any, kind: Any) -> Any:
    where = builder.add(job, builder.mul(i, ir.Constant(ir.IntType(64), 8)))
    return builder.inttoptr(where, kind.as_pointer())


@intrinsic
def whole(ctx: Any, job: Any, i: Any) -> Any:
    """Number i of a job, an int64."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(_at(b, args[0], args[1], ir.IntType(64)))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def real(ctx: Any, job: Any, i: Any) -> Any:
    """Number i of a job, a float64."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.load(_at(b, args[0], args[1], ir.DoubleType()))

    return types.float64(types.int64, types.int64), codegen


@intrinsic
def store_whole(ctx: Any, address: Any, x: Any) -> Any:
    """Store an int64 at an address."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], ir.IntType(64).as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def count(ctx: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, whichever threads do; returns what it was.

    What a thread has written before it counts, those that count later see.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        where = b.inttoptr(args[0], ir.IntType(64).as_pointer())
        return b.atomic_rmw("add", where, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.int64), codegen
