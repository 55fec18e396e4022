"""The library needs none of the packages of the laboratory."""

from __future__ import annotations

import subprocess
import sys


def test_the_library_needs_nothing_of_the_laboratory():
    blocked = "typer", "rich", "matplotlib", "click", "kvloom_lab"
    code = (
        f"import sys; sys.modules.update({{name: None for name in {blocked}}}); "
        "import kvloom, kvloom.calibrate; kvloom.Cache, kvloom.attach"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
