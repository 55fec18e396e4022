"""The command line, `kvloom`: a file for each group of commands.

Each command imports what it needs when it runs.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from .app import app

    app()
