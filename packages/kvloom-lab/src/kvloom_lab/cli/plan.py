"""`kvloom plan`: what fits and how fast it decodes, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from .options import RECIPES_HELP, Json, parse_recipes, silence_transformers
from .outputs import check_outputs, finish, show_results, user_errors
from .progress import ProgressDisplay, show_progress


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder with config.json, config file, or hub id; no weights are needed.",
        ),
    ],
    recipes: Annotated[
        str | None, typer.Option(help=f"{RECIPES_HELP}; default: fourteen (see the guide).")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens, such as 8192 or 128k; default: 32k, or the model's positions if fewer."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Memory, such as 24GiB or 80GB; default: the hardware's.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="h100, h200, b200, a100, mi300x, rtx4090, rtx5090, m4-max, this (measure this "
            "machine once), or a TOML file. Without it, the plan has no times."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Decode speed to reach, such as 20tok/s; needs --hardware.")
    ] = None,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot memory and speed by context.")
    ] = None,
) -> None:
    """Plan: bytes, the longest context, the largest batch and the decode speed of recipes.

    The command reads only the model's config. Bytes are exact. Times are estimates with low and
    high bounds; "this" measures the machine once and stores the result.

    The exit status is 1 if a recipe that you named does not fit the model, or if nothing reaches
    the target.
    """
    with user_errors():
        from ..planner.units import parse_bytes, parse_rate, parse_tokens

        # A wrong option is refused before anything is loaded.
        chosen = None if recipes is None else parse_recipes(recipes)
        tokens = None if context is None else parse_tokens(context)
        nbytes = None if memory is None else parse_bytes(memory)
        rate = None if target is None else parse_rate(target)
        check_outputs(json, plot=plot)
        from ..planner import plan
        from ..planner.plan_recipes import RECIPES
        from ..show.plots import plan_plot
        from ..show.tables import plan_table

        silence_transformers()
        with show_progress() as progress:
            progress(f"reading the config of {model}")
            planned = plan(
                model, chosen or RECIPES, context=tokens, batch=batch, memory=nbytes,
                hardware=hardware, target=rate, on_step=_measuring(progress),
            )  # fmt: skip
        if plot:
            plan_plot(planned, plot)
        show_results(planned.to_dict(), json, plan_table(planned))
        failed = [row.recipe for row in planned.rows if row.problem] if recipes else []
        if rate is not None and not failed and not any(row.reaches for row in planned.rows):
            raise typer.Exit(1)
        finish(None, [], failed)


def _measuring(progress: ProgressDisplay) -> Callable[[int], Callable[[str, int], None]]:
    """Return the function that announces measurements, and returns what reports them."""

    def begin(units: int) -> Callable[[str, int], None]:
        progress.line("kvloom: measuring this machine once; keep it idle meanwhile")
        return progress.counter(units)

    return begin
