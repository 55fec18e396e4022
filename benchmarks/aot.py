"""Compile every variant of every Triton kernel for sm_80 and sm_90; no GPU is needed.

Prints what each takes and records it in results/aot.json: registers a thread, bytes of shared
memory, spilled bytes (0, or this fails). Minutes on one core; `--brief` compiles what CI does.

    python benchmarks/aot.py [--brief] [--only attend]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import triton

from record import environment, write

TOOL = Path(__file__).parents[1] / "tools" / "compile_triton.py"
sys.path.append(str(TOOL.parent))
import compile_triton  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--brief", action="store_true", help="only what the tests compile")
    parser.add_argument("--only", default="", help="one family, such as attend")
    asked = parser.parse_args()
    words = [*(["--brief"] if asked.brief else []), "--only", asked.only]
    clean = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    found, said = [], []
    with subprocess.Popen(
        [sys.executable, TOOL, *words],
        stdout=subprocess.PIPE,
        text=True,
        env=clean,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            one = json.loads(line)
            found.append(one)
            said += compile_triton.problems(one)
            print(
                f"{one['family']:7} sm_{one['arch']} {one['registers']:4} registers "
                f"{one['shared'] / 1024:6.1f} KiB {one['spills']:5} B spilled  {one['name']}",
                flush=True,
            )
    print(*said, sep="\n")
    if process.returncode or said:
        return 1
    if not asked.brief and not asked.only:
        write("aot", {"environment": environment(triton=triton.__version__), "forms": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
