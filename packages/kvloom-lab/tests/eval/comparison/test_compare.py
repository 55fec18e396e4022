"""The comparison: what each figure means, checked against plain transformers."""

import math
import weakref
from dataclasses import replace
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
)

import kvloom
from kvloom.errors import InputError
from kvloom.hf import read_tokens as forward
from kvloom.recipe.resolve import resolve
from kvloom_lab import eval as work
from kvloom_lab.eval import comparison, decoding, evaluate, with_full
from kvloom_lab.eval.comparison import TIMED_STEPS, correct_after, correct_inside
from kvloom_lab.workload import clock, passes
from kvloom_lab.workload.passes import run_alone


def test_full_is_plain_transformers(model, tokenizer, task, rows):
    with torch.no_grad():
        logits = model(task.text[:, :-1], use_cache=False).logits[:, task.context :]
    loss = F.cross_entropy(logits.flatten(0, 1), task.text[:, task.context + 1 :].flatten())
    assert rows[0].recipe == "full"
    assert rows[0].perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert (rows[0].agreement, rows[0].times_smaller) == (1.0, 1.0)


def test_figures_of_a_compressed_cache(model, task, rows):
    full, kivi, *_ = rows
    tokens = task.text.shape[1] - 1
    assert 32 <= full.bits_per_value < 40  # fp32 and spare room
    values = 2 * 2 * 2 * 2 * 32 * tokens  # k and v, layers, batch, heads, head_dim
    assert kivi.kv_bytes == pytest.approx(kivi.bits_per_value * values / 8)
    assert kivi.times_smaller == pytest.approx(full.kv_bytes / kivi.kv_bytes)
    assert kivi.bits_per_value < full.bits_per_value / 2
    assert kivi.perplexity != full.perplexity
    assert all(r.prefill_s > 0 and r.decode_tokens_s > 0 for r in rows[:3])


def test_decoding_is_measured_on_what_the_window_left(model, task, rows):
    """A window's predictions are those of a model that sees so many tokens and no more."""
    with torch.no_grad():
        exact = model(task.text[:, :-1], use_cache=False).logits[:, task.context :].argmax(-1)
        span = torch.arange(task.text.shape[1] - 1)
        # a context token sees all before it; a later one the 24 newest of the past and itself
        see = (span[None] <= span[:, None]) & (
            (span[:, None] < task.context) | (span[None] >= span[:, None] - 24)
        )
        mask = torch.where(see, 0.0, torch.finfo(torch.float32).min)[None, None]
        logits = model(task.text[:, :-1], attention_mask=mask, use_cache=False).logits
    logits = logits[:, task.context :]
    losses = F.cross_entropy(logits.flatten(0, 1), task.text[:, task.context + 1 :].flatten())
    same = (logits.argmax(-1) == exact).float().mean().item()
    window = rows[2]
    assert window.perplexity == pytest.approx(math.exp(losses), rel=1e-3)
    assert window.agreement == pytest.approx(same)
    assert window.agreement < 1


def test_a_recipe_that_does_not_fit_gets_a_row_saying_why(rows):
    bad = rows[3]
    assert bad.recipe == "kivi:group=64"
    assert "head_dim=32" in bad.problem
    assert bad.perplexity is bad.kv_bytes is bad.needle is None


def test_full_is_always_there_once_and_first():
    assert [r.name for r in with_full(["kivi", "full", "rtn", "kivi"])] == ["full", "kivi", "rtn"]


def test_the_model_is_left_as_it_was(model, rows):
    assert getattr(model, "_kvloom", None) is None
    assert model.config._attn_implementation != "kvloom"


def test_progress_adds_up(model, tokenizer, task):
    done = []
    work.compare(model, [], task, lambda what, units: done.append((what, units)))
    assert sum(units for _, units in done) == task.units
    assert all(what.startswith("full: ") for what, _ in done)


