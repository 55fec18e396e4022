"""`kvloom check`: whether kvloom computes what the plain model does, in every mode."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .inputs import ChosenModel
from .options import RECIPE_HELP, Dtype, Json
from .outputs import check_outputs, show_results
from .progress import show_progress
from .user_errors import user_errors


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help='Hub id or folder of a model, or "smollm2".')
    ] = "reference",
    recipe: Annotated[str, typer.Option(help=RECIPE_HELP)] = "near-lossless",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Compare `full` with the plain model on random tokens, and a recipe's kernels with torch.

    Exits with 1 if a mode differs.
    """
    with user_errors():
        from kvloom.hf import geometry, supported_model
        from kvloom.recipe import resolve

        from ..analyse.modes import DIFFERENT, check_modes
        from ..analyse.table import modes_table
        from ..report.machine import machine

        chosen = resolve(recipe)
        check_outputs(json)
        known = ChosenModel(model, dtype)
        with show_progress() as progress:
            loaded = known.load(progress)
            chosen.check(geometry(supported_model(loaded)))
            checks = list(check_modes(loaded, chosen, progress))
        data = {
            "model": known.name, "class": type(loaded).__name__, **machine(loaded),
            "modes": [check.data() for check in checks],
        }  # fmt: skip
        show_results(data, json, modes_table(f"{type(loaded).__name__}, {loaded.dtype}", checks))
    sys.exit(any(check.result == DIFFERENT for check in checks))
