"""One HTML file that shows what `follow` noted: no network, no other file.

Decides how data gets into the page safely; what it looks like and does is in `template.html`.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

_PLACE = "@DATA@"


def page(data: dict[str, Any]) -> str:
    """Return the page with `follow`'s data in it; further keys (model, source) are shown as well.

    No text of a token or a name can end the script element it lies in, nor begin another.
    """
    template = files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return template.replace(_PLACE, text.replace("<", "\\u003c"), 1)
