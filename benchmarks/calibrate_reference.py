"""Write the calibration that ships with the reference model: SKVQ's formats, RPTQ, SmoothQuant.

python benchmarks/calibrate_reference.py
"""

from __future__ import annotations

from typer.testing import CliRunner

from kvloom.cli import app
from kvloom.hf.known import BESIDE
from kvloom.reference import WEIGHTS


def recipes() -> list[str]:
    """Every bit width at every group; at group 32 without reorder and after RoPE as well.

    Groups of channels, without clip factors, before and after RoPE.
    """
    found = ["smoothquant"]
    for group in (32, 64, 128):
        found += [f"rptq:group={group}", f"skvq:group={group},clip=1.0,pre_rope=false"]
    for bits in (1, 1.5, 2, 3, 4):
        for group in (32, 64, 128):
            found.append(f"skvq:group={group},bits={bits},value_bits={bits}")
        for other in ("reorder=false", "pre_rope=false", "reorder=false,pre_rope=false"):
            found.append(f"skvq:group=32,bits={bits},value_bits={bits},{other}")
    return found


def main() -> None:
    out = str(WEIGHTS / BESIDE)
    done = CliRunner().invoke(
        app, ["calibrate", "reference", "--out", out, "--recipes", ",".join(recipes())]
    )
    print(done.output)
    raise SystemExit(done.exit_code)


if __name__ == "__main__":
    main()
