"""`kvloom calibrate`: measure once what calibrated recipes need to know about a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .edge import Dtype, chosen, quiet, told, writable
from .progress import progress

DEFAULT = "skvq,skvq-k2v1.5,rptq,smoothquant"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or folder of a model.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write (.kvcal).")],
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text to read, repeatable; default: CPython's library."),
    ] = None,
    recipes: Annotated[
        str, typer.Option(help="Recipes to calibrate for, with their options.")
    ] = DEFAULT,
    contexts: Annotated[int, typer.Option(min=4, help="Contexts read at most.")] = 64,
    context: Annotated[int, typer.Option(min=64, help="Tokens of each.")] = 1024,
    dtype: Dtype = "auto",
) -> None:
    """Calibrate a model: ranges of its channels, groups of channels, clip factors.

    Reading ends early once 8 more contexts hardly widen the ranges. An interrupted run leaves
    FILE.partial, and the same command continues it.
    """
    with told():
        from ..calibrate import Settings, calibrate
        from ..calibrate import contexts as cut
        from ..eval import InputError, load
        from ..workload.text import opening, read_files, tokenize

        picked = chosen(recipes)
        plain = [
            recipe.name for recipe in picked if not any(store.calibrated for store in recipe.stores)
        ]
        if plain:
            raise InputError(f"recipe {plain[0]!r} needs no calibration; name others")
        writable(out)
        if out.suffix == ".safetensors" and (out.absolute().parent / "config.json").exists():
            raise InputError(
                f"model loaders would read {str(out)!r} as weights, since it ends in .safetensors "
                f"and lies beside a config.json; write {str(out.with_suffix('.kvcal'))!r} instead"
            )
        words = read_files(text) if text else training_text()
        quiet()
        built, tokenizer = load(model, dtype)
        settings = Settings(contexts=contexts, context=context)
        ids = cut(tokenize(tokenizer, words), opening(tokenizer), settings)
        with progress() as shown:

            def tell(what: str, at: int, of: int) -> None:
                shown(f"{what}, {at} of {of}", at, of)

            found = calibrate(built, ids, picked, out, settings, tell)
        size, read = out.stat().st_size, found.settings["read"]
        typer.echo(f"{out}: {len(found.tensors)} tensors, {size:,} bytes, {read} contexts read")


def training_text() -> str:
    """About 2 MB of CPython's library, from what the reference model was trained on."""
    from ..reference import corpus

    return "\n\n".join(d.text for i, d in enumerate(corpus.train_documents()) if i % 15 == 0)
