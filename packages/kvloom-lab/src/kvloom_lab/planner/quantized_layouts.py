"""Bytes of quantized matrices and experts, by the tensors that a checkpoint has for them.

Decides which settings of a method have a layout that is described here. `settings` are the model's
`quantization_config`; a matrix has `rows` outputs and `columns` inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

Settings = dict[str, Any]


class Layout(NamedTuple):
    """How a method stores weights.

    matrix: returns the bytes of a linear layer's matrix, by settings, rows and columns; None: the
    method leaves them as they are. experts: returns the bytes of an expert's matrix, by rows and
    columns; None: how the method stores experts is not known. problem: returns why settings cannot
    be counted; None if they can. models: the model types that the method exists for; None: all.
    """

    matrix: Callable[[Settings, int, int], int] | None = None
    experts: Callable[[int, int], int] | None = None
    problem: Callable[[Settings], str | None] = lambda settings: None
    models: tuple[str, ...] | None = None


def _bits_and_bytes_4(settings: Settings, rows: int, columns: int) -> int:
    """4-bit codes; a scale for each 64 values, and with double quantization in 8 bits."""
    blocks = ceil(rows * columns / 64)
    scales = 4 * blocks
    if settings.get("bnb_4bit_use_double_quant"):
        # one fp32 scale for 256 scales, their 256 levels, and their mean
        scales = blocks + 4 * ceil(blocks / 256) + 4 * 256 + 4
    return ceil(rows * columns / 2) + scales + 4 * 16  # and the 16 levels


def _bits_and_bytes_8(settings: Settings, rows: int, columns: int) -> int:
    """8-bit codes and an fp32 scale for each row."""
    return rows * columns + 4 * rows


def _awq(settings: Settings, rows: int, columns: int) -> int:
    """Codes and zeros in int32 and fp16 scales of groups of columns (the GEMM layout)."""
    bits, group = settings.get("bits", 4), settings.get("group_size", 128)
    groups = ceil(columns / (columns if group == -1 else group))
    return rows * columns * bits // 8 + groups * rows * bits // 8 + 2 * groups * rows


def _awq_problem(settings: Settings) -> str | None:
    if str(settings.get("version", "gemm")).lower() != "gemm" or settings.get("bits", 4) != 4:
        return "AWQ in another version than gemm, or not in 4 bits, is not counted yet"
    return None


def _gptq(settings: Settings, rows: int, columns: int) -> int:
    """As AWQ, and each column's group."""
    return _awq(settings, rows, columns) + 4 * columns


def _gptq_problem(settings: Settings) -> str | None:
    if settings.get("bits") not in (2, 4, 8):
        return f"GPTQ with bits={settings.get('bits')} has a layout that is not described here"
    if settings.get("modules_in_block_to_quantize"):
        return "GPTQ with modules_in_block_to_quantize is not counted yet"
    if settings.get("lm_head"):
        return "GPTQ of the lm_head is not counted yet"
    return None


def _fp8(settings: Settings, rows: int, columns: int) -> int:
    """fp8 values and an fp32 scale for each block of the matrix (DeepSeek's layout)."""
    high, wide = settings["weight_block_size"]
    return rows * columns + 4 * ceil(rows / high) * ceil(columns / wide)


def _fp8_problem(settings: Settings) -> str | None:
    block = settings.get("weight_block_size")
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        return "fp8 without weight_block_size is not counted yet"
    if settings.get("scale_fmt", "float") not in (None, "float"):
        return f"fp8 with scale_fmt={settings['scale_fmt']!r} is not counted yet"
    if settings.get("activation_scheme", "dynamic") != "dynamic":
        return "fp8 with a static activation_scheme is not counted yet"
    return None


def _mxfp4(rows: int, columns: int) -> int:
    """4-bit floats, and an 8-bit exponent for each block of 32 columns (OCP Microscaling)."""
    return rows * ceil(columns / 32) * (16 + 1)


def _mxfp4_problem(settings: Settings) -> str | None:
    skipped = settings.get("modules_to_not_convert") or ()
    if any(name.rpartition(".")[2] in ("mlp", "experts") for name in skipped):
        return "mxfp4 that leaves experts as they are is not counted yet"
    return None


LAYOUTS = {
    "bitsandbytes-4bit": Layout(_bits_and_bytes_4),
    "bitsandbytes-8bit": Layout(_bits_and_bytes_8),
    "gptq": Layout(_gptq, problem=_gptq_problem),
    "awq": Layout(_awq, problem=_awq_problem),
    "fp8": Layout(_fp8, problem=_fp8_problem),
    "mxfp4": Layout(experts=_mxfp4, problem=_mxfp4_problem, models=("gpt_oss",)),
}
"""By the name of the method."""
