"""The comparison: what each figure means, checked against plain transformers."""

import json
import math
import weakref
from dataclasses import replace
from importlib import import_module
from itertools import count

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
)

import kvloom
from for_each import for_each
from kvloom import eval as work
from kvloom.errors import InputError
from kvloom.eval import Row, Settings, decoding, passes, with_full
from kvloom.eval.comparison import measure, needles
from kvloom.eval.comparison.table import table
from kvloom.recipe.resolve import resolve
from kvloom.reference import tasks
from kvloom.report.plots import line_style
from kvloom.workload import clock, crew, prefill, text
from kvloom.workload.forward import forward
from pairwise import some_slow
from reference_model.tasks import needle_fact
from reference_model.tokenizer import train_tokenizer

compare_module = import_module("kvloom.eval.comparison.compare")
WORDS = " ".join(tasks.WORDS)
TEXT = "".join(f"line {i}: {tasks.WORDS[i * 7 % 90]} is at {i * 7919}.\n" for i in range(600))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT, WORDS, "The magic number for Question"] * 3, 600)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def task(model, tokenizer):
    settings = Settings(context=200, new_tokens=40, batch=2, questions=3)
    return work.prepare(model, tokenizer, TEXT, settings)


@pytest.fixture(scope="module")
def rows(model, tokenizer, task):
    specs = ["kivi:group=32,residual=32", "window:tokens=24", "kivi:group=64", "full"]
    return work.compare(model, tokenizer, specs, task)


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
    work.compare(model, tokenizer, [], task, lambda what, units: done.append((what, units)))
    assert sum(units for _, units in done) == task.units
    assert all(what.startswith("full: ") for what, _ in done)


def test_progress_adds_up_when_recipes_fail(model, tokenizer, task, monkeypatch):
    """One recipe does not fit, one fails as it stores a prompt, one as it decodes."""
    whole = measure.measure

    def fails(model, prompt, *rest):
        if prompt.recipe.name == "random":
            raise KeyError
        return whole(model, prompt, *rest)

    monkeypatch.setattr(compare_module, "measure", fails)
    specs = ["kivi:group=64", "pyramidkv:fraction=0.02,window=1", "random", "rtn"]
    done = []
    rows = work.compare(
        model, tokenizer, specs, task, lambda what, units: done.append((what, units))
    )
    assert [row.problem is None for row in rows] == [True, False, False, False, True]
    assert sum(units for _, units in done) == 5 * task.units
    whats = {what for what, _ in done}
    assert {"5 recipes: reading context 1 of 2", "rtn: decoding", "random: no figures"} <= whats


def test_nan_in_the_model_is_reported(tokenizer, model, task):
    broken = LlamaForCausalLM(model.config).eval()
    torch.nn.init.constant_(broken.model.layers[1].self_attn.k_proj.weight, math.nan)
    with pytest.raises(kvloom.errors.NotFinite, match="layer 1: NaN"):
        work.compare(broken, tokenizer, ["kivi"], task)


# one forward pass for many recipes


def alone(model, tokenizer, recipe, task):
    """The figures of a recipe whose caches read every prompt in a forward pass of their own."""
    span = range(task.context, task.context + task.new_tokens)
    cache, logits = kvloom.Cache(model, recipe), []
    forward(model, task.text[:, : task.context], cache)
    logits = [forward(model, task.text[:, i : i + 1], cache) for i in span]
    losses = [F.cross_entropy(x, task.text[:, i + 1]) for x, i in zip(logits, span, strict=True)]
    correct = [
        crew.run_alone(
            model, needles.count_correct(model, tokenizer, recipe, hay, len(task.text), task.ask)
        )
        for hay in task.haystacks
    ]
    greedy = torch.stack(logits, 1).argmax(-1)
    read = cache.tokens_read if recipe.recall else None
    # a batch of several recipes rounds otherwise
    exact = pytest.approx(math.exp(torch.stack(losses).mean()), rel=1e-5)
    return (
        greedy, exact, sum(correct) / task.questions, cache.nbytes, cache.bits_per_value, read
    )  # fmt: skip


