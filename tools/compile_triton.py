"""Compile the Triton kernels ahead of time, for NVIDIA GPUs that this machine need not have.

`triton_variants.variants` names what is compiled: a kernel, the types of its arguments, its
constants and the limits of its resources. `measure` compiles a variant and reads from Triton's
assembler what the code takes: registers per thread, bytes of shared memory and spilled bytes, which
must be 0. This proves neither that results are right (the interpreter does) nor speed.

    python tools/compile_triton.py [--brief] [--only attend] [--arch 80 --arch 90]

prints one line of JSON per variant. Triton must not be in interpreter mode.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_signature import Variant

ARCHES = (80, 90)


def measure(variant: Variant, arch: int) -> dict[str, Any]:
    """Compile a variant for sm_<arch> and return its registers, memory, spills and seconds."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    begin = time.perf_counter()
    order = variant.kernel.arg_names
    attrs: dict[tuple[int, ...], list] = {}
    types = {
        name: _plain(variant.signature.get(name, "constexpr"), (i,), attrs)
        for i, name in enumerate(order)
    }
    missing = set(order) - set(variant.signature) - set(variant.constants)
    unknown = (set(variant.signature) | set(variant.constants)) - set(order)
    if missing or unknown:
        wrong = missing or unknown
        raise ValueError(f"{variant.name}: arguments {wrong} are not those of its kernel")
    constants = {(order.index(name),): value for name, value in variant.constants.items()}
    made = triton.compile(
        ASTSource(fn=variant.kernel, signature=types, constexprs=constants, attrs=attrs),
        target=GPUTarget("cuda", arch, 32),
        options={
            "num_warps": variant.warps,
            "num_stages": variant.stages,
            "maxnreg": variant.maxnreg,
        },
    )
    seconds = time.perf_counter() - begin
    return {
        "name": variant.name,
        "family": variant.kernel.fn.__module__.split(".")[2],
        "arch": arch,
        **_resources(made.asm["ptx"], arch),
        "shared": made.metadata.shared,
        "seconds": round(seconds, 2),
        "bounds": {"registers": variant.registers, "shared": variant.shared},
    }


def _plain(kind: Any, path: tuple[int, ...], attrs: dict[tuple[int, ...], list]) -> Any:
    """Return a type without what it is divisible by, which goes to `attrs` at the path."""
    if isinstance(kind, tuple):
        return type(kind)(*(_plain(x, (*path, i), attrs) for i, x in enumerate(kind)))
    kind, _, divisor = kind.partition(":")
    if divisor:
        attrs[path] = [["tt.divisibility", int(divisor)]]
    return kind


def problems(found: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each limit that a measured variant exceeds."""
    said = [
        f"{found['name']} for sm_{found['arch']}: {found[what]} {what} are more than {most}"
        for what, most in found["bounds"].items()
        if found[what] > most
    ]
    if found["spills"]:
        said.append(f"{found['name']} for sm_{found['arch']}: {found['spills']} bytes are spilled")
    return said


def _resources(ptx: str, arch: int) -> dict[str, int]:
    """Return the resources of compiled code, as the assembler reports them."""
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
            raise RuntimeError(f"ptxas did not report {pattern}: {done.stderr}")
        return int(match[1])

    return {
        "registers": number(r"Used (\d+) registers"),
        "spills": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "stack": number(r"(\d+) bytes stack frame"),
    }


def main(words: list[str]) -> None:
    """Print what each variant takes, a line of JSON each."""
    import argparse

    from triton_variants import variants

    parser = argparse.ArgumentParser(prog="python tools/compile_triton.py")
    parser.add_argument("--brief", action="store_true", help="only what the tests compile")
    parser.add_argument("--only", default="", help="one family, such as attend")
    parser.add_argument("--arch", type=int, action="append", help="80, 90, ...")
    options = parser.parse_args(words)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("nothing is compiled under TRITON_INTERPRET; unset it")
    for variant in variants(options.only):
        if variant.brief or not options.brief:
            for arch in options.arch or ARCHES:
                print(json.dumps(measure(variant, arch)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
