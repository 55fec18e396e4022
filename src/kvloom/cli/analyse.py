"""`kvloom analyse`: the papers' plots, one command a question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .edge import (
    RECIPE,
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

app = typer.Typer(no_args_is_help=True, help="Draw the papers' plots for a model and a text.")


@app.callback()
def _analyse() -> None:
    """Draw the papers' plots for a model and a text."""


_SEED = Annotated[int, typer.Option(min=0, help="Which part of the text.")]


@app.command("attention")
def attention(
    files: Files = None,
    model: Model = "reference",
    recipe: Annotated[
        str, typer.Option(help=f"Whose scores to compare with those of the full cache. {RECIPE}")
    ] = "h2o",
    context: Annotated[int, typer.Option(min=2, help="Tokens read at once.")] = 1024,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the text fed one by one after the context.")
    ] = 64,
    dtype: Dtype = "auto",
    seed: _SEED = 0,
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the four plots.")] = None,
) -> None:
    """Attention by layer: sparsity, mass of the best tokens, variance, scores after eviction.

    As in Keyformer's figures 3a, 3b and 4 and MiniKV's figure 7.
    """
    with told():
        from ..analyse import attention as work
        from ..analyse import attention_report as report
        from ..recipe.resolve import resolve

        resolve(recipe)  # a wrong name is refused before anything is loaded
        writable(json, plot=plot)
        text = _read(files, model, dtype, seed, context=context, new_tokens=max_new_tokens)
        with progress() as shown:
            built = loaded(model, dtype, shown)
            tell = shown.counter(max_new_tokens + 1)
            layers = work.measure(built, text, context=context, recipe=recipe, progress=tell)
        facts = _facts(built, model, files, recipe, context, seed)
        facts["new_tokens"] = max_new_tokens
        if plot:
            report.plot(layers, facts, plot)
        show(report.to_json(layers, facts), json, report.table(layers, facts))


@app.command("error")
def error(
    files: Files = None,
    model: Model = "reference",
    recipes: Annotated[
        str, typer.Option(help=f"Whose formats to compare. {RECIPES} (see kvloom recipes).")
    ] = "rtn,kivi,kivi-4,smoothquant,rptq,skvq:group=32,turbo",
    context: Annotated[int, typer.Option(min=64, help="Tokens of each context.")] = 1024,
    contexts: Annotated[int, typer.Option(min=1, help="Contexts read.")] = 2,
    dtype: Dtype = "auto",
    seed: _SEED = 0,
    json: Json = None,
) -> None:
    """What formats do to keys, values and attention, layer by layer (KIVI's table 2).

    Every token is packed, without windows or sinks: formats are compared, not recipes.
    """
    with told():
        from ..analyse import error as work
        from ..analyse import error_report as report

        picked = chosen(recipes)
        writable(json)
        text = _read(files, model, dtype, seed, context=context, contexts=contexts)
        with progress() as shown:
            built = loaded(model, dtype, shown)
            found = work.measure(built, text, picked, progress=shown.counter(contexts))
        facts = _facts(built, model, files, recipes, context, seed)
        facts["contexts"] = contexts
        show(report.to_json(found, facts), json, report.table(found, facts))


@app.command("distribution")
def distribution(
    files: Files = None,
    model: Model = "reference",
    recipe: Annotated[
        str,
        typer.Option(
            help=f"Whose calibrated groups of channels to compare with plain ones. {RECIPE}"
        ),
    ] = "skvq:group=32",
    context: Annotated[int, typer.Option(min=2, help="Tokens read.")] = 512,
    layers: Annotated[
        str | None, typer.Option(help='Such as "0,3,5"; default: all. Three are drawn.')
    ] = None,
    dtype: Dtype = "auto",
    seed: _SEED = 0,
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw magnitudes.")] = None,
) -> None:
    """Magnitudes of keys and values by channel and token, also in calibrated order.

    As in KIVI's figure 2 and SKVQ's figure 2. A recipe without calibration draws them as they are.
    """
    with told():
        from ..analyse import distribution as work
        from ..analyse import distribution_report as report
        from ..eval import InputError
        from ..recipe.resolve import resolve

        picked = resolve(recipe)
        try:
            numbers = None if layers is None else [int(n) for n in layers.split(",")]
        except ValueError:
            raise InputError(f"--layers {layers!r} must be numbers, such as 0,3,5") from None
        writable(json, plot=plot)
        text = _read(files, model, dtype, seed, context=context)
        with progress() as shown:
            built = loaded(model, dtype, shown)
            shown("reading the text")
            found = work.measure(built, text, picked, numbers)
        facts = _facts(built, model, files, recipe, context, seed)
        if plot:
            report.plot(found, facts, plot)
        show(report.to_json(found, facts), json, report.table(found, facts))


def _facts(
    built: Any, model: str, files: list[Path] | None, recipe: str, context: int, seed: int
) -> dict:
    """What figures depend on."""
    from ..report.machine import machine

    return {**machine(built), "model": named(model), "text": source(files), "recipe": recipe,
            "context": context, "seed": seed}  # fmt: skip


def _read(
    files: list[Path] | None,
    model: str,
    dtype: str,
    seed: int,
    *,
    context: int,
    new_tokens: int = 0,
    contexts: int = 1,
) -> Any:
    """Return rows [contexts, context + new_tokens] of the text; refuse one that is too short.

    Only the model's config and tokenizer are loaded.
    """
    from ..eval import load_small
    from ..workload.models import check_room
    from ..workload.text import library_text, opening, read_files, rows, tokenize

    words = read_files(files) if files else library_text()
    quiet()
    config, tokenizer = load_small(model, dtype)
    check_room(config, context, new_tokens)
    tokens = context + new_tokens
    return rows(tokenize(tokenizer, words), opening(tokenizer), contexts, tokens, seed)
