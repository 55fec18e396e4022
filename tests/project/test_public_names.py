"""The other distributions and the examples use documented names of the library, and no others."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "cache", "calibrate", "errors", "hf", "keep", "kernels", "paged", "positions", "progress",
    "recall", "recipe", "registry", "store", "units",
)  # fmt: skip
EXAMPLES = ROOT / "packages" / "kvloom" / "tests" / "extend"
FOLDERS = [
    *(ROOT / "packages" / name / "src" for name in ("kvloom-lab", "kvloom-vllm")),
    ROOT / "examples" / "kvloom-formats" / "src",
    EXAMPLES,
]
PAGES = ROOT / "docs" / "reference"


def imported_names(folder: Path) -> set[tuple[str, str]]:
    """Return (module of kvloom, name) of all imports in a folder's files; of EXAMPLES, `my_*`."""
    found = set()
    for path in folder.rglob("my_*.py" if folder == EXAMPLES else "*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            found |= {(module, name) for module, name in names if module.split(".")[0] == "kvloom"}
    return found


def is_public(module: str, name: str) -> bool:
    """Return whether a name is in `__all__` of kvloom or of a package directly below it."""
    if (module, name) in (("kvloom", ""), ("kvloom", "__version__")):
        return True
    _package, _, package = module.partition(".")
    return (not package or package in PACKAGES) and name in import_module(module).__all__


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_other_distributions_import_public_names_only(folder):
    names = imported_names(folder)
    assert len(names) > 5
    assert [".".join(x) for x in sorted(names) if not is_public(*x)] == []


def test_public_names_in_use_have_a_docstring_and_are_in_the_reference():
    pages = "\n".join(page.read_text() for page in PAGES.rglob("*.md"))
    root = set(import_module("kvloom").__all__)
    names = {x for folder in FOLDERS for x in imported_names(folder) if all(x) and is_public(*x)}
    missing = []
    for module, name in sorted(names - {("kvloom", "__version__")}):
        thing = getattr(import_module(module), name)
        assert not isinstance(thing, type | FunctionType) or inspect.getdoc(thing), name
        shown = f"kvloom.{name}" if name in root else f"{module}.{name}"
        if module != "kvloom.errors" and f"::: {shown}\n" not in f"{pages}\n":
            missing.append(shown)
    assert missing == []