@some_slow("ask", needles.ASK, "after")
def test_figures_are_those_of_separate_runs(model, tokenizer, task, ask):
    specs = ["kivi:residual=32", "rtn", "h2o:tokens=40", "snapkv:tokens=40", "streaming:tokens=40",
             "minikv", "quest:tokens=48,page=4,recent=8", "clusterkv", "turbo"]  # fmt: skip
    task = replace(task, ask=ask)
    rows = work.compare(model, tokenizer, specs, task)
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
    together = work.compare(model, tokenizer, specs, task)
    whole, alive, found_passes = passes.prefill, weakref.WeakSet(), []

    def counting(model, recipes, ids):
        found_passes.append(([recipe.name for recipe in recipes], len(alive)))
        logits, found = whole(model, recipes, ids)
        alive.update(x.cache for x in found)
        return logits, found

    monkeypatch.setattr(passes, "prefill", counting)
    monkeypatch.setattr(prefill, "available_bytes", lambda device: 1)
    apart = work.compare(model, tokenizer, specs, task)
    assert len(task.prompts) == 2
    groups = [["full"], *([spec] for spec in specs)]
    assert found_passes == [(group, 0) for group in groups for _ in task.prompts]
    for one, other in zip(apart, together, strict=True):
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)  # rounding alone
        rest = {"prefill_s": 0, "decode_tokens_s": 0, "perplexity": 0}
        assert replace(one, **rest) == replace(other, **rest)


def test_a_failed_forward_pass_leaves_the_rows_of_other_groups(
    model, tokenizer, task, monkeypatch, caplog
):
    whole = passes.prefill

    def fails(model, recipes, ids):
        if "rtn" in [recipe.name for recipe in recipes]:
            raise KeyError("a bug")
        return whole(model, recipes, ids)

    monkeypatch.setattr(passes, "prefill", fails)
    with pytest.raises(KeyError):  # that of `full` too
        work.compare(model, tokenizer, ["rtn", "window"], task)
    monkeypatch.setattr(prefill, "available_bytes", lambda device: 1)
    full, rtn, window = work.compare(model, tokenizer, ["rtn", "window"], task)
    assert (rtn.problem, rtn.failed) == ("KeyError: 'a bug'", True)
    assert full.problem is window.problem is None
    assert "recipe 'rtn' failed" in caplog.text
    assert "Traceback" in caplog.text


def test_a_recipe_that_cannot_store_the_prompt_leaves_the_others(model, tokenizer, task):
    bad, good = work.compare(model, tokenizer, ["pyramidkv:fraction=0.02,window=1", "rtn"], task)[
        1:
    ]
    assert bad.failed
    assert "without a heavy hitter; use a larger budget" in bad.problem
    assert good.problem is None


def test_warm_up_steps_of_decoding_are_not_timed(model, tokenizer, task, monkeypatch):
    ticks = count()
    monkeypatch.setattr(clock, "seconds", lambda device: next(ticks))
    full, kivi = work.compare(model, tokenizer, ["kivi:residual=32"], task)
    # all timed steps are one tick; so is storing in each of 2 layers, beside a pass of 1 + 2 ticks
    timed = measure.TIMED_STEPS - decoding.WARM_UP_STEPS
    assert full.decode_tokens_s == kivi.decode_tokens_s == task.text.shape[0] * timed
    assert (full.prefill_s, kivi.prefill_s) == (3, 5)


# needles


def test_decoding_ends_when_every_answer_is_right_or_wrong(model, tokenizer, monkeypatch):
    ids = text.tokenize(tokenizer, TEXT)
    (hay,) = needles.haystacks(tokenizer, ids, [1], context=300, questions=1)
    question = hay.questions[0]
    with torch.inference_mode():
        cache = kvloom.Cache(model, "full")
        new, said = torch.tensor([hay.context_ids + question.ids]), []
        for _ in range(9):
            new = forward(model, new, cache).argmax(-1, keepdim=True)
            said.append(new)
        whole = tokenizer.decode(torch.cat(said, dim=1)[0]).lstrip()
        steps = []

        def counted(*args):
            steps.append(args)
            return forward(*args)

        monkeypatch.setattr(needles, "forward", counted)
        monkeypatch.setattr(crew, "forward", counted)
        for answer, most in ((whole, 9), ("~" + whole, 3), (whole[:-1] + "~", 9)):
            steps.clear()
            one = needles.Haystack(
                hay.context_ids, [replace(question, answer=answer, answer_tokens=9)]
            )
            work = needles.count_correct(model, tokenizer, resolve("full"), one, 1)
            correct = crew.run_alone(model, work)
            assert correct == (answer == whole)
            assert 1 < len(steps) <= 1 + most  # the context, then token by token
    kvloom.detach(model)


