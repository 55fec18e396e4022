"""Hardware presets: GPUs by their vendor's data sheets."""

from __future__ import annotations

from .hardware import SOURCES, Hardware


def _preset(name: str, gb: int, gb_s: float, tflops: float, source: str) -> Hardware:
    sources = {**SOURCES, "rates": source}
    return Hardware(name, gb * 10**9, gb_s * 1e9, tflops * 1e12, sources)


PRESETS = {
    one.name: one
    for one in (
        _preset(
            "h100", 80, 3350, 989.4,
            "NVIDIA H100 data sheet, SXM: 80 GB, 3.35 TB/s, 1,979 TFLOPS in bf16 with sparsity, "
            "half of it without",
        ),
        _preset(
            "a100", 80, 2039, 312,
            "NVIDIA A100 data sheet, SXM 80 GB: 2,039 GB/s, 312 TFLOPS in bf16",
        ),
        _preset(
            "rtx4090", 24, 1008, 165.2,
            "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: 24 GB, 1,008 GB/s, 165.2 "
            "TFLOPS in fp16 with fp32 accumulation",
        ),
    )
}  # fmt: skip
