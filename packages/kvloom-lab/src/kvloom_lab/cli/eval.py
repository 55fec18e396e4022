"""`kvloom compare`, `eval`, `report` and `papers`: measure recipes, and show the results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from kvloom.errors import InputError

from ..recommended import RECOMMENDED
from .options import (
    RECIPES_HELP,
    ChosenModel,
    ChosenText,
    Dtype,
    Files,
    Json,
    Model,
    Text,
    option,
    parse_budget,
    parse_numbers,
    parse_recipes,
    with_budget,
)
from .outputs import (
    check_outputs,
    collect_rows,
    finish,
    print_rich,
    show_results,
    write_file,
)
from .progress import show_progress

TASKS_HELP = "{}; parts of a task follow a colon: ruler:vt+cwe."

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvloom.recipe import Recipe

    from ..eval.results import RunResults
    from ..papers import Verdict


def compare_command(
    files: Files = None,
    text: Text = None,
    model: Model = "reference",
    recipes: Annotated[
        str | None, option(f"{RECIPES_HELP}; default: all that name a method (see kvloom recipes).")
    ] = None,
    context: Annotated[
        int | None,
        option("Tokens to prefill; default: 2048, or as many as the model can take.", min=1),
    ] = None,
    max_new_tokens: Annotated[
        int, option("Tokens of the text to decode one by one after the context.", min=32)
    ] = 160,
    batch: Annotated[int, option("Rows of text, and questions, in one batch.", min=1)] = 4,
    questions: Annotated[int, option("Questions about needles; 0: none.", min=0)] = 48,
    ask: Annotated[
        str,
        option("Ask for needles after compression (after), or at the end of the prompt (inside)."),
    ] = "after",
    budget: Annotated[
        str | None,
        option(
            "Tokens that a recipe keeps, or reads in a step of recall: a number (512), or a "
            "fraction of the context (0.25)."
        ),
    ] = None,
    dtype: Dtype = "auto",
    seed: Annotated[int, option("Seed for the parts of the text and the needles.", min=0)] = 0,
    json: Json = None,
    plot: Annotated[
        Path | None, option("Plot quality against bits per value.", metavar="FILE")
    ] = None,
) -> None:
    """Compare recipes: memory, speed, perplexity, agreement with the full cache, needles found.

    Every recipe reads the same context, then decodes the text that follows, one token at a time;
    full is always measured too. Needles are facts hidden in the text; questions ask about them
    after the text is compressed.

    Progress and finished rows are printed on stderr, the table on stdout. After Ctrl-C, the table
    shows the finished rows. The exit status is 1 if a recipe failed, or if a recipe that you named
    does not fit the model.
    """
    from kvloom.recipe import RECIPES, part_options

    from .. import eval as evaluation
    from ..eval.comparison import DEFAULT_CONTEXT
    from ..eval.tables import comparison_line, comparison_table
    from ..show.plots import comparison_plot

    named = [name for name in RECIPES if not part_options(name)]  # without "any score" etc.
    chosen = parse_recipes(",".join(named) if recipes is None else recipes)
    settings = evaluation.Settings(context, max_new_tokens, batch, questions, ask, seed)
    size = None if budget is None else parse_budget(budget)
    # A wrong budget is refused before anything is loaded.
    with_budget(chosen, size, context or DEFAULT_CONTEXT, None if recipes else lambda _: None)
    check_outputs(json, plot=plot)
    source, chosen_model = ChosenText(files, text), ChosenModel(model, dtype)
    task = evaluation.prepare(chosen_model.config, chosen_model.tokenizer, source.content, settings)

    def leave_out(why: str) -> None:
        typer.echo(f"not measured with --budget {budget}: {why}", err=True)

    chosen = with_budget(chosen, size, task.context, None if recipes else leave_out)
    chosen = evaluation.with_full(chosen)
    with show_progress() as progress:
        loaded = chosen_model.load(progress)
        environment = evaluation.environment(loaded, chosen_model.name, task, seed, source.name)
        on_step = progress.counter(task.units * len(chosen))
        rows, early_end = collect_rows(
            evaluation.iter_rows(loaded, chosen, task, on_step),
            lambda row: progress.line(comparison_line(row, environment)),
        )
    missing = [recipe.name for recipe in chosen[len(rows) :]]
    if missing:
        environment["missing"] = missing
    if size is not None:
        environment["budget"] = size
        environment["without_budget"] = [r.name for r in chosen if not r.budgeted]
    if plot and rows:
        comparison_plot(rows, environment).savefig(plot)
    if rows:
        show_results(
            evaluation.to_data(rows, environment), json, comparison_table(rows, environment)
        )
    failed = [r.recipe for r in rows if r.failed or (r.problem and recipes is not None)]
    finish(early_end, missing, failed)


class EvalCommand(TyperCommand):
    """`kvloom eval`, whose help names the tasks; they are imported for the help, not before."""

    def name_tasks(self) -> None:
        """Write the names of the tasks into the help of the argument."""
        from ..eval.tasks import TASKS

        argument = next(param for param in self.params if param.name == "tasks")
        argument.help = TASKS_HELP.format(", ".join(TASKS))  # type: ignore[attr-defined]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        self.name_tasks()
        super().format_help(ctx, formatter)


def eval_command(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK...",
            help=TASKS_HELP,
        ),
    ],
    out: Annotated[
        Path, option("Folder of the results; a second run resumes in it.", metavar="DIR")
    ],
    text: Text = None,
    data: Annotated[
        Path | None,
        option("JSON lines of longbench (a file or folder) or summarize (a file).", metavar="PATH"),
    ] = None,
    model: Model = "reference",
    recipes: Annotated[str, option(RECIPES_HELP)] = ",".join(("full", *RECOMMENDED, "kivi")),
    context: Annotated[str, option('Tokens of a context; several lengths: "1024,2048".')] = "2048",
    samples: Annotated[
        int,
        option("Samples of each length; of each cell (niah) or part (ruler, longbench).", min=1),
    ] = 4,
    max_new_tokens: Annotated[
        int, option("Tokens to predict (perplexity) or to generate.", min=1)
    ] = 128,
    batch: Annotated[
        int, option("Contexts, or questions on one context, in one batch.", min=1)
    ] = 4,
    ask: Annotated[
        str,
        option("Ask the question after compression (after), or at the end of the prompt (inside)."),
    ] = "after",
    share: Annotated[
        str | None,
        option('Shares of the exact cache\'s bytes that recipes with eviction get: "0.25,0.125".'),
    ] = None,
    budget: Annotated[
        str | None, option("Tokens, or a fraction of the context, as for compare.")
    ] = None,
    dtype: Dtype = "auto",
    seed: Annotated[int, option("Seed for texts and needles.", min=0)] = 0,
) -> None:
    """Measure recipes on tasks: quality on true bytes, sample by sample.

    A context is read once for all recipes. Finished samples are written at once: after Ctrl-C, run
    the same command again to resume. It measures samples on which a recipe failed again, and the
    exit status is 1 while there are any. kvloom report DIR shows the results.
    """
    from kvloom.hf import geometry

    from ..eval.evaluate import evaluate, units_to_measure
    from ..eval.results import ResultFolder
    from ..eval.sample import Source, check_ask, task_batches
    from ..eval.tables import results_table
    from ..eval.tasks import task_named
    from ..models import max_positions
    from ..workload.machine import machine, model_facts, versions

    chosen_tasks = [task_named(name) for name in tasks]
    check_ask(ask)
    lengths = parse_numbers(context, int, "--context")
    shares = [] if share is None else parse_numbers(share, float, "--share")
    if shares and budget is not None:
        raise InputError("--share and --budget both set the budget; give one of them")
    if shares and len(lengths) > 1:
        raise InputError(
            "--share needs one --context, as a budget in tokens belongs to one length; give one"
        )
    chosen = _with_budget(parse_recipes(recipes), budget, lengths)
    chosen_text, chosen_model = ChosenText(None, text), ChosenModel(model, dtype)
    source = Source.of(
        chosen_model.tokenizer, chosen_text.content, lengths=lengths, samples=samples,
        new_tokens=max_new_tokens, batch=batch, seed=seed, ask=ask,
        data_path=None if data is None else str(data),
    )  # fmt: skip
    batches = task_batches(chosen_tasks, source, max_positions(chosen_model.config))

    def chosen_settings(model: Any) -> tuple[list[Recipe], dict[str, Any]]:
        """Return the recipes to measure and the settings of the run."""
        to_measure = _with_shares(chosen, shares, lengths[0], model)
        return to_measure, {
            "tasks": tasks, "recipes": {r.name: r.to_dict() for r in to_measure},
            "context": lengths, "samples": samples, "new_tokens": max_new_tokens, "ask": ask,
            "batch": batch, "share": shares, "budget": budget, "seed": seed,
            "text": chosen_text.name, "data": None if data is None else data.name,
        }  # fmt: skip

    if chosen_model.without_weights is not None:  # what can be refused before the weights load
        _, settings = chosen_settings(chosen_model.without_weights)
        ResultFolder.check(out, {"environment": versions(), "settings": settings})
    with show_progress() as progress:
        loaded = chosen_model.load(progress)
        to_measure, settings = chosen_settings(loaded)
        run = {
            "environment": machine(loaded),
            "model": model_facts(loaded, chosen_model.name, geometry(loaded)),
            "settings": settings,
        }
        folder = ResultFolder.open(out, run)
        on_step = progress.counter(units_to_measure(batches, to_measure))
        try:
            evaluate(loaded, source, to_measure, batches, folder, on_step)
        except KeyboardInterrupt:
            progress.line(
                f"kvloom: interrupted; {out} has the finished samples. Run the same command "
                "again to resume."
            )
            raise typer.Exit(130) from None
    lines = [line for task in chosen_tasks for line in folder.outcomes(task.name).values()]
    print_rich(results_table(lines, folder.lines("prompts")))
    typer.echo(f"results: {out}; kvloom report {out} makes a page of them", err=True)
    failed = list(dict.fromkeys(line["recipe"] for line in lines if line.get("failed")))
    if failed:
        typer.echo(
            f"kvloom: {', '.join(failed)} failed on some samples; run the same command again "
            "to measure them again",
            err=True,
        )
        raise typer.Exit(1)


def _with_budget(recipes: list[Recipe], budget: str | None, lengths: list[int]) -> list[Recipe]:
    """Return the recipes with a budget; raises `InputError` if it differs between lengths."""
    size = None if budget is None else parse_budget(budget)
    first, *others = (with_budget(recipes, size, length) for length in lengths)
    for other in others:
        for recipe, different in zip(first, other, strict=True):
            if recipe != different:
                raise InputError(
                    f"--budget {budget} is another number of tokens for {recipe.name} at each "
                    "--context; give one --context, or a number of tokens"
                )
    return first


def _with_shares(
    recipes: list[Recipe], shares: list[float], context: int, model: Any
) -> list[Recipe]:
    """Return `full` and the recipes, each once for every share, with distinct names."""
    from kvloom.hf import geometry

    from ..eval.evaluate import at_share, with_full
    from ..models import states_nbytes

    if shares:
        sizes = context, geometry(model), states_nbytes(model)
        recipes = [at_share(recipe, share, *sizes) for share in shares for recipe in recipes]
    to_measure = with_full(recipes)
    names = [recipe.name for recipe in to_measure]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two different recipes have the name {name!r}; rename one of them")
    return to_measure


def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR",
            help="Folders that kvloom eval wrote, or folders of results of kvpress.",
        ),
    ],
    out: Annotated[Path, option("The page to write.", metavar="FILE")] = Path("report.html"),
    kvpress: Annotated[
        Path | None,
        option("Also write folders of kvpress' evaluation here.", metavar="DIR"),
    ] = None,
) -> None:
    """Show results of kvloom eval: one HTML page that needs no network and no other file.

    The page shows which recipe keeps quality at which bytes, with 95% intervals; retrieval by
    length and depth; divergence by position; speed and quality; and every sample's prompt,
    answer and reference, with two recipes compared token by token. Of several folders, the reader
    chooses those to see. Results of kvpress count tokens instead of bytes; the page marks them.
    """
    check_outputs(out)
    runs = [run for folder in folders for run in _read(folder)]
    if kvpress is not None:
        from ..eval.kvpress import write_kvpress

        write_kvpress(runs, kvpress)
    from ..show.pages import page_data, results_page

    write_file(out, results_page(*page_data(runs)))
    samples = sum(len(lines) for run in runs for lines in run.lines.values())
    recipes = len({figures.recipe for run in runs for figures in run.figures})
    typer.echo(
        f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {recipes} recipes, {samples:,} "
        f"results of samples; wrote {out} ({out.stat().st_size / 1000:,.0f} kB)"
    )


def _read(folder: Path) -> list[RunResults]:
    from ..eval.kvpress import is_kvpress, read_kvpress
    from ..eval.results import read_run

    if not folder.is_dir():
        raise InputError(
            f"there is no folder {str(folder)!r}; give a folder that 'kvloom eval --out' wrote"
        )
    if not (folder / "run.json").exists() and is_kvpress(folder):
        return read_kvpress(folder)
    return [read_run(folder)]


def papers_command(
    paper: Annotated[
        str, typer.Argument(metavar="PAPER", help="kivi, skvq, keyformer, minikv or clusterkv.")
    ],
    text: Text = None,
    model: Model = "reference",
    quick: Annotated[
        bool, typer.Option("--quick", help="Shorter contexts and fewer samples.")
    ] = False,
    dtype: Dtype = "auto",
    seed: Annotated[int, option("Seed for texts and needles.", min=0)] = 0,
    json: Json = None,
) -> None:
    """Test a paper's claims: show its figures and ours, and a verdict for each.

    A claim is reproduced, not reproduced (with the cause), or not testable here (with the reason).
    """
    from ..papers import CALIBRATED, DEFAULT, PAPERS, QUICK, Lab, check
    from ..papers.tables import verdict_block, verdict_data, verdict_line, verdict_summary
    from ..workload.machine import conditions

    if paper not in PAPERS:
        raise InputError(f"there is no paper {paper!r}; choose from {', '.join(PAPERS)}")
    title, claims = PAPERS[paper]
    check_outputs(json)
    size, chosen_text = QUICK if quick else DEFAULT, ChosenText(None, text)
    chosen = ChosenModel(model, dtype)
    with show_progress() as progress:
        loaded = chosen.load(progress)
        count = progress.counter(len(claims))
        lab = Lab(
            loaded, chosen.tokenizer, chosen_text.content, size=size, seed=seed,
            name=model, progress=lambda what, units: count(what, 0),
        )  # fmt: skip
        lab.check_calibration(CALIBRATED.get(paper, ()))

        def measure() -> Iterator[Verdict]:
            for claim in claims:
                count(claim.name, 0)
                yield check(claim, lab)
                count("", 1)

        def show(verdict: Verdict) -> None:
            if json == "-":
                progress.line(verdict_line(verdict))
            else:
                with progress.hidden():
                    print_rich(verdict_block(verdict, chosen.name))

        if json != "-":
            with progress.hidden():
                typer.echo(f"{title}\n")
        verdicts, early_end = collect_rows(measure(), show)
    environment = conditions(
        loaded, chosen.name, chosen_text.name, quick=quick, seed=seed, **vars(size)
    )
    missing = [claim.name for claim in claims[len(verdicts) :]]
    if missing:
        environment["missing"] = missing
    show_results(verdict_data(paper, verdicts, environment), json, verdict_summary(verdicts))
    finish(early_end, missing, [v.claim.name for v in verdicts if v.status == "failed"])
