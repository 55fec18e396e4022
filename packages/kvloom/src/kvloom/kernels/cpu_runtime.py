"""How CPU kernels are compiled, and how several threads run one.

A kernel is one function of the address of its arguments: a task counter, then the named fields of
`arguments.Arguments`, then more counters. Every thread that runs the function takes tasks from the
first counter until none is left; no thread waits for another to begin. The threads are those of
torch's own OpenMP, found through libtorch: a second pool would compete with torch's for the cores,
because idle workers spin. Where torch has no OpenMP (macOS, Windows), Python threads run it.

Compiled code is cached on disk beside the source (`__pycache__`), in the user's cache directory if
that is not writable, or in NUMBA_CACHE_DIR; if nothing is writable, every process compiles. Decides
nothing about what a kernel computes. Importing this imports Numba.
"""

from __future__ import annotations

import ctypes
import time
import uuid
import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from llvmlite import ir
from numba import njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from .compile_notice import CompileNotice

seconds: dict[str, float] = {}
"""Seconds this process spent to compile a kernel or to read it from disk, by name."""

_SIGNATURE = (types.int64,), types.void
_NOTICE = CompileNotice()


def kernel_step(fn: Callable) -> Any:
    """Compile a function that kernels call, and not Python.

    Without wrappers for Python, it takes two thirds of the time to compile.
    """
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(_with_own_symbol(fn))


def _with_own_symbol(fn: Callable) -> Callable:
    """Give a function a symbol that no other one has, in this process or another.

    Numba numbers functions in each process. Kernels that two processes have compiled can thus
    contain different functions of one name, and a third process would call the first that it loads.
    """
    fn.__qualname__ += f"_{uuid.uuid4().hex}"
    return fn


class _Cache(FunctionCache):
    """Numba's cache on disk, of a kernel by its name and the constants that it closes over.

    Numba's own key has what a function closes over as bytes. The steps of a kernel, which it closes
    over, have other bytes in every process. Numba keeps the variants of a function by number: two
    processes that compile at once give different kernels one number. So each kernel has own files.
    """

    def __init__(self, fn: Callable, name: str) -> None:
        super().__init__(fn)
        self._kernel = name, _constants(fn), _sources()
        base = f"{self._impl.filename_base}-{zlib.crc32(repr(self._kernel).encode()):08x}"
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = IndexDataCacheFile(self._cache_path, base, stamp)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), *self._kernel


class _Code(CFunc):
    """A function that Numba compiles, or reads from its cache on disk."""

    _cache: Any

    def _compile_uncached(self) -> Any:
        with _NOTICE.compiling(self._cache.cache_path):
            return super()._compile_uncached()  # type: ignore[misc]


class Kernel:
    """A compiled kernel of a function of one address.

    name: of the function and its variant; kernels of one function need names of their own.
    """

    def __init__(self, fn: Callable, name: str) -> None:
        begin = time.perf_counter()
        disk_cache = None
        with suppress(RuntimeError):  # no cache directory is writable
            disk_cache = _Cache(fn, name)
        code = _Code(_with_own_symbol(fn), _SIGNATURE, {}, {"error_model": "numpy"})
        self.code = cast(Any, code)
        if disk_cache is not None:
            self.code._cache = disk_cache
        self.code.compile()
        seconds[name] = time.perf_counter() - begin
        self.address = self.code.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.address)

    def run(self, arguments: bytes, counters: int, threads: int) -> array:
        """Run the kernel on packed `Arguments`, and return the numbers as the kernel left them.

        counters: zeros behind the arguments. The first number is the task counter.
        """
        job = array("q", arguments + bytes(8 * counters))
        address, _ = job.buffer_info()
        if threads < 2:
            self.call(address)
        elif (parallel := _openmp()) is not None:
            parallel(self.address, address, threads, 0)
        else:
            others = [_pool().submit(self.call, address) for _ in range(threads - 1)]
            self.call(address)
            for task in others:
                task.result()
        return job


def _constants(fn: Callable) -> tuple[Any, ...]:
    """Return the numbers and names that a function and its compiled steps close over."""
    constants: list[Any] = []
    for cell in fn.__closure__ or ():
        value = cell.cell_contents
        if (step := getattr(value, "py_func", None)) is not None:
            constants.append(_constants(step))
        elif isinstance(value, bool | int | float | str | tuple):
            constants.append(repr(value))
    return tuple(constants)


@cache
def _sources() -> int:
    """Return a number that changes with the source of any kernel: they share functions."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return zlib.crc32(b"".join(path.read_bytes() for path in files))


@cache
def _openmp() -> Any:
    """Return torch's own GOMP_parallel, or None."""
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


@intrinsic
def arguments(ctx: Any, job: Any, layout: Any) -> Any:
    """The arguments behind a task counter as a record; layout: `Arguments.dtype`."""
    record = layout.dtype

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        first = b.add(args[0], ir.Constant(ir.IntType(64), 8))
        return b.inttoptr(first, context.get_value_type(record))

    return record(types.int64, layout), codegen


@njit(inline="always")  # for tensors of any number of dimensions
def at(tensor, b, h):  # type: ignore[no-untyped-def]
    """The address of batch row b and head h of a tensor, packed as `MATRIX` or longer."""
    return tensor.address + b * tensor.batch + h * tensor.head


@intrinsic
def load_int(ctx: Any, address: Any, i: Any) -> Any:
    """Number i of the int64 at an address."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        where = b.add(args[0], b.mul(args[1], ir.Constant(ir.IntType(64), 8)))
        return b.load(b.inttoptr(where, ir.IntType(64).as_pointer()))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def store_int(ctx: Any, address: Any, x: Any) -> Any:
    """Store an int64 at an address."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], ir.IntType(64).as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def count(ctx: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address atomically; return its former value.

    A thread that counts later sees what earlier threads wrote before they counted.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        where = b.inttoptr(args[0], ir.IntType(64).as_pointer())
        return b.atomic_rmw("add", where, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.int64), codegen
