"""The figures of `kvloom bench` that the documentation quotes: decode, pack and generate.

python benchmarks/bench.py
"""

from __future__ import annotations

import subprocess
import sys

import record

COMMANDS = {
    "bench_decode": [
        "decode", "--recipes",
        "full,kivi,kivi-4,rtn:bits=4,skvq:reorder=false,h2o,clusterkv,clusterkv-2bit,quest,turbo",
    ],
    "bench_pack": [
        "pack", "--context", "32768", "--heads", "8/8", "--repeats", "3",
        "--recipes", "kivi,kivi-4,rtn,skvq:reorder=false,turbo",
    ],
    "bench_generate": [
        "generate", "--context", "8192,32768", "--recipes", "full,kivi,kivi-4",
    ],
}  # fmt: skip


def main() -> None:
    record.options(__doc__)
    for name, options in COMMANDS.items():
        path = record.results() / f"{name}.json"
        command = [sys.executable, "-m", "kvloom_lab", "bench", *options, "--json", str(path)]
        print(" ".join(command[1:]), flush=True)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
