"""`kvloom analyse`: the papers' plots, one command a question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .edge import printed, progress, quiet, told, writable

app = typer.Typer(no_args_is_help=True, help="Draw the papers' plots for a model and a text.")


@app.callback()
def _analyse() -> None:
    """Draw the papers' plots for a model and a text."""


@app.command("attention")
def attention(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Text to read; default: CPython's library."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Hub id or folder of a model; default: the reference model.")
    ] = "reference",
    recipe: Annotated[
        str, typer.Option(help="Whose scores to compare with those of the full cache.")
    ] = "h2o",
    context: Annotated[int, typer.Option(min=2, help="Tokens read at once.")] = 1024,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the text fed one by one after them.")
    ] = 64,
    dtype: Annotated[
        str, typer.Option(help="auto (that of the weights), bfloat16, float16 or float32.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Which part of the text.")] = 0,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write figures as JSON; -: to stdout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the four plots.")] = None,
) -> None:
    """Attention by layer: sparsity, mass of the best tokens, variance, scores after eviction.

    As in Keyformer's figures 3a, 3b and 4 and MiniKV's figure 7.
    """
    with told():
        from ..analyse import attention as work
        from ..analyse import attention_report as report
        from ..compare import load
        from ..compare.environment import machine
        from ..compare.plot import check
        from ..compare.run import check_room
        from ..compare.text import library_text, opening, read_files, rows, tokenize
        from ..recipes import resolve

        resolve(recipe)  # a wrong name is told before anything is loaded
        writable(json, plot)
        if plot:
            check(plot)
        words = read_files(files) if files else library_text()
        quiet()
        built, tokenizer = load(model, dtype)
        check_room(built, context, new_tokens)
        tokens = context + new_tokens
        text = rows(tokenize(tokenizer, words), opening(tokenizer), 1, tokens, seed)
        with progress(new_tokens + 1) as tell:
            layers = work.measure(built, text, context=context, recipe=recipe, progress=tell)

        source = ", ".join(f.name for f in files) if files else "CPython's library"
        name = Path(model).name if Path(model).is_dir() else model
        facts = {
            **machine(built), "model": name, "text": source, "recipe": recipe, "context": context,
            "new_tokens": new_tokens, "seed": seed,
        }  # fmt: skip
        if plot:
            report.plot(layers, facts, plot)
        if json == "-":
            typer.echo(report.to_json(layers, facts))
            return
        if json:
            Path(json).write_text(report.to_json(layers, facts) + "\n", encoding="utf-8")
        printed(report.table(layers, facts))
