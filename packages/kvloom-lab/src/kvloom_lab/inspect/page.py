"""The page of the record of `trace_recipe`: `template.html`, `style.css` and `script.js`."""

from __future__ import annotations

from typing import Any

from ..report.html_page import html_page


def page(data: dict[str, Any]) -> str:
    """Return the page for the data of `trace_recipe`; the keys model and source are shown too."""
    return html_page(__package__, ["script.js"], data)
