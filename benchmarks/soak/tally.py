"""The budget of a campaign, what it has run, and what has failed."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EVERY_S = 15.0
SHOWN = 20  # failures of a campaign that are kept in full


class Hang(BaseException):
    """A case takes too long: no `Exception`, which the case might catch."""


class Tally:
    """What a campaign has run in its budget.

    seconds: of the budget. seed: the first number of `numbers`. state: a file with the name of the
    running case, which says where a process ended. figures: what the campaign measures.
    """

    def __init__(self, name: str, seconds: float, seed: int, state: Path) -> None:
        self.name, self.seconds, self.seed, self.state = name, seconds, seed, state
        self.cases, self.failed = 0, 0
        self.failures: list[str] = []
        self.figures: dict[str, Any] = {}
        self.began = self.shown = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the campaign began."""
        return time.monotonic() - self.began

    def numbers(self, most: int, until: float = 1.0) -> Iterator[int]:
        """Yield numbers from the seed on: `most`, or fewer once this share of the budget is used.

        The first one is always yielded, so every kind of case runs.
        """
        begin = self.elapsed
        for done in range(most):
            left = self.seconds * until - self.elapsed
            if done and left <= 0:
                return
            if time.monotonic() - self.shown > EVERY_S:
                self.shown = time.monotonic()
                used = self.elapsed - begin
                rest = max(0.0, min(left, used / max(1, done) * (most - done)))
                self.show(f"{done:,} of {most:,}, at most {rest / 60:.0f} min left in this part")
            yield self.seed + done

    def show(self, text: str) -> None:
        """Print a line of progress."""
        line = f"{self.name}: {self.cases:,} cases, {self.failed} failed; {text}"
        print(line, file=sys.stderr, flush=True)

    @contextmanager
    def case(self, name: str, limit_s: int = 120) -> Iterator[None]:
        """Count a case; an exception in it, or one that takes longer than limit_s, is a failure."""
        self.state.write_text(name)
        self.cases += 1

        def stop(*_: Any) -> None:
            raise Hang(f"more than {limit_s} s")

        former = signal.signal(signal.SIGALRM, stop)
        signal.alarm(limit_s)
        try:
            yield
        except (Exception, Hang) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            text = str(error).partition("\n")[0][:300]
            self.fail(f"{name}: {type(error).__name__}: {text} ({where})")
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, former)

    def fail(self, text: str) -> None:
        """Note a failure."""
        self.failed += 1
        if self.failed <= SHOWN:
            self.failures.append(text)
            self.show(f"FAILED {text}")

    def row(self) -> dict[str, Any]:
        """Return what a table shows."""
        return {
            "campaign": self.name, "cases": self.cases, "failures": self.failed,
            "seconds": round(self.elapsed, 1), "figures": self.figures, "failed": self.failures,
        }  # fmt: skip
