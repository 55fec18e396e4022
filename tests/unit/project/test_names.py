"""One name for one class: a reader who searches for a class finds it at once."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import kvloom

SOURCE = Path(kvloom.__file__).parent
SHARED = {
    "Row",  # public: of kvloom.bench, kvloom.eval and kvloom.planner
    "Settings",  # public: of kvloom.calibrate, kvloom.eval and kvloom.tuner
    "Scratch",  # each CPU kernel has its own workspace
}


def test_no_two_classes_have_the_same_name():
    files = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(path.relative_to(SOURCE))
    repeated = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert len(files) > 200
    assert {name: paths for name, paths in repeated.items() if name not in SHARED} == {}
    assert repeated.keys() >= SHARED, "remove a name that is no longer shared"
