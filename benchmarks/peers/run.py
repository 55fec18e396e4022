"""Other projects, each in its own environment, on the shapes of `kvloom bench generate`.

    python benchmarks/peers/run.py kvpress|llama.cpp|quantized [--context 8192,32768] [--json FILE]

Each gets a virtual environment in this folder, created on first use (llama.cpp is compiled there,
which takes minutes). Other options are passed to the peer's script; `run.py llama.cpp --help` lists
them. Figures have the schema of `kvloom bench --json` and are written to
results/<machine>/peers_<peer>.json by default. `quantized` is `kvloom bench generate` with
transformers' quanto and hqq caches installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE.parent))
import record  # noqa: E402


class Peer(NamedTuple):
    """The packages of an environment, by `pip install` command, and the script that runs in it."""

    installs: tuple[tuple[str, ...], ...]
    script: tuple[str, ...]
    build: dict[str, str] = {}  # noqa: RUF012


# torch first and alone, so that pip can choose its CPU build
TORCH = ("-c", str(ROOT / "constraints.txt"), "torch")
PEERS = {
    "kvpress": Peer(
        (TORCH, ("kvpress==0.5.5", "transformers==5.2.0")),
        (str(HERE / "kvpress_steps.py"),),
    ),
    "llama.cpp": Peer(
        (("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy", "safetensors"),),
        (str(HERE / "llama_cpp_steps.py"),),
        {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
    ),
    "quantized": Peer(
        (TORCH, ("-c", str(ROOT / "constraints.txt"), "-e", str(ROOT / "packages/kvloom"),
                 "-e", str(ROOT / "packages/kvloom-lab"), "hqq", "optimum-quanto")),
        ("-m", "kvloom_lab", "bench", "generate", "--recipes", "full,kivi,kivi-4",
         "--baselines", "dynamic,quanto,hqq"),
    ),
}  # fmt: skip


def environment(name: str, peer: Peer, folder: Path) -> Path:
    """Return the environment's Python; create the environment on first use."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / "ready"
    if not ready.exists():
        print(f"creating {folder} for {name}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        for packages in peer.installs:
            install = [str(python), "-m", "pip", "install", "-q", *packages]
            if subprocess.run(install, env={**os.environ, **peer.build}, check=False).returncode:
                sys.exit(f"{name} could not be installed: pip install {' '.join(packages)}")
        ready.touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--venvs", type=Path, default=HERE, help="Folder for the environments.")
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        parser.print_help()
        return
    options, rest = parser.parse_known_args()
    if not any(x == "--json" or x.startswith("--json=") for x in rest):
        name = options.peer.replace(".", "_")
        rest += ["--json", str(record.results() / f"peers_{name}.json")]
    peer = PEERS[options.peer]
    python = environment(options.peer, peer, options.venvs / f".venv-{options.peer}")
    sys.exit(subprocess.run([str(python), *peer.script, *rest], check=False).returncode)


if __name__ == "__main__":
    main()
