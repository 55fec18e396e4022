"""`kvloom store`: what a prompt store holds, whether it is intact, and what may go."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.errors import InputError

from .options import Json, option
from .outputs import show_results

if TYPE_CHECKING:
    from kvloom import PromptStore

app = typer.Typer(no_args_is_help=True, help="Look into a prompt store, and tidy it up.")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a prompt store.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="Key of an entry, or how it begins.")]


@app.command("ls")
def list_command(folder: Folder, json: Json = None) -> None:
    """List the entries, the last used ones first."""
    store = _opened(folder)
    _show({"folder": str(folder), "nbytes": store.report().nbytes}, store.entries(), json)


@app.command("show")
def show_command(folder: Folder, key: Key, json: Json = None) -> None:
    """Show an entry: its model, recipe, calibration and token ids."""
    from ..show.tables import FigureTable

    data = _dated(_opened(folder).describe(key))
    table = FigureTable(data["key"], "", [""])
    for name in ("tokens", "nbytes", "created", "used", "calibration"):
        table.add(name, str(data[name]))
    for name, x in data["model"].items():
        table.add(name if name == "model" else f"model: {name}", str(x))
    table.add("recipe", data["recipe"]["name"])
    first, more = data["ids"][:8], ", …" * (len(data["ids"]) > 8)
    table.add("token ids", ", ".join(map(str, first)) + more)
    show_results(data, json, table)


@app.command("verify")
def verify_command(folder: Folder, json: Json = None) -> None:
    """Read every file whole, and set damaged ones aside.

    The exit status is 1 if a file was damaged.
    """
    store = _opened(folder)
    checked, problems = len(store.entries()), store.verify()
    lines = [f"{checked} entries checked, {len(problems)} damaged", *problems.values()]
    show_results({"checked": checked, "damaged": problems}, json, "\n".join(lines))
    if problems:
        raise typer.Exit(1)


@app.command("prune")
def prune_command(
    folder: Folder,
    max_bytes: Annotated[str, option("The largest size, such as 20GiB.")] = "20GiB",
    max_age: Annotated[str, option("The longest disuse, such as 30d.")] = "30d",
    json: Json = None,
) -> None:
    """Remove entries that are too old, then those of the longest disuse, down to a size."""
    store = _opened(folder, max_bytes=max_bytes, max_age=max_age)
    removed = store.prune()
    _show({"folder": str(folder), "nbytes": store.report().nbytes}, removed, json, " removed")


@app.command("export")
def export_command(
    folder: Folder,
    key: Key,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
) -> None:
    """Copy an entry to a file that `kvloom.Cache.load` reads; it has the prompt's token ids."""
    entry = _opened(folder).export(key, out)
    typer.echo(f"{out}: {entry.tokens:,} tokens of {entry.model} under {entry.recipe}")


def _opened(folder: Path, **limits: str) -> PromptStore:
    """Return the store of a folder; raises `InputError` if the folder holds no store."""
    from kvloom import PromptStore

    if not any(folder.glob("index-*.sqlite")) and not any(folder.glob("*.safetensors")):
        raise InputError(f"{str(folder)!r} is no prompt store; give the folder of a PromptStore")
    return PromptStore(folder, **limits)


def _show(data: dict[str, Any], entries: list[Any], json: str | None, done: str = "") -> None:
    from ..show.tables import FigureTable

    rows = [_dated(asdict(entry)) for entry in entries]
    title = f"{len(rows):,} entries{done}; the folder has {data['nbytes'] / 2**20:,.1f} MiB"
    table = FigureTable(title, "key", ["tokens", "MiB", "recipe", "model", "last used"])
    for row in rows:
        size = f"{row['nbytes'] / 2**20:,.2f}"
        cells = f"{row['tokens']:,}", size, row["recipe"], row["model"], row["used"]
        table.add(row["key"][:16], *cells)
    show_results({**data, "entries": rows}, json, table)


def _dated(row: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with dates and times instead of seconds."""
    dates = {name: datetime.fromtimestamp(row[name]) for name in ("created", "used")}
    return row | {name: date.isoformat(timespec="seconds") for name, date in dates.items()}
