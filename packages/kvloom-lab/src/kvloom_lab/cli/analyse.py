"""`kvloom analyse`: the papers' analyses of a model and a text, one command each."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.errors import InputError

from ..recommended import DEFAULT_RECIPE
from .options import (
    RECIPE_HELP,
    RECIPES_HELP,
    ChosenModel,
    ChosenText,
    Dtype,
    Files,
    Json,
    Model,
    Text,
    option,
    parse_recipes,
)
from .outputs import check_outputs, show_results
from .progress import show_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from .progress import ProgressDisplay


app = typer.Typer(no_args_is_help=True, help="Analyse a model on a text, as the papers do.")


_SEED = Annotated[int, option("Seed for the part of the text.", min=0)]


@app.command("attention")
def attention(
    files: Files = None,
    text: Text = None,
    model: Model = "reference",
    recipe: Annotated[
        str, option(f"The recipe whose scores are compared with the full cache's. {RECIPE_HELP}")
    ] = "h2o",
    context: Annotated[int, option("Tokens of the prompt.", min=2)] = 1024,
    max_new_tokens: Annotated[
        int, option("Tokens of the text to decode one by one after the prompt.", min=1)
    ] = 64,
    dtype: Dtype = "auto",
    seed: _SEED = 0,
    json: Json = None,
    plot: Annotated[Path | None, option("Draw the four plots.", metavar="FILE")] = None,
) -> None:
    """Attention by layer: sparsity, mass of the best tokens, variance, scores after eviction.

    As in Keyformer's figures 3a, 3b and 4 and MiniKV's figure 7.
    """
    from kvloom.recipe import resolve

    from ..analyse.attention import measure, to_data

    resolve(recipe)  # a wrong name is refused before anything is loaded
    _run(
        "attention", to_data, json, plot, (files, text), (model, dtype),
        lambda loaded, ids, progress: measure(
            loaded, ids, context=context, recipe=recipe,
            progress=progress.counter(max_new_tokens + 1),
        ),
        recipe=recipe, context=context, seed=seed, new_tokens=max_new_tokens,
    )  # fmt: skip


@app.command("error")
def error(
    files: Files = None,
    text: Text = None,
    model: Model = "reference",
    recipes: Annotated[
        str, option(f"The recipes whose formats to compare. {RECIPES_HELP} (see kvloom recipes).")
    ] = "rtn,kivi,kivi-4,smoothquant,rptq,skvq:group=32,turbo",
    context: Annotated[int, option("Tokens of each context.", min=64)] = 1024,
    samples: Annotated[int, option("Contexts to read.", min=1)] = 2,
    dtype: Dtype = "auto",
    seed: _SEED = 0,
    json: Json = None,
) -> None:
    """The error of formats in keys, values and attention, layer by layer (KIVI's table 2).

    All whole groups are quantized, without windows or sinks: formats are compared, not recipes.
    """
    from ..analyse.error import measure, to_data

    chosen = parse_recipes(recipes)
    _run(
        "error", to_data, json, None, (files, text), (model, dtype),
        lambda loaded, ids, progress: measure(
            loaded, ids, chosen, progress=progress.counter(samples)
        ),
        recipe=recipes, context=context, seed=seed, contexts=samples,
    )  # fmt: skip


@app.command("distribution")
def distribution(
    files: Files = None,
    text: Text = None,
    model: Model = "reference",
    recipe: Annotated[
        str,
        option(
            "The recipe whose calibrated groups of channels are compared with consecutive "
            f"ones. {RECIPE_HELP}"
        ),
    ] = "skvq:group=32",
    context: Annotated[int, option("Tokens to read.", min=2)] = 512,
    layers: Annotated[
        str | None, option('Layers such as "0,3,5"; default: all. Three of them are drawn.')
    ] = None,
    dtype: Dtype = "auto",
    seed: _SEED = 0,
    json: Json = None,
    plot: Annotated[Path | None, option("Draw the magnitudes.", metavar="FILE")] = None,
) -> None:
    """Magnitudes of keys and values by channel and token, and by calibrated group.

    As in KIVI's figure 2 and SKVQ's figure 2. Without a calibrated recipe, there are no groups.
    """
    from kvloom.recipe import resolve

    from ..analyse.distribution import measure, to_data

    chosen = resolve(recipe)
    try:
        layer_indices = None if layers is None else [int(n) for n in layers.split(",")]
    except ValueError:
        raise InputError(f"--layers {layers!r} must be numbers, such as 0,3,5") from None
    _run(
        "distribution", to_data, json, plot, (files, text), (model, dtype),
        lambda loaded, ids, progress: measure(loaded, ids, chosen, layer_indices),
        recipe=recipe, context=context, seed=seed,
    )  # fmt: skip


def _run(
    name: str,
    to_data: Callable[[Any, dict[str, Any]], dict[str, Any]],
    json: str | None,
    plot: Path | None,
    text_options: tuple[list[Path] | None, list[Path] | None],
    model_options: tuple[str, str],
    measure: Callable[[Any, Any, ProgressDisplay], Any],
    **settings: Any,
) -> None:
    """Measure a text, and show the result. name: of its table and its plot. to_data: of the
    same analysis.

    settings: what results contain: recipe, context, seed, and new_tokens or contexts. A text that
    is too short is refused before the weights of the model are loaded.
    """
    from ..analyse import tables
    from ..models import check_positions
    from ..show import plots
    from ..workload.machine import conditions
    from ..workload.text import cut_rows, leading_ids, tokenize

    check_outputs(json, plot=plot)
    text, model = ChosenText(*text_options), ChosenModel(*model_options)
    context, new_tokens = settings["context"], settings.get("new_tokens", 0)
    check_positions(model.config, context, new_tokens)
    ids = cut_rows(
        tokenize(model.tokenizer, text.content), leading_ids(model.tokenizer),
        settings.get("contexts", 1), context + new_tokens, settings["seed"],
    )  # fmt: skip
    with show_progress() as progress:
        loaded = model.load(progress)
        progress("reading the text")
        result = measure(loaded, ids, progress)
    environment = conditions(loaded, model.name, text.name, **settings)
    if plot:
        getattr(plots, f"{name}_plot")(result, environment).savefig(plot)
    table = getattr(tables, f"{name}_table")(result, environment)
    show_results(to_data(result, environment), json, table)


def check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help='Hub id or folder of a model, or "smollm2".')
    ] = "reference",
    recipe: Annotated[str, option(RECIPE_HELP)] = DEFAULT_RECIPE,
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Compare `full` with the plain model on random tokens, and a recipe's kernels with torch.

    Exits with 1 if a mode differs, or if the recipe does nothing with the longest prompt.
    """
    from kvloom.hf import geometry, supported_model
    from kvloom.recipe import resolve

    from ..analyse.modes import DIFFERENT, NOT_COMPARED, check_modes
    from ..analyse.tables import modes_table
    from ..workload.machine import machine

    chosen = resolve(recipe)
    check_outputs(json)
    chosen_model = ChosenModel(model, dtype)
    with show_progress() as progress:
        loaded = chosen_model.load(progress)
        chosen.check(geometry(supported_model(loaded)))
        checks = list(check_modes(loaded, chosen, progress))
    data = {
        "model": chosen_model.name, "class": type(loaded).__name__, **machine(loaded),
        "modes": [asdict(check) for check in checks],
    }  # fmt: skip
    show_results(data, json, modes_table(f"{type(loaded).__name__}, {loaded.dtype}", checks))
    sys.exit(any(check.result in (DIFFERENT, NOT_COMPARED) for check in checks))
