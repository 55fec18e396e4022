"""`kvloom recipes`: list all recipes, or show one recipe in full."""

from __future__ import annotations

import inspect
import json as js
import re
import sys
from typing import Annotated, Any

import typer

from .outputs import output_width, print_rich, user_errors


def command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help='One recipe, such as "kivi:bits=4" or recipe.toml.'),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """List the recipes and their options; with a name, show that recipe, its paper and its TOML.

    The options of a recipe follow its name: "kivi:bits=4,group=64". Every recipe has the option
    start: "kivi:start=2048" keeps everything exact up to 2048 tokens. Some layers can have another
    recipe: "kivi@first 2=full@20-23=kivi:bits=4". You can save its TOML to a file, change it, and
    give the file's name wherever a recipe is expected.
    """
    with user_errors():
        from kvloom.recipe import RECIPES

        if name is not None:
            recipe = describe(name)
            typer.echo(js.dumps(recipe, indent=2, ensure_ascii=False) if json else _page(recipe))
        elif json:
            summaries = [_summary(n) for n in RECIPES]
            typer.echo(js.dumps(summaries, indent=2, ensure_ascii=False))
        else:
            _print_list([_summary(n) for n in RECIPES])


def describe(spec: str) -> dict[str, Any]:
    """Return name, summary, options and docs of a recipe, and the recipe as data and as TOML.

    For a recipe of any score, index or format, also the choices: their names and options.
    """
    from kvloom.recipe import RECIPES, part_options, resolve

    recipe = resolve(spec)
    name = re.split("[:@]", spec)[0].strip()
    if name in RECIPES:
        module = sys.modules.get(RECIPES[name].__module__)
        docs = (module and module.__doc__) or RECIPES[name].__doc__ or ""
        about = {**_summary(name), "docs": inspect.cleandoc(docs)}
        if choices := part_options(name):
            about["choices"] = choices
    else:
        about = {"name": spec, "summary": "A recipe file.", "options": {}, "docs": ""}
    return {**about, "recipe": recipe.to_dict(), "toml": recipe.to_toml()}


def _summary(name: str) -> dict[str, Any]:
    from kvloom.recipe import options, summary

    return {"name": name, "summary": summary(name), "options": options(name)}


def _options_text(recipe: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in recipe["options"].items())


def _page(recipe: dict[str, Any]) -> str:
    defaults = _options_text(recipe) or "none"
    options = f"options and their defaults: {defaults}" if recipe["docs"] else ""
    head = f"{recipe['name']}: {recipe['summary']}"
    choices = [
        _choice(kind, choice_options) for kind, choice_options in recipe.get("choices", {}).items()
    ]
    listed = "\n".join(["choices and their options:", *choices]) if choices else ""
    parts = [head, options, recipe["docs"], listed, "as TOML:", recipe["toml"].rstrip()]
    return "\n\n".join(part for part in parts if part)


def _choice(kind: str, choice_options: dict[str, Any]) -> str:
    spelled = ", ".join(k if v is None else f"{k}={v}" for k, v in choice_options.items())
    return f"  {kind}: {spelled}" if spelled else f"  {kind}"


def _print_list(descriptions: list[dict[str, Any]]) -> None:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    narrow: list[Any] = []  # for outputs too narrow for two columns
    for recipe in descriptions:
        lines = [Text(recipe["summary"])]
        if recipe["options"]:
            lines.append(Text(_options_text(recipe), "dim"))
        table.add_row(Text(recipe["name"], "bold"), Group(*lines))
        narrow += [Text(recipe["name"], "bold"), Padding(Group(*lines), (0, 0, 0, 2))]
    print_rich(table if output_width() >= 50 else Group(*narrow))
