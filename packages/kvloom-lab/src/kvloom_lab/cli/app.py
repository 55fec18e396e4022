"""All commands of the command line.

Nothing heavy is imported before a command runs, so that `kvloom --help` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvloom import __version__

from . import analyse, bench, eval, generate, recipes, store
from .outputs import user_errors


class Commands(TyperGroup):
    """All commands; each ends with a sentence where the user made a mistake."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was called."""
        with user_errors():
            return super().invoke(ctx)


app = typer.Typer(
    name="kvloom",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("calibrate")(recipes.calibrate_command)
app.command("check")(analyse.check)
app.command("compare")(eval.compare_command)
app.command("eval", cls=eval.EvalCommand)(eval.eval_command)
app.command("generate")(generate.generate_command)
app.command("inspect")(generate.inspect_command)
app.command("papers")(eval.papers_command)
app.command("plan")(recipes.plan_command)
app.command("recipes")(recipes.recipes_command)
app.command("report")(eval.report_command)
app.command("tune")(recipes.tune_command)
app.command("warm")(generate.warm_command)
app.add_typer(analyse.app, name="analyse")
app.add_typer(bench.app, name="bench")
app.add_typer(store.app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvloom {__version__}")
        raise typer.Exit


@app.callback()
def _kvloom(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Smaller KV caches for Hugging Face transformers models."""
