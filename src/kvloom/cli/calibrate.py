"""`kvloom calibrate`: find out about a model what calibrated recipes need, once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .edge import Dtype, chosen, quiet, told, writable

DEFAULT = "skvq,skvq-k2v1.5,rptq,smoothquant"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or folder of a model.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write (.safetensors).")],
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text to read, repeatable; default: CPython's library."),
    ] = None,
    recipes: Annotated[
        str, typer.Option(help="Recipes to calibrate for, with their options.")
    ] = DEFAULT,
    contexts: Annotated[int, typer.Option(min=4, help="Contexts read.")] = 64,
    context: Annotated[int, typer.Option(min=64, help="Tokens of each.")] = 1024,
    dtype: Dtype = "auto",
) -> None:
    """Calibrate a model: ranges of its channels, groups of channels, clip factors.

    Interrupted, it leaves FILE.partial, and the same call goes on from there.
    """
    with told():
        from ..calibrate import Settings, calibrate
        from ..calibrate import contexts as cut
        from ..compare import InputError, load
        from ..compare.text import opening, read_files, tokenize

        picked = chosen(recipes)
        plain = [recipe.name for recipe in picked if not recipe.store.calibrated]
        if plain:
            raise InputError(f"recipe {plain[0]!r} needs no calibration; name others")
        writable(out)
        words = read_files(text) if text else _library()
        quiet()
        built, tokenizer = load(model, dtype)
        settings = Settings(contexts=contexts, context=context)
        ids = cut(tokenize(tokenizer, words), opening(tokenizer), settings)
        found = _with_progress(lambda tell: calibrate(built, ids, picked, out, settings, tell))
        size = out.stat().st_size
        typer.echo(f"{out}: {len(found.tensors)} tensors, {size:,} bytes, {len(ids)} contexts")


def _library() -> str:
    """About 2 MB of CPython's library, from what the reference model was trained on."""
    from ..reference import corpus

    return "\n\n".join(d.text for i, d in enumerate(corpus.train_documents()) if i % 15 == 0)


def _with_progress(work: Any) -> Any:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        line = bar.add_task("starting", total=None)
        return work(lambda what, at, of: bar.update(line, description=what, completed=at, total=of))
