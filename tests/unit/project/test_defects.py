"""The deliberate defects of tools/seed_defects.py: each can be seeded in the code as it is."""

from __future__ import annotations

from pathlib import Path

import seed_defects
from defects import DEFECTS

ROOT = Path(seed_defects.__file__).parents[1]


def test_the_text_that_a_defect_replaces_is_found_once_and_its_tests_exist():
    assert len(DEFECTS) >= 40
    for defect in DEFECTS:
        assert seed_defects.misplaced(defect, ROOT) == [], defect.why
        assert defect.new != defect.old
        assert all((ROOT / x).exists() for x in defect.tests if x.startswith("tests/"))
