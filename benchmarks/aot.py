"""Compile every variant of every Triton kernel for sm_80 and sm_90; no GPU is needed.

Prints the resources of each: registers per thread, bytes of shared memory, spilled bytes (must be
0). Takes minutes on one core; `--brief` compiles the variants that CI compiles.

    python benchmarks/aot.py [--brief] [--only attend]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "compile_triton.py"
sys.path.append(str(TOOL.parent))
import compile_triton  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--brief", action="store_true", help="only the variants that the tests compile"
    )
    parser.add_argument("--only", default="", help="one family, such as attend")
    options = parser.parse_args()
    arguments = [*(["--brief"] if options.brief else []), "--only", options.only]
    clean = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    problems = []
    with subprocess.Popen(
        [sys.executable, TOOL, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=clean,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            one = json.loads(line)
            problems += compile_triton.problems(one)
            print(
                f"{one['family']:7} sm_{one['arch']} {one['registers']:4} registers "
                f"{one['shared'] / 1024:6.1f} KiB {one['spills']:5} B spilled  {one['name']}",
                flush=True,
            )
    print(*problems, sep="\n")
    return 1 if process.returncode or problems else 0


if __name__ == "__main__":
    sys.exit(main())
