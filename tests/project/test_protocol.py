"""The protocol of published figures: what is frozen, which texts are refused, and what stays."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from kvloom.recipe import resolve
from kvloom_lab.eval.sample import Batch, Sample

WORDS = [f"word{i}" for i in range(300)]


@pytest.fixture(scope="module")
def benchmark(request):
    """A function that imports a script of benchmarks/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.config.rootpath / "benchmarks")
        yield importlib.import_module


@pytest.fixture(scope="module")
def protocol(benchmark):
    return benchmark("protocol")


def batch(*contexts):
    samples = [Sample(f"sample {i}", context) for i, context in enumerate(contexts)]
    return Batch(torch.zeros(len(samples), 1), samples)


def test_a_sample_with_a_passage_of_a_used_text_is_refused(protocol):
    used = protocol.UsedText(" ".join(WORDS))
    shared = batch("other text", " ".join(["before", *WORDS[17:81], "after"]))
    other = batch(" ".join(WORDS[17:48]), " ".join(reversed(WORDS)))
    assert used.without([shared, other]) == ([other], ["sample 1"])


def test_a_folder_takes_one_protocol(protocol, tmp_path, capsys):
    frozen = protocol.protocol_of({"niah": [batch("a text")]}, [resolve("kivi")], seed=1)
    assert 'name = "kivi"' in frozen["recipes"]["kivi"]
    protocol.freeze(frozen, tmp_path)
    protocol.freeze(frozen, tmp_path)
    assert frozen["texts"]["niah"] in capsys.readouterr().out
    changed = protocol.protocol_of({"niah": [batch("a Text")]}, [resolve("kivi")], seed=2)
    with pytest.raises(SystemExit, match=r"another protocol \(seed, texts differ\)"):
        protocol.freeze(changed, tmp_path)


def line(recipe, answer):
    return {"task": "niah", "sample": "a", "recipe": recipe, "answer": answer}


@pytest.fixture
def published(benchmark, tmp_path, monkeypatch):
    """The script of the evidence, with results of `full`, `kivi` and `tiny`; and their protocol."""
    evidence = benchmark("evidence")
    monkeypatch.setattr(evidence.record, "results", lambda: tmp_path)
    recipes = {name: f"{name} as it was" for name in ("full", "kivi", "tiny")}
    frozen = {"commit": "1", "clean": True, "seed": 0, "recipes": recipes}
    (tmp_path / "evidence_run.json").write_text(json.dumps({"protocol": frozen, "figures": []}))
    evidence.record.write_samples("evidence_run", [line(name, name) for name in recipes])
    return evidence, frozen


def test_what_was_published_of_other_recipes_stays(published):
    evidence, former = published
    recipes = {"full": "full as it was", "tiny": "another", "small": "new"}
    frozen = {**former, "commit": "2", "recipes": recipes}
    before = evidence.published_before("run", frozen)
    lines = [line("full", "full"), line("tiny", "other"), line("small", "small")]
    stay = evidence.earlier_lines("run", before, frozen, lines)
    assert [(x["recipe"], x["commit"]) for x in stay] == [("full", "1"), ("kivi", "1")]
    (earlier,) = evidence.earlier_protocols(before, frozen)
    assert earlier == {**former, "recipes": {"kivi": "kivi as it was"}}


def test_a_recipe_that_answers_otherwise_loses_its_published_samples(published, capsys):
    evidence, former = published
    before = evidence.published_before("run", former)
    stay = evidence.earlier_lines("run", before, former, [line("kivi", "other")])
    assert [x["recipe"] for x in stay] == ["full", "tiny"]
    assert capsys.readouterr().out.startswith("kivi answers a of niah otherwise")
    with pytest.raises(SystemExit, match="full gave a of niah another answer than is published"):
        evidence.earlier_lines("run", before, former, [line("full", "wrong")])


def test_a_run_under_other_conditions_is_refused_beside_published_ones(published):
    evidence, former = published
    with pytest.raises(SystemExit, match="measured with other seed, threads: run it as its"):
        evidence.published_before("run", {**former, "seed": 1, "threads": 2})
    assert evidence.published_before("another", former) == {}
    assert evidence.earlier_lines("another", {}, former, []) == []


def test_what_is_not_found_again_is_named(benchmark):
    evidence = benchmark("evidence")
    scored = [
        line("kivi", "a") | {"sample": f"{i}", "scores": {"correct": i % 2}} for i in range(8)
    ]
    failed = [line("skvq", "") | {"problem": "needs a calibration"}]
    before = {evidence.KEY(x): x for x in [*scored, *failed]}
    assert evidence.not_found([*scored, *failed], before) == []
    none = [x | {"scores": {"correct": 0}} for x in scored]
    assert evidence.not_found(none, before) == ["kivi on niah: correct 0 not in 0.125 … 0.875"]
    problem = line("kivi", "") | {"sample": "0", "problem": "needs a calibration"}
    assert evidence.not_found([problem], before) == ["kivi on 0: needs a calibration"]


def test_quick_calibrates_before_it_measures(benchmark, tmp_path, monkeypatch):
    evidence, done = benchmark("evidence"), []

    class Lab(evidence.Lab):
        def __init__(self, run):
            self.plan = evidence.RUNS[run]
            self.model = SimpleNamespace(config=SimpleNamespace(_name_or_path=str(tmp_path)))

        def samples(self, task):
            return None, []

        def recipes(self, task, names):
            return [resolve("skvq" if task.spec == "perplexity" else "kivi")]

        def evaluation(self, folder):
            return SimpleNamespace(
                measure_batches=lambda *_: done.append("measure"), lines=lambda specs: []
            )

    monkeypatch.setattr(evidence, "Lab", Lab)
    calibrate = SimpleNamespace(run=lambda command, check: done.append(command[3]))
    monkeypatch.setattr(evidence, "subprocess", calibrate)
    assert evidence.repeat(tmp_path) == []
    assert done == ["calibrate", *["measure"] * len(evidence.QUICK)]


def test_figures_are_computed_again_where_samples_are_published(benchmark):
    figures = benchmark("evidence_figures")
    lines = [
        {"task": "multiturn", "sample": f"code/9/{i}/turn {turn}", "recipe": recipe,
         "kv_bytes": 1, "exact_bytes": 2, "scores": {"correct": float(recipe == "full")}}
        for recipe in ("full", "kivi") for i in range(2) for turn in (1, 2, 3)
    ]  # fmt: skip
    row = {
        "task": "multiturn",
        "recipe": "kivi",
        "scores": "old",
        "over_full": "old",
        "prefill_s": 1,
    }
    stays = row | {"recipe": "skvq"}
    before = {"protocol": {}, "figures": [row, stays], "by_kind": [row | {"kind": "code"}]}
    found = figures.recomputed(before, lines)
    assert found["figures"][1] == stays
    assert found["figures"][0] | {"kind": "code"} == found["by_kind"][0]
    assert found["figures"][0]["prefill_s"] == 1
    assert found["figures"][0]["over_full"]["correct"]["verdict"] == "too few"
