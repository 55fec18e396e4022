"""Triton kernels compiled ahead of time, for any NVIDIA GPU and on a machine without one.

Every module `kernels/*/gpu*.py` that defines Triton kernels has a function `forms()` that names
what is to be compiled: a kernel with the types of its arguments, its constants and the most it may
take. `measure` compiles a form and asks the assembler that Triton brings what the code takes:
registers a thread, bytes of shared memory, and spilled bytes, which must be 0. Proves neither that
results are right (the interpreter does) nor speed. Imports Triton only in functions.

    python -m kvloom.kernels.ahead [--brief] [--only attend] [--arch 80 --arch 90]

prints a line of JSON a form. Not under TRITON_INTERPRET, where nothing is compiled.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ARCHES = (80, 90)
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Form(NamedTuple):
    """One way to compile a kernel.

    signature: argument -> "*bf16:16" (a pointer, divisible by 16), "i32", "i32:16", "fp32", in the
    kernel's order, constants left out. constants: the kernel's tl.constexpr arguments. registers
    (a thread), shared (bytes): the most it may take. brief: compiled by the tests too, not only by
    `benchmarks/aot.py`.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 2
    registers: int = 255
    shared: int = 99 << 10
    brief: bool = False


def signature(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The types of a call's arguments; tensors may be on torch's meta device.

    Tensors are taken as aligned to 16 bytes, and numbers as any: the least that a call gives. None
    is a constant.
    """
    found = {}
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            found[name] = f"*{_TYPES[x.dtype]}:16"
        elif x is not None:
            found[name] = "fp32" if isinstance(x, float) else "i32"
    return found


def measure(form: Form, arch: int) -> dict[str, Any]:
    """Compile a form for sm_<arch>: registers, shared memory, spilled and stack bytes, seconds."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    begin = time.perf_counter()
    order = form.kernel.arg_names
    types, attrs = {}, {}
    for i, name in enumerate(order):
        kind, _, divisor = form.signature.get(name, "constexpr").partition(":")
        types[name] = kind
        if divisor:
            attrs[(i,)] = [["tt.divisibility", int(divisor)]]
    missing = set(order) - set(form.signature) - set(form.constants)
    unknown = (set(form.signature) | set(form.constants)) - set(order)
    if missing or unknown:
        raise ValueError(f"{form.name}: arguments {missing or unknown} are not those of its kernel")
    constants = {(order.index(name),): value for name, value in form.constants.items()}
    made = triton.compile(
        ASTSource(fn=form.kernel, signature=types, constexprs=constants, attrs=attrs),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": form.warps, "num_stages": form.stages},
    )
    seconds = time.perf_counter() - begin
    return {
        "name": form.name,
        "family": form.kernel.fn.__module__.split(".")[-2],
        "arch": arch,
        **_resources(made.asm["ptx"], arch),
        "shared": made.metadata.shared,
        "seconds": round(seconds, 2),
        "bounds": {"registers": form.registers, "shared": form.shared},
    }


def problems(found: Mapping[str, Any]) -> list[str]:
    """What a measured form takes more of than it may."""
    said = [
        f"{found['name']} for sm_{found['arch']}: {found[what]} {what} are more than {most}"
        for what, most in found["bounds"].items()
        if found[what] > most
    ]
    if found["spills"]:
        said.append(f"{found['name']} for sm_{found['arch']}: {found['spills']} bytes are spilled")
    return said


def _resources(ptx: str, arch: int) -> dict[str, int]:
    """What the assembler says that this code takes."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    name = f"sm_{arch}a" if arch == 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [tools / "ptxas", "-v", "--gpu-name", name, source, "-o", source.with_suffix(".cubin")],
            capture_output=True,
            text=True,
            check=True,
        )

    def number(pattern: str) -> int:
        match = re.search(pattern, done.stderr)
        if match is None:
            raise RuntimeError(f"ptxas does not say {pattern}: {done.stderr}")
        return int(match[1])

    return {
        "registers": number(r"Used (\d+) registers"),
        "spills": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "stack": number(r"(\d+) bytes stack frame"),
    }


def forms(only: str = "") -> Iterator[Form]:
    """The forms of every kernel whose module's name contains `only`."""
    here = Path(__file__).parent
    for path in sorted(here.glob("*/gpu*.py")):
        name = ".".join([__package__ or "kvloom.kernels", path.parent.name, path.stem])
        if only in name:
            yield from getattr(importlib.import_module(name), "forms", list)()


def main(words: list[str]) -> None:
    """Print what each form takes."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m kvloom.kernels.ahead")
    parser.add_argument("--brief", action="store_true", help="only what the tests compile")
    parser.add_argument("--only", default="", help="part of a module's name, such as attend")
    parser.add_argument("--arch", type=int, action="append", help="80, 90, ...")
    asked = parser.parse_args(words)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("nothing is compiled under TRITON_INTERPRET; unset it")
    for form in forms(asked.only):
        if form.brief or not asked.brief:
            for arch in asked.arch or ARCHES:
                print(json.dumps(measure(form, arch)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
