"""`full` is plain transformers on every architecture, or `attach` refuses the model by name."""

import time
from collections import Counter

import by_hand
import comparison
import published
import pytest
import tested
import torch
import transformers
from comparison import CRASH, DIFFERENT, EQUAL, NOT_BUILT, PLAIN_FAILS, REFUSED, UNUSED
from workers import Worker

import kvloom
from kvloom.hf.routed_layer import RoutedLayer
from sampling import slow_except

# One of each kind of layer, mask, position and refusal.
QUICK = (
    "bart", "bert", "bloom", "cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3", "gemma4_text",
    "git", "gpt2", "gpt_bigcode", "gpt_oss", "jamba", "lfm2", "llama", "llama4_text", "llava",
    "mamba", "minimax", "mistral", "mllama", "modernbert-decoder", "paligemma", "qwen2_vl",
    "qwen3_next", "t5gemma2", "zamba2",
)  # fmt: skip
MODELS = {"/".join(pair): pair for pair in comparison.models()}
PUBLISHED = published.load()
LLAMA = "llama", "LlamaForCausalLM"


@pytest.mark.parametrize(
    "pair", slow_except(MODELS, *(name for name, pair in MODELS.items() if pair[0] in QUICK))
)
def test_full_is_plain_transformers_or_refused_by_name(pair):
    records = comparison.outcomes(*pair)
    assert [r for r in records if not allowed(r)] == []
    expected = PUBLISHED.get(transformers.__version__, {}).get(pair)
    if expected is not None:
        assert summary(records) == summary(expected)


def allowed(record):
    """Return whether a record is one of the outcomes that a user may meet."""
    if record["outcome"] == EQUAL:
        return record["compressed"] == 0 or record["reach"] > 10 * comparison.TOLERANCE
    if record["outcome"] == REFUSED:
        return record["at"] == "attach" or record["prompt"] == "image"
    return record["outcome"] == PLAIN_FAILS or (
        record["outcome"] == NOT_BUILT and record["type"] in by_hand.NOT_BUILT
    )


def summary(records):
    return [(record["form"], record["outcome"]) for record in records]


@pytest.mark.parametrize("version", PUBLISHED)
def test_published_results_have_no_other_outcome(version):
    records = [record for records in PUBLISHED[version].values() for record in records]
    assert [r for r in records if not allowed(r)] == []


def test_the_page_and_the_tested_classes_are_those_of_the_results():
    assert published.page() == published.PAGE.read_text()
    assert tested.text() == tested.PATH.read_text()


def test_an_attention_scale_that_is_off_by_a_thousandth_shows(monkeypatch):
    attend = RoutedLayer.attend

    def flatter(layer, step):
        queries = step.queries._replace(scale=step.queries.scale * 1.001)
        return attend(layer, step._replace(queries=queries))

    monkeypatch.setattr(RoutedLayer, "attend", flatter)
    (record,) = comparison.outcomes(*LLAMA)
    assert record["outcome"] == DIFFERENT
    assert 1e-5 < record["difference"] < 1e-2


@pytest.mark.parametrize(
    "pair",
    [
        ("gpt_neo", "GPTNeoForCausalLM"),
        ("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"),
        ("zamba2", "Zamba2ForCausalLM"),
    ],
)
def test_layers_that_stay_with_transformers_need_no_padding(pair):
    """They get the model's own mask, where kvloom's layers have none."""
    if pair not in comparison.models():
        pytest.skip("another transformers")
    model = comparison.build(*pair, {})
    prompt = {"input_ids": torch.arange(10, 50)[None], "max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        expected = model.generate(**prompt)
        kvloom.attach(model, "full")
        assert torch.equal(model.generate(**prompt), expected)


def test_an_attach_that_does_nothing_shows(monkeypatch):
    attach, detach = kvloom.attach, kvloom.detach

    def idle(model, recipe, check):
        report = attach(model, recipe, check)
        detach(model)
        return report

    monkeypatch.setattr(kvloom, "attach", idle)
    monkeypatch.setattr(kvloom, "detach", lambda model: None)
    (record,) = comparison.outcomes(*LLAMA)
    assert record["outcome"] == UNUSED


def test_a_model_that_stays_changed_shows(monkeypatch):
    def change(model):
        model.lm_head.weight.data *= 2

    monkeypatch.setattr(kvloom, "detach", change)
    (record,) = comparison.outcomes(*LLAMA)
    assert record["outcome"] == DIFFERENT


def test_a_model_that_hangs_or_ends_its_process_is_a_crash(monkeypatch):
    monkeypatch.setattr(comparison, "SECONDS", 1)
    monkeypatch.setattr(comparison, "build", lambda *_: time.sleep(30))
    (hangs,) = comparison.outcomes(*LLAMA)
    worker = Worker()
    worker.process.kill()
    (ends,) = worker.records(LLAMA)
    assert hangs["outcome"] == ends["outcome"] == CRASH
    assert "more than 1 s" in hangs["detail"]
    assert ends["detail"] == "the process ended, with exit status -9"


def test_readme_has_the_counts_of_the_newest_version():
    text = " ".join((published.PAGE.parents[2] / "README.md").read_text().split())
    newest = [records[0] for records in list(PUBLISHED.values())[-1].values()]
    counts = Counter((record["group"], record["outcome"]) for record in newest)
    totals = Counter(record["group"] for record in newest)
    causal, image = (f"{counts[group, EQUAL]} of {totals[group]}" for group in published.GROUPS)
    assert f"{causal} causal and {image} image–text models" in text
    assert "refuses {} and {},".format(*(counts[g, REFUSED] for g in published.GROUPS)) in text
