"""One HTML file that shows what `follow` noted: no network, no other file.

Decides how the parts get into the page safely. `template.html` is its structure, `style.css` its
looks, `script.js` what it does; all of them lie beside this file.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def page(data: dict[str, Any]) -> str:
    """Return the page with `follow`'s data in it; further keys (model, source) are shown as well.

    No text of a token or a name can end the script element it lies in, nor begin another.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    html = _part("template.html")
    for place, part in (
        ("@STYLE@", _part("style.css")),
        ("@SCRIPT@", _part("script.js")),
        ("@DATA@", text.replace("<", "\\u003c")),  # last: it may hold anything
    ):
        html = html.replace(place, part, 1)
    return html


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
