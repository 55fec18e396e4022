"""What imports what: `import kvloom` is light, and packages import downwards."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvloom
import kvloom_lab

SOURCE = Path(kvloom.__file__).parent
TESTS = Path(__file__).parents[1]
# A package may import the packages of lower levels; those of one level do not import each other.
# The root has no level: `errors`, `progress` and `state` import nothing of kvloom, `units` imports
# `errors` alone, and `encoding` also `registry`.
LEVELS = [
    {"registry", "positions"},
    {"kernels"},
    {"keep", "store", "recall"},
    {"recipe"},
    {"cache", "paged"},
    {"hf"},
    {"calibrate"},
]
MOST_LEVELS = 7
ROOT = {"errors": -1, "progress": -1, "lazy": -1, "state": -1, "units": -1, "encoding": 0}
LEVEL = ROOT | {part: i for i, parts in enumerate(LEVELS) for part in parts}
STATE = {"state", "_state"}  # of a `LayerCache`: a copy for files, and the live parts
MODULES = sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE)


def part_of(path: Path) -> str:
    """The package, or the file in the root, that a source file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """The packages that a source file imports, inside functions too."""
    package = ["kvloom", *path.relative_to(SOURCE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            # `from . import compat` and `from .hf import attach` may name modules
            found.update(f"{module}.{alias.name}" for alias in node.names)
    parts = {name.split(".")[1] for name in found if name.startswith("kvloom.")}
    return parts & (set(LEVEL) | {p.stem for p in SOURCE.iterdir()})


def test_imports_point_one_way():
    upward = []
    for path in MODULES:
        part = part_of(path)
        assert part in LEVEL, f"give {part} a level in {Path(__file__).name}"
        found = sorted(x for x in imported_parts(path) - {part} if LEVEL[x] >= LEVEL[part])
        upward += [f"{path.relative_to(SOURCE)} imports {other}" for other in found]
    assert len(MODULES) > 100
    assert upward == []


def test_the_check_sees_what_it_should():
    assert len(LEVELS) <= MOST_LEVELS
    assert "store" in imported_parts(SOURCE / "cache" / "layer_state.py")
    assert imported_parts(SOURCE / "store" / "packed.py") == {
        "encoding", "errors", "kernels", "positions", "store",
    }  # fmt: skip
    assert "errors" in imported_parts(SOURCE / "keep" / "policy.py")
    assert "cache" in imported_parts(SOURCE / "hf" / "cache.py")


def test_only_the_cache_knows_the_state_of_a_layer():
    """`hf` and `calibrate` ask a `LayerCache`; a saved file is made of the state."""
    files = [*(SOURCE / "hf").rglob("*.py"), *(SOURCE / "calibrate").rglob("*.py")]
    assert state_reads(SOURCE / "hf" / "save.py")  # calls `LayerCache.state`
    assert state_reads(SOURCE / "cache" / "inspection.py")  # reads `LayerCache._state`
    reads = {path: state_reads(path) for path in files if path.name != "save.py"}
    assert len(reads) > 20
    assert [f"{path.relative_to(SOURCE)}:{n}" for path in files for n in reads.get(path, ())] == []


def state_reads(path: Path) -> list[int]:
    """Return the lines on which a file reads or writes an attribute `state` or `_state`."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [x.lineno for x in nodes if isinstance(x, ast.Attribute) and x.attr in STATE]


def imported_files(path: Path) -> set[Path]:
    """Return the files of kvloom that a file imports, for annotations too."""
    tree = ast.parse(path.read_text())
    package = ["kvloom", *path.relative_to(SOURCE).parts[:-1]]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *((node.module or "").split("."))]
            for name in [module, *([*module, alias.name] for alias in node.names)]:
                file = SOURCE.parent.joinpath(*filter(None, name)).with_suffix(".py")
                found.add(file)
    return {file for file in found if file.is_file()} - {path}


def test_no_files_import_each_other_in_a_circle():
    graph = {path: imported_files(path) for path in SOURCE.rglob("*.py")}
    while free := {path for path, files in graph.items() if not files}:
        graph = {path: files - free for path, files in graph.items() if path not in free}
    assert not graph, sorted(str(path.relative_to(SOURCE)) for path in graph)


def loaded_by(code: str) -> set[str]:
    """Top-level packages that are loaded after `code` in a fresh interpreter."""
    show = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_kvloom_is_light():
    heavy = {"numba", "triton", "transformers", "tokenizers", "matplotlib", "typer", "rich"}
    assert not heavy & loaded_by("import kvloom")


def test_the_core_does_without_transformers():
    code = (
        "import torch, kvloom\n"
        "from kvloom.cache.layer import LayerCache\n"
        "from kvloom.recipe.resolve import resolve\n"
        "LayerCache(resolve('kivi')).attend(*torch.randn(3, 1, 1, 9, 32), scale=1.0)"
    )
    assert not {"transformers", "numba", "tokenizers", "matplotlib"} & loaded_by(code)


def test_public_names_are_there_and_listed():
    assert dir(kvloom) == sorted({*kvloom.__all__, "__version__"})
    assert dir(kvloom_lab) == sorted(kvloom_lab.__all__)
    assert [name for name in kvloom.__all__ if getattr(kvloom, name) is None] == []


def test_every_error_is_public_and_has_one_base():
    errors = {name: one for name, one in vars(kvloom.errors).items() if isinstance(one, type)}
    assert set(errors) <= set(kvloom.__all__)
    for one in errors.values():
        assert issubclass(one, kvloom.KvloomError)
        assert one is kvloom.KvloomError or issubclass(one, ValueError | RuntimeError)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvloom.nothing  # noqa: B018


def test_naive_formulas_import_nothing_of_kvloom():
    tree = ast.parse((TESTS / "naive.py").read_text())
    names = {
        name
        for node in ast.walk(tree)
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names == {"__future__", "math", "numpy"}
