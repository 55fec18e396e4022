"""`kvloom inspect`: a page with the tokens in the cache of every layer and head, step by step."""

from __future__ import annotations

import json as js
import os
from pathlib import Path
from typing import Annotated

import typer

from kvloom.errors import InputError

from .options import (
    RECIPE_HELP,
    ChosenModel,
    Dtype,
    Model,
    check_utf8,
    printable_name,
    read_stdin,
    text_name,
)
from .outputs import check_outputs, user_errors, write_file
from .progress import show_progress


def command(
    argument: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT", help="A text file, or the text itself; - or nothing: read stdin."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Text file to read, repeatable."),
    ] = None,
    model: Model = "reference",
    recipe: Annotated[str, typer.Option(help=RECIPE_HELP)] = "h2o",
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path(
        "inspect.html"
    ),
    context: Annotated[
        int, typer.Option(min=1, help="Read at most this many tokens of the text.")
    ] = 1024,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens to generate after it.")] = 32,
    dtype: Dtype = "auto",
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the page's data as JSON too; -: to stdout."),
    ] = None,
) -> None:
    """Show which tokens a recipe keeps: one HTML page that needs no network and no other file.

    The page shows every token, shaded by the number of heads that have it in their cache, after the
    prompt and after each generated token; tokens and attention mass kept, by layer and head; and
    every token's score. For recipes with recall: the tokens that each step read, and their clusters
    or pages.
    """
    with user_errors():
        from kvloom.recipe import resolve

        from ..inspect import prompt_ids, trace_recipe
        from ..show.pages import inspect_page

        chosen = resolve(recipe)  # a wrong name is refused before anything is loaded
        check_outputs(out, json)
        content, source = _read(argument, text)
        known = ChosenModel(model, dtype)  # so are a wrong model, and a text that is too long
        prompt_ids(known.config, known.tokenizer, content, context, max_new_tokens)
        with show_progress() as progress:
            loaded = known.load(progress)
            trace = trace_recipe(
                loaded, known.tokenizer, chosen, content, context=context,
                new_tokens=max_new_tokens, progress=progress.counter(max_new_tokens + 1),
            )  # fmt: skip
        data = {"model": known.name, "source": source, **trace}
        write_file(out, inspect_page(data))
        if json == "-":
            typer.echo(js.dumps(data, ensure_ascii=False))
        elif json:
            write_file(json, js.dumps(data, ensure_ascii=False))
        typer.echo(_summary(data, out), err=json == "-")


def _read(argument: str | None, files: list[Path] | None) -> tuple[str, str]:
    """Return the text to inspect, and its name."""
    from ..workload.text import read_files

    if files:
        if argument is not None:
            raise InputError("give the text either as TEXT or with --text, not both")
        return read_files(files), text_name(files)
    if argument is None or argument == "-":
        return read_stdin(), "text from stdin"
    path = Path(argument)
    if argument and os.path.exists(argument):  # Path.exists raises for a text longer than a name
        return read_files([path]), printable_name(path)
    if len(argument.split()) == 1 and (path.suffix or len(path.parts) > 1):
        raise InputError(
            f"there is no file {argument!r}; give a file that exists, or the text itself"
        )
    return check_utf8("the text", argument), "text from the command line"


def _summary(data: dict, out: Path) -> str:
    """Return the result in one line."""
    read, text = data["prompt_tokens"], data["text_tokens"]
    cut = f" (the first of {text:,}; --context takes more)" if text > read else ""
    mass = [head["mass"][0] for layer in data["layers"] for head in layer["heads"]]
    kept = f", {sum(mass) / len(mass):.1%} of the prompt's attention mass kept" if mass else ""
    recalling = [head for layer in data["layers"] for head in layer["heads"] if head["read"]]
    if recalling and data["steps"]:
        tokens = sum(sum(head["read"][-1][1::2]) for head in recalling) / len(recalling)
        share = sum(head["read_mass"][-1] for head in recalling) / len(recalling)
        kept += (
            f"; in the last step heads with recall read {tokens:,.0f} of {read + data['steps']:,} "
            f"tokens, {share:.1%} of its attention mass"
        )
    return (
        f"{data['recipe']}: {read:,} tokens{cut} + {data['steps']} generated{kept}; wrote {out} "
        f"({out.stat().st_size / 1000:,.0f} kB)"
    )
