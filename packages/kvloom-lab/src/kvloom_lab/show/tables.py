"""Tables of figures, which stay readable at any terminal width; rich can print them.

If a table is wider than the terminal, the columns are split into blocks, which are printed one
below the other, each with the row names as its first column. No figure is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_NAME_WIDTH = 24  # characters of a row name that are kept on one line


class FigureTable:
    """A table of figures that rich can print."""

    def __init__(self, title: str, first: str, columns: Sequence[str]):
        """Create an empty table; first: heading of the row names."""
        self.title, self.first, self.columns = title, first, columns
        self.rows: list[tuple[Text, tuple[str, ...]] | None] = []
        self.notes: list[Text] = []

    def add(self, name: str, *cells: str) -> None:
        """Add a row; columns without a cell stay empty."""
        self.rows.append((Text(name), cells))

    def section(self, heading: str) -> None:
        """Start a new section of rows under a heading."""
        self.rows += [None, (Text(heading, "bold"), ())]

    def note(self, *lines: str, style: str = "") -> None:
        """Add lines below the table."""
        self.notes += [Text(line, style) for line in lines]

    def captioned(self, caption: str, *problems: str) -> FigureTable:
        """Add problems and a caption below the table, and return it."""
        self.note(*problems, style="yellow")
        self.note(caption, style="dim")
        return self

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        """Yield the title, the fewest blocks that fit the width, and the lines below."""
        yield Text(self.title, "italic")
        block: list[int] = []
        width = options.max_width
        longest = max((cell_len(str(row[0])) for row in self.rows if row), default=0)
        # Long names are wrapped before the columns are split into more blocks.
        names = min(longest, _NAME_WIDTH, width // 3)
        unlimited = options.update(max_width=10_000)
        for column in range(len(self.columns)):
            candidate = self._table([*block, column], names, names)
            if block and Measurement.get(console, unlimited, candidate).maximum > width:
                yield self._table(block, names)
                block = []
            block.append(column)
        yield self._table(block, names)
        yield from self.notes

    def _table(self, block: list[int], min_width: int, max_width: int | None = None) -> Table:
        """Return the columns of a block as a table; min_width, max_width: of the row names."""
        table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        table.add_column(self.first, overflow="fold", min_width=min_width, max_width=max_width)
        no_wrap = len(block) > 1  # a single column that is too wide wraps its lines
        for column in block:
            table.add_column(
                self.columns[column], justify="right", overflow="fold", no_wrap=no_wrap,
                vertical="bottom",
            )  # fmt: skip
        for row in self.rows:
            if row is None:
                table.add_section()
            else:
                name, cells = row
                table.add_row(name, *(cells[i] if i < len(cells) else "" for i in block))
        return table


def missing_text(environment: dict[str, Any]) -> list[str]:
    """Return a line with what an interrupted measurement lacks, if there is any."""
    missing = environment.get("missing")
    return [] if missing is None else [f"not measured: {', '.join(missing)}"]


def device_text(environment: dict[str, Any]) -> str:
    """Return the device of figures: the GPU, or the processor and its threads."""
    threads = "1 thread" if environment["threads"] == 1 else f"{environment['threads']} threads"
    return environment["gpu"] or f"{environment['cpu']}, {threads}"
