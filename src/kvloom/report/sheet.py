"""A table of figures that is readable at any width.

Decides what happens where a table is wider than the terminal: its columns are split into blocks,
one below the other, each with the names of the rows in front. No figure is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_NAME = 24  # letters of a name that stay on one line while there are blocks to be saved


class Sheet:
    """Rows of figures; rich prints it."""

    def __init__(self, title: str, first: str, columns: Sequence[str], *, numbers: bool = False):
        """Begin a sheet. first: heading of the rows' names; numbers: these names are numbers."""
        self.title, self.first, self.columns, self.numbers = title, first, columns, numbers
        self.rows: list[tuple[Text, tuple[str, ...]] | None] = []

    def add(self, name: str, *cells: str) -> None:
        """Add a row; columns for which there is no cell stay empty."""
        self.rows.append((Text(name), cells))

    def part(self, heading: str) -> None:
        """Begin a part of the rows, under a heading."""
        self.rows += [None, (Text(heading, "bold"), ())]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        """Yield the title and as few blocks as the width allows."""
        yield Text(self.title, "italic")
        block: list[int] = []
        width = options.max_width
        longest = max((cell_len(str(row[0])) for row in self.rows if row), default=0)
        names = min(longest, _NAME, width // 3)  # long names break their lines before blocks do
        unlimited = options.update(max_width=10_000)
        for column in range(len(self.columns)):
            wider = self._table([*block, column], names, names)
            if block and Measurement.get(console, unlimited, wider).maximum > width:
                yield self._table(block, names)
                block = []
            block.append(column)
        yield self._table(block, names)

    def _table(self, block: list[int], least: int, most: int | None = None) -> Table:
        """A table of some columns; least, most: width of the names."""
        made = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        justify: JustifyMethod = "right" if self.numbers else "left"
        made.add_column(
            self.first, justify=justify, overflow="fold", min_width=least, max_width=most
        )
        whole = len(block) > 1  # a column that is too wide by itself breaks its lines
        for column in block:
            made.add_column(
                self.columns[column], justify="right", overflow="fold", no_wrap=whole,
                vertical="bottom",
            )  # fmt: skip
        for row in self.rows:
            if row is None:
                made.add_section()
            else:
                name, cells = row
                made.add_row(name, *(cells[i] if i < len(cells) else "" for i in block))
        return made