@for_each(
    ("said", "undecided"),
    [("", True), ("12", True), ("123", False), ("1234", False), ("13", False), ("13\ufffd", True)],
)
def test_an_answer_is_decided_by_its_first_wrong_character(said, undecided):
    assert needles._undecided(said, "123") == undecided


def test_needle_sentences_are_those_of_training():
    """With a token for every digit, a fact and its question are id for id those of `tasks`."""
    pieces = ["\n The magic number for is Question: 1 2. \n"] * 5
    tokenizer = train_tokenizer([TEXT, WORDS, *pieces], 900)
    encode = tasks.Encoder(tokenizer, text.tokenize(tokenizer, TEXT))
    want = needle_fact(encode, "amber", encode(*"9234567"))
    fact, question = needles._needle(tokenizer, "amber", "9234567")
    assert (fact.ids, question.ids) == (want.ids, want.question_ids)
    assert question.answer_tokens == 7


def bpe(pre_tokenizer, decoder, normalizer=None):
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        core.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator([TEXT, WORDS, "The magic number for Question: 1234567"] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: bpe(pre_tokenizers.ByteLevel(), decoders.ByteLevel()), id="gpt2-like"),
        pytest.param(
            lambda: bpe(
                pre_tokenizers.Metaspace(), decoders.Metaspace(), normalizers.Replace("\n", " ")
            ),
            id="sentencepiece-like",
        ),
    ],
)
def test_needles_of_other_tokenizers_read_as_text(other):
    """Digits may share tokens and spaces may stick to them: the answer still reads as digits."""
    tokenizer = other()
    ids = text.tokenize(tokenizer, TEXT)
    (hay,) = needles.haystacks(tokenizer, ids, [], context=400, questions=4, seed=3)
    assert len(hay.context_ids) == 400
    said = tokenizer.decode(hay.context_ids)
    for q in hay.questions:
        asked = tokenizer.decode(q.ids)
        key = asked.split(" for ")[1].split(" is")[0]
        assert asked.rstrip().endswith(f"The magic number for {key} is")
        assert f"The magic number for {key} is {q.answer}." in said
        whole = tokenizer.encode(
            f"\nQuestion: The magic number for {key} is {q.answer}", add_special_tokens=False
        )
        assert whole[: len(q.ids)] == q.ids
        answer = tokenizer.batch_decode([whole[len(q.ids) :]])[0]
        assert answer.lstrip() == q.answer
        assert len(whole) == len(q.ids) + q.answer_tokens


@pytest.mark.parametrize("ask", needles.ASK)
def test_an_answer_counts_when_plain_generation_gives_it(model, tokenizer, ask):
    """Questions of different lengths, side by side, after the context or as its end."""
    ids = text.tokenize(tokenizer, TEXT)
    (hay,) = needles.haystacks(tokenizer, ids, [1], context=300, questions=6)
    asked = []
    for i, q in enumerate(hay.questions):
        longer = q.ids[: len(q.ids) - i % 2]
        prompt = torch.tensor([hay.context_ids + longer])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, min_new_tokens=5,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        said = tokenizer.decode(out[0, prompt.shape[1] :]).lstrip()
        answer = said if i != 2 else "not " + said
        asked.append(needles.Question(longer, answer, 5))
    hay = needles.Haystack(hay.context_ids, asked)
    with torch.inference_mode():
        work = needles.count_correct(model, tokenizer, resolve("full"), hay, 2, ask)
        assert crew.run_alone(model, work) == 5
    kvloom.detach(model)


def test_needles_need_room(model, tokenizer):
    with pytest.raises(InputError, match="context of 40 tokens is too short for 8 needles"):
        work.prepare(model, tokenizer, TEXT, Settings(context=40, new_tokens=32))


