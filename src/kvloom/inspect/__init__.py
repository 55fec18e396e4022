"""See what a recipe does to a text: run it, note what every layer and head holds, show a page.

    from kvloom.compare import load
    from kvloom.inspect import follow, page
    model, tokenizer = load()
    Path("page.html").write_text(page(follow(model, tokenizer, "h2o", "some text")))

`follow` runs the model and notes, `page` makes one HTML file of it. Neither decides anything about
caches: they read what a cache says of itself.
"""

from __future__ import annotations

from .page import page
from .trace import follow, pieces

__all__ = ["follow", "page", "pieces"]
