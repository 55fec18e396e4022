"""How CPU kernels are compiled, and how several threads run one.

A kernel is one function of the address of its arguments: a task counter, then the named fields of
`arguments.Arguments`, then more counters. Every thread that runs the function takes tasks from the
first counter until none is left; no thread waits for another to begin. The threads are those of
torch's own OpenMP, found through libtorch: a second pool would compete with torch's for the cores,
because idle workers spin. Where torch has no OpenMP (macOS, Windows), Python threads run it.

Compiled code is cached on disk in the first of these folders that is writable: NUMBA_CACHE_DIR,
beside the source (`__pycache__`), the user's cache directory, a private folder among temporary
files; if none is, every process compiles. The first kernel that a process compiles into a folder
removes those of former versions of the source. Decides nothing about what a kernel computes.
Importing this imports Numba.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import sys
import tempfile
import time
import uuid
import zlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, ClassVar, cast

import torch
from llvmlite import ir
from numba import njit, types
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    _CacheLocator,
)
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from . import companion

seconds: dict[str, float] = {}
"""Seconds this process spent to compile a kernel or to read it from disk, by name."""

_SIGNATURE = types.void(types.int64)
_LONGEST_S = 120.0  # to wait for another process


class CompileNotice:
    """Prints that kernels are being compiled, once this has taken `after_s` seconds in all.

    Kernels that are read from disk need no line.
    """

    def __init__(self, after_s: float = 2.0) -> None:
        self.left_s = after_s
        self.printed = False

    @contextmanager
    def compiling(self, folder: str | None) -> Iterator[None]:
        """Compile a kernel within the block; a thread prints the notice while it runs.

        folder: where the compiled kernel is stored; None: nowhere.
        """
        timer = Timer(self.left_s, self._print, [folder])
        timer.daemon = True
        begin = time.perf_counter()
        if not self.printed:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.left_s = max(0.0, self.left_s - (time.perf_counter() - begin))

    def _print(self, folder: str | None) -> None:
        self.printed = True
        later = f"later runs load them from {folder}"
        if folder is None:
            later = "set NUMBA_CACHE_DIR to a writable folder, so that later runs load them"
        print(f"kvloom: compiling kernels for this processor; {later}", file=sys.stderr, flush=True)


_NOTICE = CompileNotice()


def kernel_step(fn: Callable) -> Any:
    """Compile a function that kernels call, and not Python.

    It gets no wrappers for Python, and no machine code of its own.
    """
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return njit(pipeline_class=_StepCompiler, **options)(_with_own_symbol(fn))


class _StepCompiler(Compiler):
    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        super().__init__(typing, target, _StepLibrary(target.codegen(), "step"), *rest)


class _StepLibrary(JITCodeLibrary):
    """The LLVM code of a step, which is linked into kernels, and optimized there.

    Numba's own library would optimize it, with all that it calls, and translate it to machine code.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code."""
        return 0

    @property
    def codegen(self) -> _StepLibrary:
        """What Numba gives the environment of machine code to, by `set_env`."""
        return self

    def set_env(self, *_: Any) -> None:
        """Ignore the environment, which only Python's wrappers read."""


def _with_own_symbol(fn: Callable) -> Callable:
    """Give a function a symbol that no other one has, in this process or another.

    Numba numbers functions in each process. Kernels that two processes have compiled can thus
    contain different functions of one name, and a third process would call the first that it loads.
    """
    fn.__qualname__ += f"_{uuid.uuid4().hex}"
    return fn


class _TemporaryFolder(_CacheLocator):
    """A folder among temporary files that no other user can write to: its files become code."""

    @classmethod
    def from_function(cls, fn: Any, path: str) -> Any:
        user = os.getuid() if hasattr(os, "getuid") else None
        locator = cls()
        locator.folder = os.path.join(tempfile.gettempdir(), f"kvloom-kernels-{user}")
        try:
            os.makedirs(locator.folder, mode=0o700, exist_ok=True)
            found = os.lstat(locator.folder)
            locator.ensure_cache_path()
        except OSError:
            return None
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
        return locator if user is None or (private and found.st_uid == user) else None

    def get_cache_path(self) -> str:
        """Return the folder."""
        return self.folder

    def get_source_stamp(self) -> Any:
        """Return what changes with the source."""
        return _sources()

    def get_disambiguator(self) -> str:
        """Return what distinguishes functions of one name: nothing, a kernel's file has its own."""
        return ""


class _CacheFiles(CompileResultCacheImpl):
    _locator_classes: ClassVar[list[Any]] = [
        *CompileResultCacheImpl._locator_classes,
        _TemporaryFolder,
    ]


