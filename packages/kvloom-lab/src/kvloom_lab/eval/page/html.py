"""The page of results: `template.html`, `style.css` and the scripts in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...report.html_page import html_page

_SCRIPTS = ("base.js", "chart.js", "quality.js", "maps.js", "table.js", "samples.js", "main.js")


def page(summary: dict[str, Any], chunks: Sequence[str]) -> str:
    """Return the page for the summary and the chunks of `page_data`."""
    packed = "\n".join(
        f'<script type="text/plain" id="chunk{i}">{chunk}</script>'
        for i, chunk in enumerate(chunks)
    )
    return html_page(__package__, _SCRIPTS, summary, {"@CHUNKS@": packed})
