"""`kvloom inspect`: a page that shows which tokens every layer and head holds, step by step."""

from __future__ import annotations

import json as js
import os
from pathlib import Path
from typing import Annotated

import typer

from .edge import (
    RECIPE,
    Dtype,
    Model,
    argument,
    loaded,
    named,
    quiet,
    spelled,
    stdin,
    told,
    writable,
    write,
)
from .progress import progress


def command(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="A text file, or the text; -: read it from stdin.")
    ] = "-",
    model: Model = "reference",
    recipe: Annotated[str, typer.Option(help=RECIPE)] = "h2o",
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path(
        "inspect.html"
    ),
    context: Annotated[
        int, typer.Option(min=1, help="Read at most so many tokens of the text.")
    ] = 1024,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens to generate after it.")] = 32,
    dtype: Dtype = "auto",
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the page's data as JSON too; -: to stdout."),
    ] = None,
) -> None:
    """Show what a recipe keeps of a text: one HTML page that needs no network and no other file.

    On it: every token, shaded by how many heads hold it, after the prompt and after each generated
    token; tokens held and attention mass kept, by layer and head; and every token's score. Of
    recipes that recall: what each step read, and the clusters or pages it lies in.
    """
    with told():
        from ..eval import load_small
        from ..inspect import follow, page
        from ..inspect.trace import read_ids
        from ..recipe.resolve import resolve

        picked = resolve(recipe)  # a wrong name is refused before anything is loaded
        writable(out, json)
        words, source = _words(text)
        quiet()
        config, tokenizer = load_small(model, dtype)
        read_ids(config, tokenizer, words, context, max_new_tokens)  # so is a text too long
        with progress() as shown:
            built = loaded(model, dtype, shown)
            noted = follow(
                built, tokenizer, picked, words, context=context, new_tokens=max_new_tokens,
                progress=shown.counter(max_new_tokens + 1),
            )  # fmt: skip
        data = {"model": named(model), "source": source, **noted}
        write(out, page(data))
        if json == "-":
            typer.echo(js.dumps(data, ensure_ascii=False))
        elif json:
            write(json, js.dumps(data, ensure_ascii=False))
        typer.echo(_told(data, out), err=json == "-")


def _words(text: str) -> tuple[str, str]:
    """The text to read and what it is called."""
    from ..errors import InputError
    from ..workload.text import read_files

    if text == "-":
        return stdin(), "text from stdin"
    path = Path(text)
    if text and os.path.exists(text):  # Path's own raises where a text is too long for a name
        return read_files([path]), spelled(path)
    if len(text.split()) == 1 and (path.suffix or len(path.parts) > 1):
        raise InputError(f"there is no file {text!r}; give a file that exists, or the text itself")
    return argument("the text", text), "text from the command line"


def _told(data: dict, out: Path) -> str:
    read, text = data["prompt_tokens"], data["text_tokens"]
    cut = f" (the first of {text:,}; --context takes more)" if text > read else ""
    mass = [head["mass"][0] for layer in data["layers"] for head in layer["heads"]]
    kept = f", {sum(mass) / len(mass):.1%} of the prompt's attention mass kept" if mass else ""
    recalling = [head for layer in data["layers"] for head in layer["heads"] if head["read"]]
    if recalling and data["steps"]:
        tokens = sum(sum(head["read"][-1][1::2]) for head in recalling) / len(recalling)
        on = sum(head["read_mass"][-1] for head in recalling) / len(recalling)
        kept += (
            f"; in the last step heads that recall read {tokens:,.0f} of {read + data['steps']:,} "
            f"tokens, {on:.1%} of its attention mass"
        )
    return (
        f"{data['recipe']}: {read:,} tokens{cut} + {data['steps']} generated{kept}; wrote {out} "
        f"({out.stat().st_size / 1000:,.0f} kB)"
    )
