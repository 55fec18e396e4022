"""`kvloom compare`: recipes side by side on a model and a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .collect import collect, leave
from .edge import (
    RECIPES,
    Dtype,
    Files,
    Json,
    Model,
    chosen,
    loaded,
    named,
    quiet,
    show,
    source,
    told,
    writable,
)
from .progress import progress

if TYPE_CHECKING:
    from ..recipe.spec import Recipe


def command(
    files: Files = None,
    model: Model = "reference",
    recipes: Annotated[
        str | None,
        typer.Option(help=f"{RECIPES}; default: all (see kvloom recipes)."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens read before measuring; default: 2048, or what the model takes."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=32, help="Tokens of the text fed one by one after the context.")
    ] = 160,
    batch: Annotated[
        int, typer.Option(min=1, help="Rows of text, and questions asked, side by side.")
    ] = 4,
    questions: Annotated[int, typer.Option(min=0, help="Needles asked for; 0: none.")] = 48,
    ask: Annotated[
        str, typer.Option(help="Ask for needles after the context is compressed, or with it.")
    ] = "after",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Tokens that recipes keep, or that a step of those that recall reads: so many "
            "(512), or a share of the context (0.25). Recipes that do neither, such as kivi, have "
            "no budget."
        ),
    ] = None,
    dtype: Dtype = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Which parts of the text, which needles.")] = 0,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw quality against bits a value.")
    ] = None,
) -> None:
    """Compare recipes: memory, speed, perplexity, agreement with the full cache, needles found.

    Every recipe reads the same context, then the text that follows, one token at a time; full is
    always measured too. Needles are facts hidden in the text and asked for once it is compressed.

    Progress and finished rows go to stderr, the table to stdout. After Ctrl-C, the table shows the
    rows that are finished. The exit status is 1 if a recipe failed, or if one that you named does
    not fit the model.
    """
    with told():
        from .. import eval as work
        from ..eval.compare import DEFAULT_CONTEXT, with_full
        from ..recipe.resolve import RECIPES as NAMED
        from ..workload.text import library_text, read_files

        picked = chosen(",".join(NAMED) if recipes is None else recipes)
        settings = work.Settings(context, max_new_tokens, batch, questions, ask, seed)
        share = None if budget is None else _budget(budget)
        _budgeted(picked, share, context or DEFAULT_CONTEXT)  # refused before anything is loaded
        writable(json, plot=plot)
        text = read_files(files) if files else library_text()
        quiet()
        config, tokenizer = work.load_small(model, dtype)
        task = work.prepare(config, tokenizer, text, settings)
        picked = with_full(_budgeted(picked, share, task.context))
        with progress() as shown:
            built = loaded(model, dtype, shown)
            environment = work.environment(built, named(model), task, seed, source(files))
            rows, ended = collect(
                work.rows(built, tokenizer, picked, task, shown.counter(task.units * len(picked))),
                lambda row: work.line(row, environment),
                shown,
            )
        missing = [recipe.name for recipe in picked[len(rows) :]]
        if missing:
            environment["missing"] = missing
        if share is not None:
            environment["budget"] = share
            environment["without_budget"] = [r.name for r in picked if not r.budgeted]
        if plot and rows:
            work.plot(rows, environment, plot)
        if rows:
            show(work.to_json(rows, environment), json, work.table(rows, environment))
        wrong = [r.recipe for r in rows if r.failed or (r.problem and recipes is not None)]
        leave(ended, missing, wrong)


def _budgeted(recipes: list[Recipe], share: int | float | None, context: int) -> list[Recipe]:
    """The recipes with a budget, of a context of so many tokens; None leaves them as they are."""
    from ..errors import RecipeError

    if share is None:
        return recipes
    changed = []
    for recipe in recipes:
        try:
            changed.append(recipe.with_budget(share, context))
        except RecipeError as error:
            raise RecipeError(f"--budget {share} with {recipe.name}: {error}") from error
    return changed


def _budget(text: str) -> int | float:
    """A whole number of tokens, or a fraction."""
    from ..errors import InputError

    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise InputError(
            f"--budget {text!r} is neither whole tokens (512) nor a fraction (0.25)"
        ) from None
