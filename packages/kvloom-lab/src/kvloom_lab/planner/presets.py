"""Hardware presets: GPUs by their vendor's data sheets, rates of dense products in 16 bits."""

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
            "h200", 141, 4800, 989.4,
            "NVIDIA H200 data sheet, SXM: 141 GB, 4.8 TB/s, 1,979 TFLOPS in bf16 with sparsity, "
            "half of it without",
        ),
        _preset(
            "b200", 180, 8000, 2250,
            "NVIDIA DGX B200 data sheet, one of eight GPUs: 1,440 GB and 64 TB/s together; NVIDIA "
            "Blackwell architecture brief, HGX B200: 4.5 PFLOPS in bf16 with sparsity, half of it "
            "without",
        ),
        _preset(
            "a100", 80, 2039, 312,
            "NVIDIA A100 data sheet, SXM 80 GB: 2,039 GB/s, 312 TFLOPS in bf16",
        ),
        _preset(
            "mi300x", 192, 5300, 1307.4,
            "AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s, 1,307.4 TFLOPS in bf16",
        ),
        _preset(
            "rtx4090", 24, 1008, 165.2,
            "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: 24 GB, 1,008 GB/s, 165.2 "
            "TFLOPS in fp16 with fp32 accumulation",
        ),
        _preset(
            "rtx5090", 32, 1792, 209.5,
            "NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5090: 32 GB, 1,792 "
            "GB/s, 209.5 TFLOPS in fp16 with fp32 accumulation",
        ),
        _preset(
            "m4-max", 128, 546, 16,
            "Apple, M4 Max with 40 GPU cores: up to 128 GB shared with the system, 546 GB/s; Apple "
            "states no rate: 40 cores with 128 multiply-adds at about 1.6 GHz are 16 TFLOPS",
        ),
    )
}  # fmt: skip
