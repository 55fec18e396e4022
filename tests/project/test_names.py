"""One name for one class: a reader who searches for a class finds it at once."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import kvloom
import kvloom_lab

SOURCES = [Path(one.__file__).parent for one in (kvloom, kvloom_lab)]
SHARED = {
    "Settings",  # public: of kvloom.calibrate, kvloom_lab.eval and kvloom_lab.tuner
    "Scratch",  # each CPU kernel has its own workspace
}


def test_no_two_classes_have_the_same_name():
    files = defaultdict(list)
    for path in [file for source in SOURCES for file in source.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(path)
    repeated = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert len(files) > 200
    assert {name: paths for name, paths in repeated.items() if name not in SHARED} == {}
    assert repeated.keys() >= SHARED, "remove a name that is no longer shared"
