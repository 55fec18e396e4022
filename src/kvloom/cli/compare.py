"""`kvloom compare`: recipes side by side on a model and a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .edge import quiet, told

if TYPE_CHECKING:
    from ..compare import Row, Task
    from ..recipe import Recipe


def command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Text to read; default: CPython's library."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Hub id or folder of a model; default: the reference model.")
    ] = "reference",
    recipes: Annotated[
        str | None,
        typer.Option(help='Such as "kivi,rtn:bits=4,group=64"; default: all (kvloom recipes).'),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens read before measuring; default: 2048, or what the model takes."),
    ] = None,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens of the text fed one by one after the context.")
    ] = 160,
    batch: Annotated[
        int, typer.Option(help="Rows of text, and questions asked, side by side.")
    ] = 4,
    questions: Annotated[int, typer.Option(help="Needles asked for; 0: none.")] = 48,
    ask: Annotated[
        str, typer.Option(help="Ask for needles after the context is compressed, or with it.")
    ] = "after",
    budget: Annotated[
        str | None,
        typer.Option(help="Budget of all recipes that have one: tokens (512) or a share (0.25)."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (that of the weights), bfloat16, float16 or float32.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Which parts of the text, which needles.")] = 0,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write figures as JSON; -: to stdout.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw quality against bits a value.")
    ] = None,
) -> None:
    """Compare recipes: memory, speed, perplexity, agreement with the full cache, needles found.

    Every recipe reads the same context, then the text that follows, one token at a time; full is
    always measured too. Needles are facts hidden in the text and asked for once it is compressed.
    """
    with told():
        from .. import compare as work
        from ..compare.text import library_text, read_files
        from ..recipes import RECIPES, resolve

        chosen = list(RECIPES) if recipes is None else split(recipes)
        if not chosen:
            raise work.InputError(f"--recipes names no recipe; there are {', '.join(RECIPES)}")
        settings = work.Settings(context, new_tokens, batch, questions, ask, seed)
        share = None if budget is None else _budget(budget)
        picked = [resolve(spec) for spec in chosen]  # wrong ones are told before anything is loaded
        if share is not None:
            picked = [recipe.with_budget(share) for recipe in picked]
        _check_outputs(json, plot)
        text = read_files(files) if files else library_text()
        quiet()
        built, tokenizer = work.load(model, dtype)
        task = work.prepare(built, tokenizer, text, settings)
        rows = _with_progress(built, tokenizer, picked, task)

        source = ", ".join(f.name for f in files) if files else "CPython's library"
        name = Path(model).name if Path(model).is_dir() else model
        environment = work.environment(built, name, task, seed, source)
        if share is not None:
            environment["budget"] = share
        if plot:
            work.plot(rows, environment, plot)
        if json == "-":
            typer.echo(work.to_json(rows, environment))
            return
        if json:
            Path(json).write_text(work.to_json(rows, environment) + "\n", encoding="utf-8")
        _print_table(rows, environment)


def split(recipes: str) -> list[str]:
    """Part "kivi:bits=4,group=64,rtn" into recipes: an option belongs to the name before it."""
    parts: list[str] = []
    for item in (item.strip() for item in recipes.split(",")):
        if "=" in item and ":" not in item and parts and ":" in parts[-1]:
            parts[-1] += f",{item}"
        elif item:
            parts.append(item)
    return parts


def _budget(text: str) -> int | float:
    """A whole number of tokens, or a fraction."""
    from ..compare.errors import InputError

    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise InputError(
            f"--budget {text!r} is neither whole tokens (512) nor a fraction (0.25)"
        ) from None


def _check_outputs(json: str | None, plot: Path | None) -> None:
    """Refuse what could not be written before minutes of work, not after."""
    from ..compare.errors import InputError
    from ..compare.plot import check

    if plot is not None:
        check(plot)
    for path in (plot, None if json in (None, "-") else Path(str(json))):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"cannot write {str(path)!r}; give a file in a folder that exists")


def _with_progress(model: Any, tokenizer: Any, recipes: list[Recipe], task: Task) -> list[Row]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from ..compare.run import compare, with_full

    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    )  # fmt: skip
    with Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=4
    ) as bar:
        line = bar.add_task("starting", total=task.units * len(with_full(recipes)))

        def tell(what: str, units: int) -> None:
            bar.update(line, description=what, advance=units)

        return compare(model, tokenizer, recipes, task, tell)


def _print_table(rows: list[Row], environment: dict) -> None:
    from rich.console import Console

    from ..compare import table

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    console.print(table(rows, environment))
