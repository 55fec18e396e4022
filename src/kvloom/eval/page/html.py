"""One HTML file that shows results; it needs no network and no other file.

Decides how data are inserted into the page safely. The page consists of `template.html`,
`style.css` and the scripts in this folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

_SCRIPTS = ("base.js", "chart.js", "quality.js", "maps.js", "table.js", "samples.js", "main.js")


def page(summary: dict[str, Any], chunks: Sequence[str]) -> str:
    """Return the page for the summary and the chunks of `page_data`.

    No text can end the script element that contains it, nor start another.
    """
    text = json.dumps(summary, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    packed = "\n".join(
        f'<script type="text/plain" id="chunk{i}">{chunk}</script>'
        for i, chunk in enumerate(chunks)
    )
    html = _part("template.html")
    for placeholder, part in (
        ("@STYLE@", _part("style.css")),
        ("@SCRIPT@", "\n".join(map(_part, _SCRIPTS))),
        ("@CHUNKS@", packed),
        ("@DATA@", text.replace("<", "\\u003c")),  # last: it may contain any text
    ):
        html = html.replace(placeholder, part, 1)
    return html


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
