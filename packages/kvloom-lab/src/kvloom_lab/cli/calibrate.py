"""`kvloom calibrate`: measure once what calibrated recipes need from a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvloom.errors import InputError

from .options import Dtype, Text, parse_recipes, silence_transformers
from .outputs import check_outputs, user_errors
from .progress import show_progress

DEFAULT_RECIPES = "skvq,skvq-k2v1.5,rptq,smoothquant"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or folder of a model.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write (.kvcal).")],
    text: Text = None,
    recipes: Annotated[
        str, typer.Option(help="Recipes to calibrate for, with their options.")
    ] = DEFAULT_RECIPES,
    contexts: Annotated[int, typer.Option(min=4, help="Contexts to read at most.")] = 64,
    context: Annotated[int, typer.Option(min=64, help="Tokens of a context.")] = 1024,
    dtype: Dtype = "auto",
) -> None:
    """Calibrate a model: ranges of its channels, groups of channels, clip factors.

    Reading stops early when 8 more contexts hardly widen the ranges. An interrupted run leaves
    FILE.partial; the same command continues it.
    """
    with user_errors():
        from kvloom.calibrate import Settings, calibrate, cut_contexts

        from ..models import load
        from ..workload.text import calibration_text, leading_ids, read_files, tokenize

        chosen = parse_recipes(recipes)
        plain = [r.name for r in chosen if not any(store.calibrated for store in r.stores)]
        if plain:
            raise InputError(f"recipe {plain[0]!r} needs no calibration; name other recipes")
        check_outputs(out)
        if out.suffix == ".safetensors" and (out.absolute().parent / "config.json").exists():
            raise InputError(
                f"model loaders would read {str(out)!r} as weights, since it ends in .safetensors "
                f"next to a config.json; write {str(out.with_suffix('.kvcal'))!r} instead"
            )
        content = read_files(text) if text else calibration_text()
        silence_transformers()
        loaded, tokenizer = load(model, dtype)
        settings = Settings(contexts=contexts, context=context)
        ids = cut_contexts(tokenize(tokenizer, content), leading_ids(tokenizer), settings)
        with show_progress() as progress:

            def on_step(what: str, done: int, total: int) -> None:
                progress(f"{what}, {done} of {total}", done, total)

            calibration = calibrate(loaded, ids, chosen, out, settings, on_step)
        size, read = out.stat().st_size, calibration.settings["read"]
        typer.echo(
            f"{out}: {len(calibration.tensors)} tensors, {size:,} bytes, {read} contexts read"
        )
