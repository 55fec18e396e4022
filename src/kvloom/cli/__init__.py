"""The command line, `kvloom`: one file for each command.

Importing this package imports nothing else: `main` checks that the packages of the extra
`kvloom[cli]` are installed, and each command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line."""
    if find_spec("typer") is None or find_spec("rich") is None:
        print(
            "kvloom: the command line needs typer and rich, which are not installed; "
            "run: pip install 'kvloom[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
    from .app import app

    app()
