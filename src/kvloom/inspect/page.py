"""One HTML file that shows the record of `trace_recipe`; it needs no network and no other file.

Decides how data are inserted into the page safely. The page consists of `template.html`,
`style.css` and `script.js` in this folder.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def page(data: dict[str, Any]) -> str:
    """Return the page for the data of `trace_recipe`; the keys model and source are shown too.

    No token's text and no name can end the script element that contains it, nor start another.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    html = _part("template.html")
    for placeholder, part in (
        ("@STYLE@", _part("style.css")),
        ("@SCRIPT@", _part("script.js")),
        ("@DATA@", text.replace("<", "\\u003c")),  # last: it may contain any text
    ):
        html = html.replace(placeholder, part, 1)
    return html


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
