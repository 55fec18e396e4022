"""The command line, `kvloom`: one file for each command.

Each command imports what it needs when it runs.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from .app import app

    app()
