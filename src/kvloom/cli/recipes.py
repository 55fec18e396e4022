"""`kvloom recipes`: list all recipes, or show one recipe in full."""

from __future__ import annotations

import inspect
import json as js
import sys
from typing import Annotated, Any

import typer

from .outputs import output_width, print_rich
from .user_errors import user_errors


def command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help='One recipe, such as "kivi:bits=4" or recipe.toml.'),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """List the recipes and their options; with a name, show that recipe, its paper and its TOML.

    The options of a recipe follow its name: "kivi:bits=4,group=64". You can save its TOML to a
    file, change it, and give the file's name wherever a recipe is expected.
    """
    with user_errors():
        from ..recipe.resolve import RECIPES

        if name is not None:
            found = describe(name)
            typer.echo(js.dumps(found, indent=2, ensure_ascii=False) if json else _page(found))
        elif json:
            summaries = [_summary(n) for n in RECIPES]
            typer.echo(js.dumps(summaries, indent=2, ensure_ascii=False))
        else:
            _print_list([_summary(n) for n in RECIPES])


def describe(spec: str) -> dict[str, Any]:
    """Return name, summary, options and docs of a recipe, and the recipe as data and as TOML."""
    from ..recipe.resolve import ALIASES, RECIPES, resolve

    recipe = resolve(spec)
    name = spec.partition(":")[0].strip()
    name = ALIASES.get(name, name)
    if name in RECIPES:
        module = sys.modules[RECIPES[name].__module__]
        about = {**_summary(name), "docs": inspect.cleandoc(module.__doc__ or "")}
    else:
        about = {"name": spec, "summary": "A recipe file.", "options": {}, "docs": ""}
    return {**about, "recipe": recipe.to_dict(), "toml": recipe.to_toml()}


def _summary(name: str) -> dict[str, Any]:
    from ..recipe.resolve import options, summary

    return {"name": name, "summary": summary(name), "options": options(name)}


def _options_text(found: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in found["options"].items())


def _page(found: dict[str, Any]) -> str:
    defaults = _options_text(found) or "none"
    options = f"options and their defaults: {defaults}" if found["docs"] else ""
    head = f"{found['name']}: {found['summary']}"
    parts = [head, options, found["docs"], "as TOML:", found["toml"].rstrip()]
    return "\n\n".join(part for part in parts if part)


def _print_list(found: list[dict[str, Any]]) -> None:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    narrow: list[Any] = []  # for outputs too narrow for two columns
    for recipe in found:
        lines = [Text(recipe["summary"])]
        if recipe["options"]:
            lines.append(Text(_options_text(recipe), "dim"))
        table.add_row(Text(recipe["name"], "bold"), Group(*lines))
        narrow += [Text(recipe["name"], "bold"), Padding(Group(*lines), (0, 0, 0, 2))]
    print_rich(table if output_width() >= 50 else Group(*narrow))