# text and settings


def test_rows_come_from_parts_of_the_text_and_begin_with_the_opening(tokenizer):
    ids = np.arange(1000)
    rows = text.cut_rows(ids, [7], batch=3, tokens=101, seed=0)
    assert rows.shape == (3, 101)
    assert rows[:, 0].tolist() == [7, 7, 7]
    begins = rows[:, 1].tolist()
    assert [b // 333 for b in begins] == [0, 1, 2]
    assert all(
        row[1:].tolist() == list(range(b, b + 100)) for row, b in zip(rows, begins, strict=True)
    )
    assert not torch.equal(rows, text.cut_rows(ids, [7], batch=3, tokens=101, seed=1))
    short = text.cut_rows(np.arange(120), [], batch=3, tokens=100, seed=0)
    assert short[0, 0] < short[-1, 0]
    with pytest.raises(InputError, match="the text has 99 tokens"):
        text.cut_rows(np.arange(99), [], batch=1, tokens=100, seed=0)


def test_long_text_is_tokenized_whole(tokenizer):
    ids = text.tokenize(tokenizer, TEXT * 3)
    assert tokenizer.decode(ids) == TEXT * 3
    assert text.leading_ids(tokenizer) == [tokenizer.bos_token_id]


def test_the_context_fits_the_models_positions(tokenizer):
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=512, n_embd=32, n_layer=1, n_head=1)
    small = GPT2LMHeadModel(config).eval()
    task = work.prepare(small, tokenizer, TEXT, Settings(new_tokens=60, batch=1, questions=4))
    assert task.context == 512 - 64
    assert work.compare(small, tokenizer, ["kivi:residual=32"], task)[1].problem is None
    with pytest.raises(InputError, match="use a context of 448 or less"):
        work.prepare(small, tokenizer, TEXT, Settings(context=500, new_tokens=60))


def test_sliding_layers_count_in_memory_and_not_in_bits(tokenizer):
    """Layers that transformers bounds itself are no smaller; with no other layers, no bits."""
    common = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "sliding_window": 64,
    }  # fmt: skip
    mixed = Gemma3TextConfig(**common, layer_types=["sliding_attention", "full_attention"])
    settings = Settings(context=150, new_tokens=32, batch=1, questions=2)
    for config in (mixed, MistralConfig(**common)):
        model = AutoModelForCausalLM.from_config(config).eval()
        task = work.prepare(model, tokenizer, TEXT, settings)
        full, rtn = work.compare(model, tokenizer, ["rtn"], task)
        if config is mixed:
            stock = 2 * 63 * 32 * 4
            values = 2 * 182 * 32
            assert rtn.kv_bytes == pytest.approx(stock + rtn.bits_per_value * values / 8, rel=0.02)
            assert full.kv_bytes > 1.5 * rtn.kv_bytes
        else:
            assert full.bits_per_value is rtn.bits_per_value is None
            assert rtn.times_smaller == 1
        console = Console(width=100)
        with console.capture() as captured:
            console.print(table([full, rtn], work.environment(model, "m", task, 0)))
        assert "rtn" in captured.get()


@for_each("wrong", [{"new_tokens": 8}, {"batch": 0}, {"context": 0}, {"seed": -1}])
def test_settings_out_of_range(wrong):
    (name,) = wrong
    with pytest.raises(InputError, match=f"{name}=.* or more"):
        Settings(**wrong)


def test_library_text_is_there():
    assert len(text.library_text()) > 100_000


# reports


def test_json_has_the_promised_fields(model, task, rows):
    environment = work.environment(model, "tiny", task, seed=5, text="lines")
    found = json.loads(json.dumps(work.to_data(rows, environment)))
    assert set(found) == {"environment", "rows"}
    assert {"python", "kvloom", "torch", "transformers", "cpu", "gpu", "threads", "dtype", "model",
            "context", "batch", "seed", "date"} <= set(found["environment"])  # fmt: skip
    assert found["environment"]["context"] == 200
    assert found["environment"]["dtype"] == "float32"
    want = {"recipe", "bits_per_value", "kv_bytes", "times_smaller", "prefill_s",
            "decode_tokens_s", "perplexity", "agreement", "needle", "tokens_read",
            "moved_bytes", "ready", "problem", "failed"}  # fmt: skip
    assert all(set(row) == want for row in found["rows"])
    assert found["rows"][3]["perplexity"] is None


