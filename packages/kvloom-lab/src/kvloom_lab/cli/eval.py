"""`kvloom eval`: tasks on many recipes, written sample by sample into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.errors import InputError

from .options import (
    RECIPES_HELP,
    ChosenModel,
    ChosenText,
    Dtype,
    Model,
    Text,
    parse_budget,
    parse_numbers,
    parse_recipes,
    with_budget,
)
from .outputs import check_outputs, print_rich, user_errors, write_file
from .progress import show_progress

if TYPE_CHECKING:
    from kvloom.recipe import Geometry, Recipe

    from ..eval.results import RunResults


def command(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK...",
            help="perplexity, free, niah, ruler, longbench, summarize, multiturn; parts of a task "
            'follow a colon: "niah:single+passkey", "ruler:vt+cwe", "longbench:trec+lcc".',
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the results; a second run resumes in it.")
    ],
    text: Text = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="JSON lines of longbench (a file or folder) or summarize (a file).",
        ),
    ] = None,
    model: Model = "reference",
    recipes: Annotated[
        str, typer.Option(help=RECIPES_HELP)
    ] = "full,near-lossless,balanced,small,tiny,kivi",
    context: Annotated[
        str, typer.Option(help='Tokens of a context; several lengths: "1024,2048".')
    ] = "2048",
    samples: Annotated[
        int,
        typer.Option(
            min=1,
            help="Samples of each length (niah: of each cell of the grid; ruler, longbench: of "
            "each part).",
        ),
    ] = 4,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens to predict (perplexity) or to generate (free, summarize)."
        ),
    ] = 128,
    batch: Annotated[
        int, typer.Option(min=1, help="Contexts, or questions on one context, in one batch.")
    ] = 4,
    ask: Annotated[
        str,
        typer.Option(
            help="Ask the question after the context is compressed (after), or at the end of "
            "what is compressed (inside)."
        ),
    ] = "after",
    bytes: Annotated[
        str | None,
        typer.Option(
            help='Shares of the exact cache\'s bytes, such as "0.25" or "0.25,0.125": every recipe '
            "that evicts gets the budget at which its cache takes that share."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Tokens, or a fraction of the context, as for compare.")
    ] = None,
    dtype: Dtype = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed for texts and needles.")] = 0,
) -> None:
    """Measure recipes on tasks: quality on true bytes, sample by sample.

    A context is read once for all recipes. Finished samples are written at once: after Ctrl-C, run
    the same command again to resume. kvloom report DIR shows the results.
    """
    with user_errors():
        from kvloom.hf import geometry as model_geometry

        from ..eval.evaluate import evaluate, units
        from ..eval.results import ResultFolder
        from ..eval.sample import Source, task_batches
        from ..eval.tasks import task_named
        from ..models import max_positions
        from ..show.tables import results_table
        from ..workload.machine import machine, model_facts

        chosen_tasks = [task_named(name) for name in tasks]
        if ask not in ("after", "inside"):
            raise InputError(f"--ask {ask!r} is unknown; use after or inside")
        lengths = parse_numbers(context, int, "--context")
        shares = [] if bytes is None else parse_numbers(bytes, float, "--bytes")
        if shares and budget is not None:
            raise InputError("--bytes and --budget both set the budget; give one of them")
        chosen = parse_recipes(recipes)
        read, known = ChosenText(None, text), ChosenModel(model, dtype)
        source = Source.of(
            known.tokenizer, read.content, lengths=lengths, samples=samples,
            new_tokens=max_new_tokens, batch=batch, seed=seed, ask=ask,
            data=None if data is None else str(data),
        )  # fmt: skip
        batches = task_batches(chosen_tasks, source, max_positions(known.config))
        with show_progress() as progress:
            loaded = known.load(progress)
            geometry = model_geometry(loaded)
            measured = _with_bytes(chosen, shares, budget, lengths, geometry)
            settings = {
                "tasks": tasks, "recipes": {r.name: r.to_dict() for r in measured},
                "context": lengths, "samples": samples, "new_tokens": max_new_tokens, "ask": ask,
                "batch": batch, "bytes": shares, "budget": budget, "seed": seed,
                "text": read.name, "data": None if data is None else data.name,
            }  # fmt: skip
            run = {
                "environment": machine(loaded),
                "model": model_facts(loaded, known.name, geometry),
                "settings": settings,
            }
            folder = ResultFolder.open(out, run)
            on_step = progress.counter(units(batches, measured))
            try:
                evaluate(loaded, source, measured, batches, folder, on_step)
            except KeyboardInterrupt:
                progress.line(
                    f"kvloom: interrupted; {out} has the finished samples. Run the same command "
                    "again to resume."
                )
                raise typer.Exit(130) from None
        print_rich(results_table(line for task in chosen_tasks for line in folder.lines(task.name)))
        typer.echo(f"results: {out}; kvloom report {out} makes a page of them", err=True)


def _with_bytes(
    recipes: list[Recipe],
    shares: list[Any],
    budget: str | None,
    lengths: list[Any],
    geometry: Geometry,
) -> list[Recipe]:
    """Return `full` and the recipes, each once for every share, with distinct names."""
    from ..eval.evaluate import at_share, with_full

    if shares and len(lengths) > 1:
        raise InputError(
            "--bytes needs one --context, as a budget in tokens belongs to one length; give one"
        )
    if budget is not None:
        recipes = with_budget(recipes, parse_budget(budget), max(lengths))
    if shares:
        recipes = [at_share(r, share, lengths[0], geometry) for share in shares for r in recipes]
    measured = with_full(recipes)
    names = [recipe.name for recipe in measured]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two different recipes have the name {name!r}; rename one of them")
    return measured


def report(
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
        from ..show.pages import page_data, results_page

        write_file(out, results_page(*page_data(runs)))
        samples = sum(len(lines) for run in runs for lines in run.lines.values())
        recipes = len({figures.recipe for run in runs for figures in run.figures})
        typer.echo(
            f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {recipes} recipes, {samples:,} "
            f"results of samples; wrote {out} ({out.stat().st_size / 1000:,.0f} kB)"
        )


def _read(folder: Path) -> list[RunResults]:
    """Return the runs in a folder."""
    from ..eval.kvpress import is_kvpress, read_kvpress
    from ..eval.results import read_run

    if not folder.is_dir():
        raise InputError(
            f"there is no folder {str(folder)!r}; give a folder that 'kvloom eval --out' wrote"
        )
    if not (folder / "run.json").exists() and is_kvpress(folder):
        return read_kvpress(folder)
    return [read_run(folder)]
