"""The elements of an HTML page, as a browser reads them."""

from __future__ import annotations

from html.parser import HTMLParser


class Elements(HTMLParser):
    """Start tags with their attributes, and the text in script elements."""

    def __init__(self):
        super().__init__()
        self.tags, self.scripts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += text


def parse(html: str) -> Elements:
    """The elements of a page."""
    found = Elements()
    found.feed(html)
    return found
