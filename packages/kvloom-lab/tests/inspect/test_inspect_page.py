"""inspect's page: no text can break it, it loads nothing, and the command that writes it."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from html_elements import parse
from kvloom_lab.cli.app import app
from kvloom_lab.inspect import token_texts, trace_recipe
from kvloom_lab.show.pages import inspect_page
from tiny import TEXT

NASTY = (
    'before </script><script>document.title = "broken"</script> <!-- <script> &lt; @DATA@ @STYLE@'
)


@pytest.mark.parametrize("text", [TEXT, "naïve 日本 🙂🙂 \n\n  x\ttab", NASTY])
def test_token_texts_are_the_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = token_texts(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def nasty(model, tokenizer):
    data = {"source": NASTY, **trace_recipe(model, tokenizer, "h2o", NASTY, new_tokens=2)}
    return data, inspect_page(data)


def test_no_text_can_end_its_script(nasty):
    data, html = nasty
    found = parse(html)
    scripts = [attrs for tag, attrs in found.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert json.loads(found.scripts[0]) == data
    assert "</script>" in "".join(data["tokens"])


def test_the_page_loads_nothing(nasty):
    html = nasty[1]
    tags = parse(html).tags
    assert not {"link", "img", "iframe", "base", "object", "embed"} & {tag for tag, _ in tags}
    assert not [attrs for _, attrs in tags if {"src", "href", "srcset"} & set(attrs)]
    code = html.replace(html[html.index('id="data">') : html.index("</script>")], "")
    assert not re.search(r"https?://|//[a-z]|@import|url\(|fetch\(|XMLHttp|import\(", code)
    policy = next(a["content"] for t, a in tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_no_number_is_outside_json():
    with pytest.raises(ValueError, match="Out of range"):
        inspect_page({"x": math.nan})


# the command


@pytest.fixture(scope="module")
def saved(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    return folder


def run(*args, **kwargs):
    return CliRunner().invoke(app, ["inspect", *map(str, args)], **kwargs)


def test_the_command_writes_page_and_json(saved, tmp_path):
    args = ["--model", saved / "model", "--recipe", "h2o", "--context", 40, "--max-new-tokens", 3]
    out, js = tmp_path / "a.html", tmp_path / "a.json"
    found = run(saved / "text.txt", *args, "--out", out, "--json", js)
    assert found.exit_code == 0, found.output
    data = json.loads(js.read_text())
    assert json.loads(parse(out.read_text()).scripts[0]) == data
    assert (data["source"], data["model"], data["prompt_tokens"]) == ("text.txt", "model", 40)
    mass = [m["mass"][0] for layer in data["layers"] for m in layer["heads"]]
    said = re.sub(r"\s+", " ", found.stdout)
    assert f"h2o: 40 tokens (the first of {data['text_tokens']:,}; --context takes more)" in said
    assert f"{np.mean(mass):.1%} of the prompt's attention mass kept; wrote {out}" in said
    # the same text as an argument (longer than any file's name), from stdin, and by --text
    for where in ([TEXT], ["-"], ["--text", saved / "text.txt"]):
        again = run(*where, *args, "--out", out, "--json", js, input=TEXT)
        assert again.exit_code == 0, again.output
        assert json.loads(js.read_text())["layers"] == data["layers"]


def test_the_command_says_what_was_read(saved, tmp_path):
    recipe = "quest:tokens=16,page=4,sinks=2,recent=4,full_layers=1"
    out, js = tmp_path / "a.html", tmp_path / "a.json"
    args = ["--model", saved / "model", "--recipe", recipe, "--context", 40, "--max-new-tokens", 3]
    found = run(saved / "text.txt", *args, "--out", out, "--json", js)
    assert found.exit_code == 0, found.output
    data = json.loads(js.read_text())
    recalling = [head for layer in data["layers"][1:] for head in layer["heads"]]
    read = np.mean([sum(head["read"][3][1::2]) for head in recalling])
    mass = np.mean([head["read_mass"][3] for head in recalling])
    said = re.sub(r"\s+", " ", found.stdout)
    assert f"key/value heads with recall read {read:.0f} of 43 tokens, {mass:.1%} of" in said
    assert f"{mass:.1%} of its attention mass; wrote {out}" in said
