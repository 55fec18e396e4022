"""`kvloom tune`: find the recipe of a model that loses least within a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvloom.errors import InputError

from .options import ChosenModel, Dtype, Json, conditions, text_name
from .outputs import check_outputs, show_results, user_errors, write_file
from .progress import show_progress


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id or folder of a model, or a known name.")
    ],
    text: Annotated[
        list[Path],
        typer.Option("--text", metavar="FILE", help="Text file to tune on, repeatable."),
    ],
    bytes: Annotated[
        float | None, typer.Option(help="The most bytes, as a share of the exact cache's: 0.2.")
    ] = None,
    quality: Annotated[
        str | None,
        typer.Option(help='The largest mean divergence from the exact cache, in nats: "kl=0.01".'),
    ] = None,
    context: Annotated[
        int, typer.Option(min=256, help="Tokens of a context, which are compressed.")
    ] = 2048,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recipe (.toml).")
    ] = None,
    dtype: Dtype = "auto",
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot divergence against bytes.")
    ] = None,
) -> None:
    """Tune a recipe: formats and kept tokens of each layer, within bytes or a divergence.

    The layers are scored once; another bound uses the same scores. An interrupted run is continued
    by the same command. Scores are in kvloom's cache folder.
    """
    with user_errors():
        from ..show.plots import tuning_plot
        from ..show.tables import tuning_data, tuning_table
        from ..tuner import tune
        from ..workload.text import read_files

        kl = None if quality is None else _quality(quality)
        _check_bound(bytes, kl)
        check_outputs(json, out, plot=plot)
        content = read_files(text)
        chosen = ChosenModel(model, dtype)
        with show_progress() as progress:
            loaded = chosen.load(progress)
            tuning = tune(
                loaded, chosen.tokenizer, content, bytes=bytes, kl=kl, context=context,
                progress=progress,
            )  # fmt: skip
        if out is not None:
            write_file(out, tuning.recipe.to_toml())
        if plot is not None:
            tuning_plot(tuning, chosen.name, plot)
        environment = conditions(loaded, chosen, text_name(text))
        show_results(tuning_data(tuning, environment), json, tuning_table(tuning, chosen.name))


def _check_bound(share: float | None, kl: float | None) -> None:
    """Raise `InputError` for a bound that is none, before the model is loaded."""
    from ..tuner.problem import Bound

    Bound(share, kl, 0)


def _quality(option: str) -> float:
    """Return the divergence of "kl=0.01"."""
    name, _, number = option.partition("=")
    try:
        if name.strip() == "kl":
            return float(number)
    except ValueError:
        pass
    raise InputError(f'--quality {option!r} must be a divergence in nats, such as "kl=0.01"')
