"""Progress on stderr: plain lines where it is not a terminal, a bar where it is."""

from __future__ import annotations

import io
import sys
import time

from kvloom_lab.cli import progress as module
from kvloom_lab.cli.progress import show_progress


def until(there, seconds=10.0):
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.005)
    assert there()


def test_lines_say_what_is_done_and_how_far(monkeypatch):
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with show_progress() as shown:
        shown("loading the model")
        until(lambda: "kvloom: loading the model (0:00:00)\n" in err.getvalue())
        count = shown.counter(total=8)
        count("decoding", 3)
        count("", 3)
        until(lambda: "kvloom:  75% decoding (0:00:00, about 0:00:01 left)\n" in err.getvalue())
        shown.line("rtn: done")
    assert "rtn: done\n" in err.getvalue()
    length = len(err.getvalue())
    time.sleep(0.05)
    assert len(err.getvalue()) == length  # nothing is printed once the work is done


def test_an_estimate_leaves_out_what_an_earlier_run_finished():
    shown = module.ProgressDisplay()
    now = 100.0
    shown.bar.get_time = lambda: now
    count = shown.counter(total=204)

    def left(seconds, units):
        nonlocal now
        now += seconds
        count("scoring", units)
        return shown.bar.tasks[0].time_remaining

    assert left(0, 4) is None
    assert left(10, 3) == 197 * 10 / 3 // 1 + 1
    assert left(20, 1) == 196 * 30 / 4


def test_short_work_prints_nothing(capsys):
    with show_progress() as shown:
        shown("reading", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_and_the_lines_above_it(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    with show_progress() as shown:
        count = shown.counter(total=4)
        count("reading [1/2]", 1)
        count("", 1)
        shown.line("a finished row: " + "x" * 80)
    said = err.getvalue()
    assert "reading [1/2]" in said
    assert "50%" in said
    assert "0:00:01" in said
    assert "a finished row: " + "x" * 80 in said  # not broken into lines
