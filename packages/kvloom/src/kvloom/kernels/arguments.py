"""Named arguments of compiled CPU kernels: one declaration that callers pack and kernels read.

`Arguments` declares the fields of a kernel's arguments once, in order. Callers pack values by name;
a kernel reads the same fields by name from the address of the packed numbers (see
`cpu_runtime.read_arguments`). Decides the memory layout of arguments only. Does not import Numba.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


class Block:
    """Named fields of eight bytes each: `int` or another block.

    dtype: the structured dtype by which a kernel reads them. pack: takes every field as a keyword
    and returns their numbers in order; pass a nested block what its `pack` returned.
    """

    def __init__(self, **fields: type[int] | Block) -> None:
        self._declare(fields)
        self.pack = _function(self.names, f"({_numbers(fields)},)")

    def _declare(self, fields: Mapping[str, type[int] | type[float] | Block]) -> None:
        self.names = tuple(fields)
        self.dtype = np.dtype([(name, _dtype(kind)) for name, kind in fields.items()], align=True)
        self.numbers = self.dtype.itemsize // 8


class Arguments(Block):
    """The block of a kernel, which may have `float` fields too.

    pack: returns bytes, a task counter and then the fields.
    """

    def __init__(self, **fields: type[int] | type[float] | Block) -> None:
        self._declare(fields)
        kinds = "".join(
            "d" if kind is float else "q" * (kind.numbers if isinstance(kind, Block) else 1)
            for kind in fields.values()
        )
        pack = struct.Struct(f"=q{kinds}").pack
        self.pack = _function(self.names, f"pack(0, {_numbers(fields)})", pack=pack)


def _dtype(kind: type[int] | type[float] | Block) -> Any:
    return kind.dtype if isinstance(kind, Block) else np.dtype({int: "i8", float: "f8"}[kind])


def _numbers(fields: Mapping[str, object]) -> str:
    """Return the expression of the numbers of all fields, in order."""
    return ", ".join(f"*{name}" if isinstance(x, Block) else name for name, x in fields.items())


def _function(names: tuple[str, ...], body: str, **scope: Any) -> Callable[..., Any]:
    """Compile a function of keywords, as `collections.namedtuple` does: a loop would be slower."""
    pack: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {body}", scope)
    return pack


DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The codes of tokens' dtypes, as in `simd`."""
META_CODES = {"fp32": 0, "fp16": 1, "bf16": 2, "fp8": 3}
"""The codes of dtypes of scales and zeros, by `Encoding.meta`."""

VECTOR = Block(address=int, batch=int)
MATRIX = Block(address=int, batch=int, head=int)
TOKENS = Block(address=int, batch=int, head=int, row=int)
CHANNELS = Block(address=int, batch=int, head=int, row=int, channel=int)
"""Tensors of 1 to 4 leading dimensions: an address, and the bytes between their neighbors."""

APPEND_SIDE = Block(  # keys or values
    source=CHANNELS,  # [B, Hk, T, D]
    target=CHANNELS,  # [B, Hk, N, D]
    begin=int,  # row of the first token
    begin_per_head=int,  # address of int64 [B, Hk], added to `begin`; or 0
    max_bits=int,  # bits of the largest magnitude that is allowed
)

APPEND = Arguments(  # of the append kernel; strides count numbers, not bytes
    batch=int,
    heads=int,
    tokens=int,
    head_dim=int,
    keys=APPEND_SIDE,
    values=APPEND_SIDE,
    exceeded=int,  # result: not 0 if a number was larger
)


def strides(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """Pack a tensor of `dims` leading dimensions: address and strides in bytes; zeros for None.

    A dimension of size 1 has the stride 0, so that all batch rows or heads share its element.
    """
    if x is None:
        return (0,) * (dims + 1)
    size, shape, stride = x.itemsize, x.shape, x.stride()
    batch = stride[0] * size if shape[0] > 1 else 0
    if dims == 1:
        return x.data_ptr(), batch
    head = stride[1] * size if shape[1] > 1 else 0
    if dims == 2:
        return x.data_ptr(), batch, head
    if dims == 3:
        return x.data_ptr(), batch, head, stride[2] * size
    return x.data_ptr(), batch, head, stride[2] * size, stride[3] * size


class DescribedStorage:
    """The tensors of packed storage that were described last, by identity; keeps none alive."""

    def __init__(self) -> None:
        self._codes: Any = _nothing
        self._scale: Any = _nothing
        self._zero: Any = _nothing

    def holds(self, codes: Tensor, scale: Tensor, zero: Tensor) -> bool:
        """Return whether these are the tensors that `remember` was given."""
        return self._codes() is codes and self._scale() is scale and self._zero() is zero

    def remember(self, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
        """Remember tensors in place of those before."""
        self._codes, self._scale, self._zero = ref(codes), ref(scale), ref(zero)

    def forget(self) -> None:
        """Remember no tensors."""
        self._codes = _nothing


def _nothing() -> None:
    """Stand for a weak reference to no tensor."""


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x with the numbers of its last dimension side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def address(x: Tensor | None) -> int:
    """Return a tensor's address, 0 for None."""
    return 0 if x is None else x.data_ptr()


def padded(x: Tensor) -> Tensor:
    """Return x [..., N] with its last dimension padded to whole vectors of 16."""
    pad = -x.shape[-1] % 16
    return F.pad(x, (0, pad)) if pad else x.contiguous()


def on_cpu(make: Callable[P, T]) -> Callable[P, T]:
    """Make a function's new tensors on the CPU, whatever torch's default device is.

    For tensors that are made once and kept.
    """

    @wraps(make)
    def making(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.device("cpu"):
            return make(*args, **kwargs)

    return making
