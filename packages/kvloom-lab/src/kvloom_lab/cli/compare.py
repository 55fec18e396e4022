"""`kvloom compare`: several recipes on one model and one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import (
    RECIPES_HELP,
    ChosenModel,
    ChosenText,
    Dtype,
    Files,
    Json,
    Model,
    Text,
    parse_budget,
    parse_recipes,
    with_budget,
)
from .outputs import check_outputs, collect_rows, finish, show_results, user_errors
from .progress import show_progress


def command(
    files: Files = None,
    text: Text = None,
    model: Model = "reference",
    recipes: Annotated[
        str | None,
        typer.Option(help=f"{RECIPES_HELP}; default: all that name a method (see kvloom recipes)."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens to prefill; default: 2048, or as many as the model can take."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=32, help="Tokens of the text to decode one by one after the context.")
    ] = 160,
    batch: Annotated[
        int, typer.Option(min=1, help="Rows of text, and questions, in one batch.")
    ] = 4,
    questions: Annotated[int, typer.Option(min=0, help="Questions about needles; 0: none.")] = 48,
    ask: Annotated[
        str,
        typer.Option(
            help="Ask about needles after the context is compressed (after), or at the end of the "
            "prompt (inside)."
        ),
    ] = "after",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Tokens that recipes keep, or that a step reads in recipes with recall: a number "
            "(512), or a fraction of the context (0.25). Other recipes, such as kivi, have no "
            "budget."
        ),
    ] = None,
    dtype: Dtype = "auto",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed for the parts of the text and the needles.")
    ] = 0,
    json: Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot quality against bits per value.")
    ] = None,
) -> None:
    """Compare recipes: memory, speed, perplexity, agreement with the full cache, needles found.

    Every recipe reads the same context, then decodes the text that follows, one token at a time;
    full is always measured too. Needles are facts hidden in the text; questions ask about them
    after the text is compressed.

    Progress and finished rows are printed on stderr, the table on stdout. After Ctrl-C, the table
    shows the finished rows. The exit status is 1 if a recipe failed, or if a recipe that you named
    does not fit the model.
    """
    with user_errors():
        from kvloom.recipe import RECIPES, part_options

        from .. import eval as evaluation
        from ..eval.compare import DEFAULT_CONTEXT
        from ..show.plots import comparison_plot
        from ..show.tables import comparison_line, comparison_table

        named = [name for name in RECIPES if not part_options(name)]  # without "any score" etc.
        chosen = parse_recipes(",".join(named) if recipes is None else recipes)
        ask = "inside" if ask == "with" else ask  # as command lines of older versions call it
        settings = evaluation.Settings(context, max_new_tokens, batch, questions, ask, seed)
        share = None if budget is None else parse_budget(budget)
        # A wrong budget is refused before anything is loaded.
        with_budget(chosen, share, context or DEFAULT_CONTEXT)
        check_outputs(json, plot=plot)
        source, known = ChosenText(files, text), ChosenModel(model, dtype)
        task = evaluation.prepare(known.config, known.tokenizer, source.content, settings)
        chosen = evaluation.with_full(with_budget(chosen, share, task.context))
        with show_progress() as progress:
            loaded = known.load(progress)
            environment = evaluation.environment(loaded, known.name, task, seed, source.name)
            on_step = progress.counter(task.units * len(chosen))
            rows, early_end = collect_rows(
                evaluation.iter_rows(loaded, chosen, task, on_step),
                lambda row: comparison_line(row, environment),
                progress,
            )
        missing = [recipe.name for recipe in chosen[len(rows) :]]
        if missing:
            environment["missing"] = missing
        if share is not None:
            environment["budget"] = share
            environment["without_budget"] = [r.name for r in chosen if not r.budgeted]
        if plot and rows:
            comparison_plot(rows, environment, plot)
        if rows:
            show_results(
                evaluation.to_data(rows, environment), json, comparison_table(rows, environment)
            )
        failed = [r.recipe for r in rows if r.failed or (r.problem and recipes is not None)]
        finish(early_end, missing, failed)
