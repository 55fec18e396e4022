"""Show what a recipe does to a text: run it, record every layer and head, write an HTML page.

    from kvloom_lab.eval import load
    from kvloom_lab.inspect import page, trace_recipe
    model, tokenizer = load()
    Path("page.html").write_text(page(trace_recipe(model, tokenizer, "h2o", "some text")))

`trace_recipe` runs the model and records what caches report about themselves; `page` converts the
record to one HTML file.
"""

from __future__ import annotations

from .page import page
from .token_text import token_texts
from .trace import trace_recipe

__all__ = ["page", "token_texts", "trace_recipe"]