def test_progress_adds_up_when_recipes_fail(model, tokenizer, task, monkeypatch):
    """One recipe does not fit, one fails as it stores a prompt, one as it decodes."""
    whole = comparison.ComparisonTask.measure

    def fails(task, run):
        if run.cache.recipe.name == "random":
            raise KeyError
        return whole(task, run)

    monkeypatch.setattr(comparison.ComparisonTask, "measure", fails)
    specs = ["kivi:group=64", "pyramidkv:fraction=0.02,window=1", "random", "rtn"]
    done = []
    rows = work.compare(model, specs, task, lambda what, units: done.append((what, units)))
    assert [row.problem is None for row in rows] == [True, False, False, False, True]
    assert sum(units for _, units in done) == 5 * task.units
    whats = {what for what, _ in done}
    assert {"full: reading the context", "rtn: decoding", "random: no figures"} <= whats


def test_nan_in_the_model_is_reported(tokenizer, model, task):
    broken = LlamaForCausalLM(model.config).eval()
    torch.nn.init.constant_(broken.model.layers[1].self_attn.k_proj.weight, math.nan)
    with pytest.raises(kvloom.errors.NotFinite, match="layer 1: NaN"):
        work.compare(broken, ["kivi"], task)


def test_nan_in_predictions_is_no_figure(tokenizer, model, task):
    broken = LlamaForCausalLM(model.config).eval()
    torch.nn.init.constant_(broken.lm_head.weight, math.nan)
    with pytest.raises(kvloom.errors.NotFinite, match="predicts NaN"):
        work.compare(broken, ["kivi"], task)


# one forward pass for many recipes


def alone(model, tokenizer, recipe, task):
    """The figures of a recipe whose caches read every prompt in a forward pass of their own."""
    span = range(task.context, task.context + task.new_tokens)
    cache, logits = kvloom.Cache(model, recipe), []
    forward(model, task.text[:, : task.context], cache)
    logits = [forward(model, task.text[:, i : i + 1], cache) for i in span]
    losses = [F.cross_entropy(x, task.text[:, i + 1]) for x, i in zip(logits, span, strict=True)]
    correct, rows = [], len(task.text)
    for hay in task.haystacks:
        if task.source.ask == "inside":
            work = correct_inside(model, tokenizer, recipe, hay, rows)
        else:
            read = kvloom.Cache(model, recipe)
            forward(model, torch.tensor([hay.context_ids]), read)
            work = correct_after(model, tokenizer, read, hay.questions, rows)
        correct.append(run_alone(model, work))
    greedy = torch.stack(logits, 1).argmax(-1)
    read = cache.tokens_read if recipe.recall else None
    # a batch of several recipes rounds otherwise
    exact = pytest.approx(math.exp(torch.stack(losses).mean()), rel=1e-5)
    return (
        greedy, exact, sum(correct) / task.questions, cache.nbytes, cache.bits_per_value, read
    )  # fmt: skip


@pytest.mark.parametrize("ask", ["after", pytest.param("inside", marks=pytest.mark.slow)])
def test_figures_are_those_of_separate_runs(model, tokenizer, task, ask):
    specs = ["kivi:residual=32", "rtn", "h2o:tokens=40", "snapkv:tokens=40", "streaming:tokens=40",
             "minikv", "quest:tokens=48,page=4,recent=8", "clusterkv", "turbo"]  # fmt: skip
    task = replace(task, source=replace(task.source, ask=ask))
    rows = work.compare(model, specs, task)
    with torch.inference_mode():
        want = [alone(model, tokenizer, resolve(spec), task) for spec in ("full", *specs)]
    for row, (greedy, *figures) in zip(rows, want, strict=True):
        found = row.perplexity, row.needle, row.kv_bytes, row.bits_per_value, row.tokens_read
        assert list(found) == figures, row.recipe
        assert row.agreement == (greedy == want[0][0]).float().mean().item()
    assert len({row.perplexity for row in rows}) > 6
    kvloom.detach(model)


