"""Check the links that the generator of the documentation does not check.

Run `python docs/check_links.py` after the build. Every relative link and image of README.md,
CONTRIBUTING.md, tests/README.md and the pages of docs/ must name a file. An anchor in README.md
must exist on its page. A link title "test_..." in README.md must be a test in the linked file.
Every page must be in the navigation.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS, SITE = ROOT / "docs", ROOT / "site"
LINK = re.compile(r'\]\((?!\w+://|#)([^)\s#]+)(?:#([^)\s]+))?(?:\s+"([^"]*)")?\)')
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def main() -> int:
    """Print every problem; return the exit status."""
    found = list(unlisted())
    beside = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md"))
    for page in (*beside, *DOCS.rglob("*.md")):
        found += [f"{page.relative_to(ROOT)}: {problem}" for problem in problems(page)]
    print(*found, f"{len(found)} problems in links", sep="\n")
    return 1 if found else 0


def unlisted() -> list[str]:
    """Pages that the navigation does not list."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = (page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    return [
        f"docs/{page}: not in the navigation of mkdocs.yml" for page in pages if page not in nav
    ]


def problems(page: Path) -> list[str]:
    """Return the wrong links of one page."""
    found = []
    text = CODE.sub(
        lambda code: "`" if "\n" in code[0] else code[0], page.read_text(encoding="utf-8")
    )
    for target, anchor, title in LINK.findall(text):
        path = page.parent / target
        outside = page.parent == ROOT  # the generator checks the anchors of all other pages
        if not path.exists():
            found.append(f"{target} does not exist")
        elif anchor and outside and f'id="{anchor}"' not in built(path):
            found.append(f"{target} has no anchor {anchor!r}")
        elif title.startswith("test_") and f"def {title}(" not in path.read_text(encoding="utf-8"):
            found.append(f"{target} has no test {title}")
    return found


def built(page: Path) -> str:
    """Return the HTML of a page of docs/, or "" if that page does not exist."""
    if DOCS not in page.parents:
        return ""
    html = (SITE / page.relative_to(DOCS)).with_suffix(".html")
    return html.read_text(encoding="utf-8") if html.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
