"""One HTML file with its style, scripts and data; it needs no network and no other file.

Decides how data are inserted into a page safely. A package that shows a page has `template.html`,
`style.css` and its scripts in its folder; `page.js` comes before these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any


def html_page(
    package: str, scripts: Sequence[str], data: Any, more: Mapping[str, str] | None = None
) -> str:
    """Return the template of a package with its style, scripts and data.

    scripts: file names, in order. data: plain data for the script element `data`. more: text by
    placeholder, such as "@CHUNKS@". No text in the data can end the script element that contains
    it, nor start another. Raises `ValueError` for NaN and infinity.
    """

    def read(name: str, package: str = package) -> str:
        return files(package).joinpath(name).read_text(encoding="utf-8")

    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    html = read("template.html")
    for placeholder, part in (
        ("@STYLE@", read("style.css")),
        ("@SCRIPT@", "\n".join([read("page.js", __package__), *map(read, scripts)])),
        *(more or {}).items(),
        ("@DATA@", text.replace("<", "\\u003c")),  # last: it may contain any text
    ):
        html = html.replace(placeholder, part, 1)
    return html
