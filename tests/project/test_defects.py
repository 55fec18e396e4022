"""The deliberate defects of tools/defects.py fit the code as it is."""

from __future__ import annotations

import builtins
import re
from keyword import iskeyword
from pathlib import Path

import pytest

from defects import DEFECTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.why)
def test_the_text_that_a_defect_replaces_is_there_once(defect):
    assert (ROOT / defect.file).read_text().count(defect.old) == 1


@pytest.mark.parametrize(
    "path", sorted({path for defect in DEFECTS for path in defect.tests if "/" in path})
)
def test_the_tests_that_should_catch_a_defect_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.why)
def test_a_defect_uses_names_that_the_file_has(defect):
    """Else any test would catch it, by a NameError."""
    builtin = {"T", "False", "extend", "fromkeys", "start", "stop"}
    names = set(re.findall(r"(?<![\w.\"'])[A-Za-z_]\w*", defect.new)) - builtin - set(dir(builtins))
    text = (ROOT / defect.file).read_text()
    unknown = {x for x in names if not re.search(rf"\b{x}\b", text) and not iskeyword(x)}
    assert not unknown
