"""Seed deliberate defects, one at a time, and see whether the tests catch them.

    python tools/seed_defects.py              # all of them: a table of caught and missed
    python tools/seed_defects.py --only 7 9   # two of them
    python tools/seed_defects.py --list       # what they are

Each defect of `defects.DEFECTS` goes into a temporary copy of the source tree. The tests that are
likely to catch it run first; if they pass, the whole default run follows. Exits with 1 if a defect
is missed, and with 2 if the text that a defect replaces is not found exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from defects import DEFECTS, Defect

ROOT = Path(__file__).resolve().parents[1]
PASSED = 0  # pytest's exit code


class Found(NamedTuple):
    """What became of a defect: the test that caught it, None if none did; and in which run."""

    number: int
    defect: Defect
    test: str | None
    run: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the defects and run nothing")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="seed these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found here too")
    options = parser.parse_args(arguments)
    every = dict(enumerate(DEFECTS, start=1))
    if unknown := set(options.only or []) - every.keys():
        parser.error(f"--only {min(unknown)} is not one of 1 to {len(DEFECTS)}")
    chosen = {number: every[number] for number in options.only or every}
    if options.list:
        for number, defect in chosen.items():
            print(f"{number:3} {defect.part:8} {defect.file}: {defect.why}")
        return 0
    problems = [f"defect {n}: {p}" for n, d in chosen.items() for p in misplaced(d, ROOT)]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    found = []
    with tempfile.TemporaryDirectory(prefix="kvloom-defects-") as folder:
        copy_tree(Path(folder))
        for number, defect in chosen.items():
            with seeded(defect, Path(folder)):
                test, run = caught_by(Path(folder), defect.tests), "its own tests"
                if test is None:
                    test, run = caught_by(Path(folder), ["-n", "auto"]), "the whole run"
            found.append(Found(number, defect, test, run))
            print(line(found[-1]), flush=True)
    missed = [one.number for one in found if one.test is None]
    print(f"{len(found) - len(missed)} of {len(found)} caught")
    if options.json is not None:
        options.json.write_text(json.dumps([as_json(one) for one in found], indent=1) + "\n")
    return 1 if missed else 0


def misplaced(defect: Defect, root: Path) -> list[str]:
    """Why a defect cannot be seeded in a tree: its text is not found exactly once."""
    path = root / defect.file
    if not path.is_file():
        return [f"{defect.file} does not exist"]
    count = path.read_text().count(defect.old)
    return [] if count == 1 else [f"its text is found {count} times in {defect.file}, not once"]


def copy_tree(folder: Path) -> None:
    """Copy the files of the tree that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


@contextmanager
def seeded(defect: Defect, folder: Path) -> Iterator[None]:
    """Have a defect in the tree, and the file as it was afterwards, its times included.

    Compiled kernels are cached by their source's time, so they are compiled once for all defects.
    """
    path = folder / defect.file
    text, times = path.read_text(), path.stat()
    path.write_text(text.replace(defect.old, defect.new))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def caught_by(folder: Path, arguments: Sequence[str]) -> str | None:
    """Run pytest in a tree up to the first failure, and return the test that failed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True,
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, folder.glob("packages/*/src"))),
            "NUMBA_CACHE_DIR": str(folder / ".numba"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )  # fmt: skip
    if done.returncode == PASSED:
        return None
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED ", "ERROR "))]
    failed = [x for x in failed if "::" in x]  # else a file could not be collected
    if not failed:
        raise RuntimeError(f"pytest could not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[0].split(" ", 1)[1].partition(" - ")[0]


def line(found: Found) -> str:
    """One line of the table."""
    verdict = "missed" if found.test is None else f"caught by {found.test} ({found.run})"
    return f"{found.number:3} {found.defect.part:8} {found.defect.why}: {verdict}"


def as_json(found: Found) -> dict[str, object]:
    """What is written of a defect."""
    defect = found.defect
    return {
        "number": found.number, "part": defect.part, "file": defect.file, "why": defect.why,
        "caught": found.test is not None, "test": found.test,
        "run": None if found.test is None else found.run,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
