"""Code names exist: in backticks of pages and docstrings, and in the examples of pages."""

import ast
import builtins
import pkgutil
import re
import sys
import textwrap
from functools import cache
from pathlib import Path

import kvloom
import kvloom_lab  # noqa: F401

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"(?<!`)`([\w/-]+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*?\))?`(?!`)")
NO_CODE = re.compile(r"kvloom\.plugins|.*\.(css|csv|html|js|json|jsonl|kvcal|toml|yaml)")
FILES = [*ROOT.glob("[!.]*/**/*.py")]
PAGES = ROOT / "README.md", *ROOT.glob("docs/**/*.md")
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef


@cache
def all_nodes():
    """Return the syntax nodes of each file that is no test."""
    files = [path for path in FILES if "tests" not in path.relative_to(ROOT).parts]
    return {path: [*ast.walk(ast.parse(path.read_text()))] for path in files}


@cache
def classes():
    return [n for nodes in all_nodes().values() for n in nodes if isinstance(n, ast.ClassDef)]


def defined(nodes):
    """Return the names of classes, functions, arguments, variables and attributes that are set."""
    kinds = ast.arg, ast.alias, ast.ClassDef, ast.FunctionDef
    chosen = [n for n in nodes if isinstance(n, kinds) or type(getattr(n, "ctx", 0)) is ast.Store]
    return {getattr(n, key, "") for n in chosen for key in ("id", "attr", "arg", "name", "asname")}


@cache
def all_names():
    parts = {part for path in FILES for part in path.with_suffix("").parts}
    return parts.union(dir(builtins), *map(defined, all_nodes().values()))


def members(node):
    """Yield the nodes that define members of a class: those of its body, and those set on self."""
    for part in node.body:
        yield from ast.walk(part) if isinstance(part, ast.Assign | ast.AnnAssign) else [part]
    attributes = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
    yield from (part for part in attributes if ast.unparse(part.value) == "self")


def has(owner, member):
    """Return whether a class of ours has the member; a class from elsewhere may."""
    found = [node for node in classes() if node.name == owner]
    if not found:
        return owner not in ("Generic", "NamedTuple")
    bases = [re.match(r"[\w.]+", ast.unparse(base))[0] for node in found for base in node.bases]
    own = defined(part for node in found for part in members(node))
    return member in own or any(has(base, member) for base in bases)


def exists(name, call):
    owner, *members = name.split(".")
    if name.endswith(".py"):
        return any(path.as_posix().endswith(f"/{name}") for path in FILES)
    if members and owner[0].isupper():
        return has(owner, members[0])
    if members and owner in sys.modules:
        try:
            return pkgutil.resolve_name(name) is not name
        except (ImportError, AttributeError):
            if owner == kvloom.__name__:
                return False
    return not (members or call) or all_names().issuperset(members or [owner])


def test_code_names_in_pages_and_docstrings_exist():
    texts = [(page.name, re.sub("(?s)```.*?```", "", page.read_text())) for page in PAGES]
    for path, nodes in all_nodes().items():
        own = (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED))
        texts += [(path.name, text) for text in own if text]
    codes = {(page, *code) for page, text in texts for code in CODE.findall(text)}
    assert len(codes) > 1000
    wrong = [code for code in sorted(codes) if not exists(*code[1:])]
    assert [code for code in wrong if not NO_CODE.fullmatch(code[1])] == []


def used(code):
    """Yield the names of kvloom and kvloom_lab that an example imports or reads."""
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_names_in_the_examples_of_pages_exist():
    codes = [
        code for page in PAGES for code in re.findall("(?s)```python\n(.*?)```", page.read_text())
    ]
    names = {name for code in codes if "--8<--" not in code for name in used(code)}
    names = [name for name in sorted(names) if re.match(r"kvloom(_lab)?\.[\w.]+$", name)]
    assert len(names) > 20
    for name in names:
        pkgutil.resolve_name(name)
