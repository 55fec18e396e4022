"""Without the extras, the library works, and a command says in one sentence what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = "import sys; sys.modules.update({name: None for name in %r}); "


def run(code, *blocked):
    """Run code in an interpreter in which some packages cannot be imported."""
    args = [sys.executable, "-c", BLOCK % (blocked,) + code]
    return subprocess.run(args, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("blocked", ["typer", "rich"])
def test_the_command_line_names_its_extra(blocked):
    found = run("sys.argv = ['kvloom', '--help']; from kvloom.cli import main; main()", blocked)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        "kvloom: the command line needs typer and rich, which are not installed; "
        "run: pip install 'kvloom[cli]'\n"
    )


def test_a_plot_names_its_extra():
    found = run(
        "from kvloom.errors import InputError\n"
        "from kvloom.report.plots import check_plot\n"
        "try: check_plot('a.png')\n"
        "except InputError as error: print(error)",
        "matplotlib",
    )
    assert found.stdout == (
        "plots need matplotlib, which is not installed; run: pip install 'kvloom[plot]'\n"
    )


def test_the_library_needs_no_extra():
    code = (
        "import kvloom, kvloom.analyse.attention, kvloom.analyse.error, kvloom.bench.decode, "
        "kvloom.calibrate, kvloom.eval, kvloom.inspect; kvloom.Cache, kvloom.attach"
    )
    found = run(code, "typer", "rich", "matplotlib", "click")
    assert (found.returncode, found.stderr) == (0, "")