class _Cache(FunctionCache):
    """Numba's cache on disk, of a kernel by its name and the constants that it closes over.

    Numba's own key has what a function closes over as bytes. The steps of a kernel, which it closes
    over, have other bytes in every process. Numba keeps the variants of a function by number: two
    processes that compile at once give different kernels one number. So each kernel has own files.
    """

    _impl_class = _CacheFiles

    def __init__(self, fn: Callable, name: str) -> None:
        super().__init__(fn)
        self._kernel = name, _constants(fn), _sources()
        constants = zlib.crc32(repr(self._kernel).encode())
        base = f"{self._impl.filename_base}-{_sources():08x}-{constants:08x}"
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = IndexDataCacheFile(self._cache_path, base, stamp)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), *self._kernel

    def compile(self, code: Any) -> None:
        """Compile the kernel, or read it from disk; wait while another process compiles it.

        Raises `companion.Compiling` where the caller need not wait.
        """
        key = self._index_key(_SIGNATURE, cpu_target.target_context.codegen())
        name = self._cache_file._load_index().get(key)
        if name is not None and Path(self.cache_path, name).exists():
            code.compile()
            return
        companion.start()
        if companion.defers():
            raise companion.Compiling("its kernel is being compiled by another process")
        longest_s = 0.0 if companion.rehearsing() else _LONGEST_S
        with (
            _NOTICE.compiling(self.cache_path),
            _locked(self._cache_file._index_path, longest_s) as mine,
        ):
            if companion.rehearsing() and not mine:
                raise companion.Compiling("its kernel is being compiled by another process")
            if not isinstance(self._impl.locator, _TemporaryFolder):  # which versions may share
                remove_former(self.cache_path, _sources())
            code.compile()


@cache
def remove_former(folder: str, version: int) -> None:
    """Remove the kernels of other versions of the source from a folder, once in a process."""
    kernels = re.compile(r".+\.py\d+\w*-([0-9a-f]{8})(-[0-9a-f]{8})?\.(nbi|nbi\.lock|\d+\.nbc)")
    with suppress(OSError):
        for name in os.listdir(folder):
            match = kernels.fullmatch(name)
            if match is not None and match[1] != f"{version:08x}":
                with suppress(OSError):  # another process has removed it
                    os.unlink(os.path.join(folder, name))


@contextmanager
def _locked(path: str, longest_s: float) -> Iterator[bool]:
    """Hold a lock beside a file within the block; wait for it while another process holds it.

    longest_s: how long to wait; then, and where the system or the folder has no such locks, the
    block runs without one. Yields whether it has the lock.
    """
    with ExitStack() as stack:
        yield _lock(stack, path, time.monotonic() + longest_s)


def _lock(stack: ExitStack, path: str, end: float) -> bool:
    """Take the lock until the stack is closed; return False after the time `end`, or without it."""
    try:
        import fcntl

        file = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        stack.callback(os.close, file)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
    except (ImportError, OSError):
        return False


class Kernel:
    """A compiled kernel of a function of one address.

    name: of the function and its variant; kernels of one function need names of their own.
    """

    def __init__(self, fn: Callable, name: str) -> None:
        begin = time.perf_counter()
        disk_cache = None
        with suppress(RuntimeError):  # no cache directory is writable
            disk_cache = _Cache(fn, name)
        code = CFunc(
            _with_own_symbol(fn),
            (_SIGNATURE.args, _SIGNATURE.return_type),
            {},
            {"error_model": "numpy"},
        )
        self.code = cast(Any, code)
        if disk_cache is None:
            with _NOTICE.compiling(None):
                self.code.compile()
        else:
            self.code._cache = disk_cache
            disk_cache.compile(self.code)
        seconds[name] = time.perf_counter() - begin
        self.address = self.code.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.address)

    def run(self, arguments: bytes, counters: int, threads: int) -> array:
        """Run the kernel on packed `Arguments`, and return the numbers as the kernel left them.

        counters: zeros after the arguments. The first number is the task counter.
        """
        memory = array("q", arguments + bytes(8 * counters))
        address, _ = memory.buffer_info()
        if threads < 2:
            self.call(address)
        elif (parallel := _openmp()) is not None:
            parallel(self.address, address, threads, 0)
        else:
            others = [_pool().submit(self.call, address) for _ in range(threads - 1)]
            self.call(address)
            for task in others:
                task.result()
        return memory


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
    folder = Path(__file__).parent
    files = [folder.parent / "encoding.py", *sorted(folder.rglob("*.py"))]
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
def read_arguments(ctx: Any, args: Any, layout: Any) -> Any:
    """Read the arguments behind a task counter as a record; layout: `Arguments.dtype`."""
    record = layout.dtype

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        first = b.add(args[0], ir.Constant(ir.IntType(64), 8))
        return b.inttoptr(first, context.get_value_type(record))

    return record(types.int64, layout), codegen


@njit(inline="always")  # for tensors of any number of dimensions
def head_address(tensor, b, h):  # type: ignore[no-untyped-def]
    """Return the address of batch row b and head h of a tensor, packed as `MATRIX` or longer."""
    return tensor.address + b * tensor.batch + h * tensor.head


@intrinsic
def load_int(ctx: Any, address: Any, i: Any) -> Any:
    """Load number i of the int64 at an address."""

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
