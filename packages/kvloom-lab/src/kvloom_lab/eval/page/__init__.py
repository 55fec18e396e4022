"""Show results of evaluations: read their folders, write one HTML page.

    from kvloom_lab.eval.page import page, page_data, read_run
    Path("report.html").write_text(page(*page_data([read_run(Path("results"))])))

`read` reads the folders of `kvloom eval`, `kvpress` those of kvpress; `data` converts them to the
page's data, and `html` writes the page. `kvloom_lab.eval.summary` computes the figures.
"""

from __future__ import annotations

from .data import page_data
from .html import page
from .kvpress import is_kvpress, read_kvpress
from .read import RunResults, read_run

__all__ = ["RunResults", "is_kvpress", "page", "page_data", "read_kvpress", "read_run"]
