"""`kvloom report`: a page that shows results of `kvloom eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.errors import InputError

from .outputs import check_outputs, write_file
from .user_errors import user_errors

if TYPE_CHECKING:
    from ..eval.page import RunResults


def command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR",
            help="Folders that kvloom eval wrote, or folders of results of kvpress.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Show results of kvloom eval: one HTML page that needs no network and no other file.

    The page shows which recipe keeps quality at which bytes, with 95% intervals; retrieval by
    length and depth; divergence by position; speed beside quality; and every sample's prompt,
    answer and reference, with two recipes compared token by token. Of several folders, the reader
    chooses those to see. Results of kvpress count tokens instead of bytes; the page marks them.
    """
    with user_errors():
        check_outputs(out)
        runs = [run for folder in folders for run in _read(folder)]
        from ..eval.page import page, page_data

        write_file(out, page(*page_data(runs)))
        samples = sum(len(lines) for run in runs for lines in run.lines.values())
        recipes = len({figures.recipe for run in runs for figures in run.figures})
        typer.echo(
            f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {recipes} recipes, {samples:,} "
            f"results of samples; wrote {out} ({out.stat().st_size / 1000:,.0f} kB)"
        )


def _read(folder: Path) -> list[RunResults]:
    """Return the runs in a folder."""
    from ..eval.page import is_kvpress, read_kvpress, read_run

    if not folder.is_dir():
        raise InputError(
            f"there is no folder {str(folder)!r}; give a folder that 'kvloom eval --out' wrote"
        )
    if not (folder / "run.json").exists() and is_kvpress(folder):
        return read_kvpress(folder)
    return [read_run(folder)]
