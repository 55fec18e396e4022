"""Every error that kvloom raises names a remedy, or says which values are allowed."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import kvloom
import kvloom_lab
from kvloom import errors

SOURCES = [Path(one.__file__).parent for one in (kvloom, kvloom_lab)]
ERRORS = {name for name, one in vars(errors).items() if isinstance(one, type)}
# An imperative that tells the user what to do, at the start of a clause.
REMEDY = re.compile(
    r"(?:^|[;:,] |\b(?:and|or|must|so) )(?:then )?(?:add|allow|attach|calibrate|call|check|choose|"
    r"combine|convert|copy|create|crop|derive|free|give|install|leave|load|make|name|pass|plan|"
    r"prefill|put|register|remove|rename|return|run|save|send|set|spell|start|step|tune|turn|update|"
    r"use|write)\b|; \{\}$"  # a remedy that is computed
)
# Or the values that are allowed, of which the user gives another.
ALLOWED = re.compile(
    r"must (?:be|lie|end|have)\b|is not one of|is neither .* nor|, such as |\bexpected |"
    r"needs (?:--|kind=|the field|a default|a value)|it takes |takes \{\}|are supported|"
    r"supported are|defines \{\}|the newest \{\} can|kvloom caches |the nearest |--data takes |"
    r"; (?:it has|there are) "
)
# Messages that pass on another text, which has the remedy.
PASSED_ON = {
    ("cli/options.py", "--budget {} with {}: {}"),
    ("papers/lab.py", "{}: {}"),
    ("hf/layer_facts.py", "{}"),
    ("cli/options.py", "{} {} is not a list of {}"),
    ("paged/rule.py", "{}"),
    ("hf/prompts/identity.py", "a prompt store cannot identify the model: {}"),
    ("hf/prompts/identity.py", "a prompt store cannot identify the recipe: {}"),
    ("hf/prompts/store.py", "a prompt cannot be stored: {}"),
    ("hf/save.py", "recipe {} has a part of your own: {}"),
    ("hf/save.py", "{} cannot be restored: {}"),
    ("planner/choice.py", "{}"),
    ("recipe/spec.py", "layer {}: {}"),
    ("recipe/spec.py", "layers {}: {}"),
    ("recipe/spec.py", "{}"),
    ("recipe/text.py", "recipe file {} {}"),
}
# There is nothing to do: kvloom does not support the model, or TOML's reader says where it fails.
NO_REMEDY = {
    ("hf/supported.py", "{} cannot be used with kvloom: {}"),
    ("hf/self_check.py", "{} cannot be used with kvloom: {}"),
    ("planner/model.py", "{} cannot be planned: encoder-decoder models are not supported"),
    (
        "planner/model.py",
        "{} cannot be planned: transformers builds no decoder from its config ({})",
    ),
    (
        "planner/weights.py",
        "{} cannot be planned: its config does not state how many experts a token uses in a way "
        "that kvloom reads",
    ),
    (
        "planner/weights.py",
        "{} cannot be planned: it is not known here which part of {} a token reads",
    ),
    ("recipe/text.py", "not a TOML recipe: {}"),
}


@cache
def raised():
    """Return (file, message) of every error that kvloom raises; {} stands for a value."""
    messages = []
    for source, path in [(x, file) for x in SOURCES for file in sorted(x.rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind = node.exc.func
                name = kind.id if isinstance(kind, ast.Name) else getattr(kind, "attr", "")
                if name in ERRORS:
                    messages.append((path.relative_to(source).as_posix(), text(node.exc.args[-1])))
    return messages


def text(node):
    """Return the text of an expression, with {} for values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text, node.values))
    if isinstance(node, ast.BinOp):
        return text(node.left) + text(node.right)
    if isinstance(node, ast.List):
        return "; ".join(map(text, node.elts))
    return "{}"


def test_errors_are_found():
    assert len(raised()) > 250
    assert {"cache", "cli", "hf", "recipe", "store"} <= {file.split("/")[0] for file, _ in raised()}


def test_every_error_names_a_remedy():
    checked = [one for one in raised() if one not in PASSED_ON | NO_REMEDY]
    without = [
        (f, text) for f, text in checked if not (REMEDY.search(text) or ALLOWED.search(text))
    ]
    assert not without


def test_exceptions_exist():
    assert set(raised()) >= PASSED_ON | NO_REMEDY