def test_tokens_read_per_step_are_shown_for_recipes_with_recall(model, tokenizer, task, rows):
    assert all(row.tokens_read is None for row in rows)
    spec = "quest:tokens=48,page=4,sinks=4,recent=8,full_layers=1"
    recalled = work.compare(model, tokenizer, [spec], task)
    layers, seen = model.config.num_hidden_layers, 240
    found = recalled[1].tokens_read * layers - seen  # all layers but the first recall
    assert 48 <= found / (layers - 1) <= 48 + 3 + 1  # an unfinished page, and the step's token
    environment = work.environment(model, "tiny", task, seed=5, text="lines")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table(recalled, environment))
    shown = " ".join(captured.get().split())
    assert f"tokens read per step and layer: {spec} {recalled[1].tokens_read:,.0f}" in shown
    assert recalled[1].moved_bytes is None
    assert "copied from a tier" not in shown


def test_bytes_copied_per_step_are_shown_for_recipes_with_a_tier(model, tokenizer, task):
    spec = "quest:tokens=48,page=4,sinks=4,recent=8,full_layers=1,tier=host"
    row = work.compare(model, tokenizer, [spec], task)[1]
    config, rows = model.config, task.text.shape[0]
    chosen = 48 - 4 - 8  # tokens a step, of each row and head of the layers behind the first
    heads = rows * config.num_key_value_heads * (config.num_hidden_layers - 1)
    token = 2 * config.head_dim * 4  # keys and values in fp32
    assert 0 < row.ready < 1
    assert row.moved_bytes == pytest.approx(chosen * heads * token * (1 - row.ready))
    environment = work.environment(model, "tiny", task, seed=5, text="lines")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table([row], environment))
    shown = " ".join(captured.get().split())
    assert (
        f"copied from a tier per step, all rows: {spec} {row.moved_bytes / 2**20:,.2f} MiB" in shown
    )


def test_json_of_an_endless_perplexity_is_null():
    row = Row("rtn", 2.0, 1, 8.0, 0.1, 1.0, math.inf, 0.0, None)
    assert work.to_data([row], {})["rows"][0]["perplexity"] is None


def test_table_is_readable_at_100_columns(model, task, rows):
    environment = work.environment(model, "tiny", task, seed=0, text="lines")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table(rows, environment))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 100
    assert "kivi:group=32,residual=32" in shown  # not folded
    assert "kivi:group=64 cannot run: " in shown
    assert f"{rows[1].bits_per_value:.2f}" in shown


@for_each("width", [20, 40, 60, 99, 100, 200])
def test_a_table_of_any_width_shows_every_figure(model, task, width):
    row = Row("skvq:group=32,calibration=x.safetensors", 13.75, 6 << 20, 4.4, 0.63, 1099.9, 5.905,
              0.884, 1.0)  # fmt: skip
    environment = work.environment(model, "tiny", task, seed=0, text="lines")
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table([row], environment))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    for figure in ("13.75", "6.00", "4.4x", "0.63", "1,099.9", "5.905", "88.4%", "3/3"):
        assert f" {figure}" in shown
    assert "perplexity" in shown or width == 20
    assert shown.count("recipe") == {20: 8, 40: 4, 60: 2}.get(width, 1)  # blocks of columns


def test_plot_writes_a_picture(model, task, rows, tmp_path):
    environment = work.environment(model, "tiny", task, seed=0)
    for name in ("a.png", "b.svg"):
        work.plot(rows, environment, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    svg = (tmp_path / "b.svg").read_text()
    assert "window:tokens=24" in svg
    assert "kivi:group=64 " not in svg
    with pytest.raises(InputError, match=r"must end in one of \.png"):
        work.plot(rows, environment, tmp_path / "c.txt")


def test_no_two_of_sixty_recipes_look_the_same():
    assert len({line_style(i)[:2] for i in range(60)}) == 60  # color and marker


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
