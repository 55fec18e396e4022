"""Bytes of quantized matrices, by the tensors that a checkpoint has for one.

Decides which settings of a method have a layout that is described here.
"""

from __future__ import annotations

from math import ceil
from typing import Any


class Layout:
    """How a method stores a matrix. settings: the model's `quantization_config`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        pass

    @staticmethod
    def problem(settings: dict[str, Any]) -> str | None:
        """Return why these settings cannot be counted; None if they can."""
        return None

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix with `rows` outputs and `columns` inputs."""
        raise NotImplementedError


class _BitsAndBytes4(Layout):
    """4-bit codes; a scale for each 64 values, and with double quantization in 8 bit."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.double = bool(settings.get("bnb_4bit_use_double_quant"))

    def nbytes(self, rows: int, columns: int) -> int:
        blocks = ceil(rows * columns / 64)
        scales = 4 * blocks
        if self.double:  # one fp32 scale for 256 scales, their 256 levels, and their mean
            scales = blocks + 4 * ceil(blocks / 256) + 4 * 256 + 4
        return ceil(rows * columns / 2) + scales + 4 * 16  # and the 16 levels


class _BitsAndBytes8(Layout):
    """8-bit codes and an fp32 scale for each row."""

    def nbytes(self, rows: int, columns: int) -> int:
        return rows * columns + 4 * rows


class _Gptq(Layout):
    """Codes and zeros in int32, fp16 scales of groups of columns, and each column's group."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.bits, self.group = settings["bits"], settings.get("group_size", 128)

    @staticmethod
    def problem(settings: dict[str, Any]) -> str | None:
        if settings.get("bits") not in (2, 4, 8):
            return f"GPTQ with bits={settings.get('bits')} has a layout that is not described here"
        if settings.get("modules_in_block_to_quantize"):
            return "GPTQ with modules_in_block_to_quantize is not counted yet"
        if settings.get("lm_head"):
            return "GPTQ of the lm_head is not counted yet"
        return None

    def nbytes(self, rows: int, columns: int) -> int:
        groups = ceil(columns / (columns if self.group == -1 else self.group))
        return (
            rows * columns * self.bits // 8
            + groups * rows * self.bits // 8
            + 2 * groups * rows
            + 4 * columns
        )


class _Awq(Layout):
    """Codes and zeros in int32 and fp16 scales of groups of columns (the GEMM layout)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.bits, self.group = settings.get("bits", 4), settings.get("group_size", 128)

    @staticmethod
    def problem(settings: dict[str, Any]) -> str | None:
        if str(settings.get("version", "gemm")).lower() != "gemm" or settings.get("bits", 4) != 4:
            return "AWQ in another version than gemm, or not in 4 bits, is not counted yet"
        return None

    def nbytes(self, rows: int, columns: int) -> int:
        groups = ceil(columns / (columns if self.group == -1 else self.group))
        return rows * columns * self.bits // 8 + groups * rows * self.bits // 8 + 2 * groups * rows


class _Fp8(Layout):
    """fp8 values and an fp32 scale for each block of the matrix (DeepSeek's layout)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.block = settings["weight_block_size"]

    @staticmethod
    def problem(settings: dict[str, Any]) -> str | None:
        block = settings.get("weight_block_size")
        if not isinstance(block, (list, tuple)) or len(block) != 2:
            return "fp8 without weight_block_size is not counted yet"
        if settings.get("scale_fmt", "float") not in (None, "float"):
            return f"fp8 with scale_fmt={settings['scale_fmt']!r} is not counted yet"
        if settings.get("activation_scheme", "dynamic") != "dynamic":
            return "fp8 with a static activation_scheme is not counted yet"
        return None

    def nbytes(self, rows: int, columns: int) -> int:
        return rows * columns + 4 * ceil(rows / self.block[0]) * ceil(columns / self.block[1])


LAYOUTS: dict[str, type[Layout]] = {
    "bitsandbytes-4bit": _BitsAndBytes4,
    "bitsandbytes-8bit": _BitsAndBytes8,
    "gptq": _Gptq,
    "awq": _Awq,
    "fp8": _Fp8,
}
"""By the name of the method."""