def test_groups_change_no_figure_and_free_their_caches(model, tokenizer, task, monkeypatch):
    """With little memory, every recipe has a group of its own; `full` is measured once."""
    specs = ["kivi:residual=32", "h2o:tokens=40", "snapkv:tokens=40"]
    together = work.compare(model, specs, task)
    whole, alive, found_passes = evaluate.prefill, weakref.WeakSet(), []

    def counting(model, recipes, ids):
        found_passes.append(([recipe.name for recipe in recipes], len(alive)))
        logits, found = whole(model, recipes, ids)
        alive.update(x.cache for x in found)
        return logits, found

    monkeypatch.setattr(evaluate, "prefill", counting)
    monkeypatch.setattr(passes, "available_bytes", lambda device: 1)
    apart = work.compare(model, specs, task)
    assert len(task.batches()) == 2
    groups = [["full"], *([spec] for spec in specs)]
    assert found_passes == [(group, 0) for _ in task.batches() for group in groups]
    for one, other in zip(apart, together, strict=True):
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)  # rounding alone
        rest = {"prefill_s": 0, "decode_tokens_s": 0, "perplexity": 0}
        assert replace(one, **rest) == replace(other, **rest)


def test_a_failed_forward_pass_leaves_the_rows_of_other_groups(
    model, tokenizer, task, monkeypatch, caplog
):
    whole = evaluate.prefill

    def fails(model, recipes, ids):
        if "rtn" in [recipe.name for recipe in recipes]:
            raise KeyError("a bug")
        return whole(model, recipes, ids)

    monkeypatch.setattr(evaluate, "prefill", fails)
    with pytest.raises(KeyError):  # that of `full` too
        work.compare(model, ["rtn", "window"], task)
    monkeypatch.setattr(passes, "available_bytes", lambda device: 1)
    full, rtn, window = work.compare(model, ["rtn", "window"], task)
    assert (rtn.problem, rtn.failed) == ("KeyError: 'a bug'", True)
    assert full.problem is window.problem is None
    assert "recipe 'rtn' failed" in caplog.text
    assert "Traceback" in caplog.text


def test_a_recipe_that_cannot_store_the_prompt_leaves_the_others(model, tokenizer, task):
    bad, good = work.compare(model, ["pyramidkv:fraction=0.02,window=1", "rtn"], task)[1:]
    assert bad.failed
    assert "without a heavy hitter; use a larger budget" in bad.problem
    assert good.problem is None


def test_warm_up_steps_of_decoding_are_not_timed(model, tokenizer, task, monkeypatch):
    ticks = count()
    monkeypatch.setattr(clock, "seconds", lambda device: next(ticks))
    full, kivi = work.compare(model, ["kivi:residual=32"], task)
    # all timed steps are one tick; so is storing in each of 2 layers, beside a pass of 1 + 2 ticks
    timed = TIMED_STEPS - decoding.WARM_UP_STEPS
    assert full.decode_tokens_s == kivi.decode_tokens_s == task.text.shape[0] * timed
    assert (full.prefill_s, kivi.prefill_s) == (3, 5)


def test_load_takes_a_folder_in_its_own_dtype(model, tokenizer, tmp_path):
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    model.to(torch.float32)
    tokenizer.save_pretrained(tmp_path)
    loaded, words = work.load(str(tmp_path))
    assert loaded.dtype == torch.bfloat16
    assert words.encode("line 1") == tokenizer.encode("line 1")
    assert work.load(str(tmp_path), "float32")[0].dtype == torch.float32
    assert not loaded.training
    with pytest.raises(InputError, match="dtype='int8' is unknown"):
        work.load(str(tmp_path), "int8")
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), LlamaForCausalLM)
    assert AutoTokenizer.from_pretrained(tmp_path).bos_token == "<s>"
