"""Write the tables of the documentation that follow from the code.

    python docs/generate.py

A table stands between `<!-- options COMMAND -->` or `<!-- coverage kernels -->` and `<!-- end -->`.
Its words are the help texts of the command line, or what the backends of an operation declare to
cover.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import typer

from kvloom.kernels.ops import OPS
from kvloom_lab.cli.app import app
from kvloom_lab.cli.eval import EvalCommand
from kvloom_lab.cli.options import RECIPE_HELP, RECIPES_HELP

DOCS = Path(__file__).parent
PAGES = DOCS / "reference" / "command-line.md", DOCS / "internals" / "kernels.md"
MARKED = re.compile(r"(<!-- (\w+) ([\w.]+) -->\n\n).*?(<!-- end -->)", re.DOTALL)
Options = dict[str, tuple[str, str]]  # name: default and meaning
ALONE = ("`throughput`",)


def filled(text: str) -> str:
    """Return the text of a page with its tables as the code has them."""
    kinds = {"options": options, "coverage": coverage}
    return MARKED.sub(lambda mark: f"{mark[1]}{kinds[mark[2]](mark[3])}\n\n{mark[4]}", text)


def coverage(_: str) -> str:
    """Return what the kernels of each operation cover, one row for those that cover the same."""
    names: dict[tuple[str, ...], list[str]] = {}
    for op in OPS.values():
        backends = (op.backends.get(name) for name in ("cpu", "gpu"))
        words = tuple("–" if backend is None else str(backend.coverage) for backend in backends)
        names.setdefault(words, []).append(f"`{op.name}`")
    rows = [(", ".join(ops), *words) for words, ops in names.items()]
    return _table(("Operation", "CPU kernels", "GPU kernels"), rows)


def options(name: str) -> str:
    """Return the options of a command, of a group of commands, or those of most commands.

    A command of `ALONE` has a table of its own, as "group.command".
    """
    if name == "common":
        return _table(("Option", "Meaning"), [(n, meaning) for n, meaning in sorted(COMMON)])
    group, _, alone = name.partition(".")
    found = {
        command: its
        for command, its in COMMANDS[group].items()
        if (command == f"`{alone}`" if alone else command not in ALONE)
    }
    names = dict.fromkeys(option for command in found.values() for option in command)
    rows, others = [], []
    for option in names:
        cells = [command.get(option) for command in found.values()]
        meaning = next(cell[1] for cell in cells if cell)
        if (option, meaning) in COMMON:
            others.append(option)
        else:
            rows.append((option, *(cell[0] if cell else "–" for cell in cells), meaning))
    defaults = found if len(found) > 1 else ("Default",)
    table = _table(("Option", *defaults, "Meaning"), rows)
    return f"{table}\n\nAlso {', '.join(others)}." if others else table


def commands() -> dict[str, dict[str, Options]]:
    """Return the commands of each group by name; a command that is no group is alone in its own."""
    groups = {}
    for name, group in typer.main.get_command(app).commands.items():
        members = getattr(group, "commands", {name: group})
        groups[name] = {f"`{own}`": _options(command) for own, command in members.items()}
    return groups


def _options(command: Any) -> Options:
    """Return the arguments and options of a command."""
    found = {}
    if isinstance(command, EvalCommand):
        command.name_tasks()
    for one in command.params:
        default = "required" if one.required else f"`{one.default}`"
        if one.default is None or one.default is False:
            default = default if one.required else ""
        meaning = (one.help or "").replace(RECIPES_HELP, "Recipes").replace(RECIPE_HELP, "Recipe")
        meaning = re.sub(r"( Recipes?| \(see kvloom recipes\)\.?)+$", "", meaning).rstrip(".")
        name = one.opts[0] if one.param_type_name == "option" else one.metavar
        value = f" {one.metavar}" if one.metavar and name != one.metavar else ""
        found[f"`{name}{value}`"] = (default, meaning)
    return found


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    return "\n".join(f"|{'|'.join(row)}|" for row in [header, ["---"] * len(header), *cells])


COMMANDS = commands()
COMMON = {
    (name, meaning)
    for (name, (_, meaning)), times in Counter(
        (name, one)
        for group in COMMANDS.values()
        for command in group.values()
        for name, one in command.items()
    ).items()
    if times > 5
}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
