"""`kvloom generate`: the answer of a compressed cache, and what its report says."""

import json
import re
import shutil

import pytest
import torch
from command_line import run
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from kvloom.recipe.resolve import resolve
from kvloom_lab.cli.generate import first_packed_at
from kvloom_lab.eval import load
from tiny import TEXT


def test_generate_is_plain_generation_and_reports_the_cache(here):
    args = ["--model", here / "model", "--recipe", "full", "--max-new-tokens", "12"]
    found = run("generate", "line 7: the", *args)
    assert found.exit_code == 0, found.output
    model, tokenizer = load(str(here / "model"))
    ids = tokenizer("line 7: the", return_tensors="pt")["input_ids"]
    out = AutoModelForCausalLM.from_pretrained(here / "model").generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert found.stdout.strip() == said.strip()
    assert f"full: {ids.shape[1]} + 12 tokens, " in found.stderr
    for figure in ("MiB in the cache", "no smaller than full", "bits per value", "tokens/s"):
        assert figure in found.stderr
    assert model.dtype == torch.float32


def test_generate_reads_stdin_and_compresses(here):
    args = ["--model", here / "model", "--recipe", "rtn", "--max-new-tokens", "4"]
    found = run("generate", "-", *args, input=TEXT[:1500])
    assert found.exit_code == 0, found.output
    times = float(re.search(r"([\d.]+)x smaller", found.stderr)[1])
    assert times > 4
    assert run("generate", *args, input=TEXT[:1500]).stdout == found.stdout


@pytest.mark.parametrize(
    ("recipe", "tokens"),
    [
        ("kivi", 128),
        ("kivi:residual=64", 64),
        ("rtn:residual=100", 101),
        ("turbo:window=32,sinks=4", 37),
        ("rtn", 1),
        ("full", None),
        ("h2o", None),
    ],
)
def test_packing_starts_where_the_recipe_says(here, recipe, tokens):
    assert first_packed_at(resolve(recipe)) == tokens
    if tokens is None or tokens == 1:
        return
    prompt = "line 7: the"
    args = ["generate", prompt, "--model", here / "model", "--recipe", recipe, "--max-new-tokens"]
    read = len(tiny.tokenizer()(prompt)["input_ids"]) - 1  # the last new token is not read
    before, after = (run(*args, tokens - read + more).stderr for more in (-1, 0))
    assert f"nothing packed yet: {recipe} starts to pack at {tokens} tokens" in before
    assert "smaller" not in before
    assert "bits per value" not in before
    assert "nothing packed" not in after


def test_tokens_before_compress_after_are_exact(here):
    args = ["generate", "line 7: the", "--model", here / "model", "--max-new-tokens", 40]
    found = run(*args, "--recipe", "kivi:residual=32,compress_after=2048").stderr
    assert "all exact: kivi:residual=32,compress_after=2048 begins after 2,048 tokens" in found
    assert "starts to pack" not in found


def test_generate_counts_kept_tokens_where_tokens_are_evicted(here):
    args = ["--model", here / "model", "--recipe", "minikv", "--max-new-tokens", "2"]
    said = run("generate", "line", *args).stderr
    assert "nothing packed yet: minikv starts to pack at 128 kept tokens" in said


def test_generate_chats_by_the_template(here, tmp_path):
    shutil.copytree(here / "model", tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "chat")
    args = ["--recipe", "full", "--max-new-tokens", "8", "--model"]
    chat = run("generate", "line 7", "--chat", *args, tmp_path / "chat")
    ids = tokenizer("user: line 7\nassistant:", add_special_tokens=False)["input_ids"]
    assert chat.exit_code == 0, chat.output
    assert f"full: {len(ids)} + 8 tokens, " in chat.stderr
    plain = run("generate", "user: line 7\nassistant:", *args, here / "model")
    assert f"full: {len(ids) + 1} + 8 tokens, " in plain.stderr  # <s> in front
    assert chat.stdout != run("generate", "line 7", *args, here / "model").stdout


def test_generate_samples_by_seed(here):
    args = ["generate", "line", "--model", here / "model", "--temperature", "1.5",
            "--max-new-tokens", "20", "--seed"]  # fmt: skip
    first, again, other = (run(*args, seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_generate_takes_the_likeliest_token_whatever_the_model_asks_for(here, tmp_path):
    model = shutil.copytree(here / "model", tmp_path / "model")
    args = ["generate", "line 7", "--recipe", "full", "--max-new-tokens", "12", "--model", model]
    plain = run(*args).stdout
    config = {"num_beams": 3, "repetition_penalty": 1.9, "max_length": 99, "eos_token_id": 0}
    (model / "generation_config.json").write_text(json.dumps(config))
    found = run(*args)
    assert (found.exit_code, found.stdout) == (0, plain), found.output
