"""`kvloom papers`: verdicts, their layout, and that one failure does not stop the others."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import kvloom_lab.papers as papers
import tiny
from kvloom.errors import InputError
from kvloom_lab.bench import ModelShape
from kvloom_lab.cli.app import app
from kvloom_lab.papers import (
    Claim,
    ClaimTable,
    Finding,
    NotTestable,
    check,
    clusterkv,
    keyformer,
    kivi,
)
from kvloom_lab.papers.claim import (
    AS_GOOD,
    FAILED,
    NOT_REPRODUCED,
    NOT_TESTABLE,
    REPRODUCED,
    difference,
    kept,
    monotone,
    ordered,
)
from kvloom_lab.papers.lab import Lab, Quality, Size, TimedStep, named
from kvloom_lab.papers.recalling import Importance
from kvloom_lab.papers.speed import LLAMA_2_7B, throughput

OURS = ClaimTable(("score",), {"a": (1.0,), "b": ("OOM",)})
RNG = np.random.default_rng(1)
SAMPLES = 8
SIZE = Size(context=96, samples=2, new_tokens=4, needles=1, long_context=256, steps=2)


def claim(test=None, **fields):
    return Claim("one", "A is better than B.", "Table 1", "A > B", test, paper=OURS, **fields)


def quality(kl, nll=1.0):
    """A recipe with samples around a KL divergence, each with its own difficulty."""
    hard = np.linspace(0.9, 1.1, SAMPLES)
    full = np.full(SAMPLES, 1.0)
    return Quality(np.full(SAMPLES, nll), kl * hard, 0.5, 0.25, full)


class FakeLab:
    """Returns the given qualities and rates instead of measuring."""

    name = "reference"
    long_context = 8192

    def __init__(self, found=None, rates=None, ms=None):
        self.found, self.rates, self.ms = found, rates, ms

    def quality(self, recipes, context=None, samples=None):
        return self.found

    def recall(self):
        return self.rates

    def steps(self, shape, recipes, context, baselines=()):
        return {name: TimedStep(self.ms(name, context), 100) for name in (*recipes, "DynamicCache")}


# verdicts


@pytest.mark.parametrize(("holds", "status"), [(True, REPRODUCED), (False, NOT_REPRODUCED)])
def test_the_rule_decides(holds, status):
    found = check(
        claim(lambda lab: Finding(OURS, holds, "1 > 2"), why_not_reproduced="too small"), FakeLab()
    )
    assert (found.status, found.ours, found.evidence) == (status, OURS, "1 > 2")
    assert found.explanation == ("" if holds else "too small")


def test_a_cause_is_that_of_the_reference_model():
    lab = FakeLab()
    lab.name = "another"
    failing = claim(lambda lab: Finding(OURS, False, ""), why_not_reproduced="too small")
    assert check(failing, lab).explanation == (
        "the cause was not investigated on this model; on the reference model: too small"
    )
    assert (
        check(replace(failing, why_not_reproduced=""), lab).explanation
        == "the cause was not investigated"
    )
    lab.name = "smollm2"
    assert check(replace(failing, why_not_on_smollm2="sinks"), lab).explanation == "sinks"


def test_what_is_not_testable_says_why():
    assert check(claim(why_not_testable="needs an A100"), FakeLab()).status == NOT_TESTABLE

    def test(lab):
        raise NotTestable("finds nothing")

    found = check(claim(test), FakeLab())
    assert (found.status, found.explanation, found.ours) == (NOT_TESTABLE, "finds nothing", None)


def test_a_failing_experiment_says_why(caplog):
    def refuses(lab):
        raise InputError("no calibration")

    def breaks(lab):
        raise ZeroDivisionError("by zero\nlong")

    assert check(claim(refuses), FakeLab()) == papers.Verdict(
        claim(refuses), FAILED, explanation="no calibration"
    )
    assert caplog.text == ""
    assert check(claim(breaks), FakeLab()).explanation == "ZeroDivisionError: by zero"
    assert "claim 'one' failed" in caplog.text


# statistics and rules


def test_an_interval_contains_the_mean_and_is_paired():
    hard = RNG.normal(10, 5, 50)  # differs far more from sample to sample than the two recipes do
    gap = difference(hard + 0.1, hard)
    assert gap.low == pytest.approx(0.1) == gap.high
    noise = RNG.normal(0, 1, 200)
    found = difference(noise, 0 * noise)
    assert found.low < noise.mean() < found.high
    assert found.high - found.low == pytest.approx(2 * 1.96 * noise.std() / 200**0.5, rel=0.15)


def test_smaller_needs_more_than_chance():
    base = RNG.normal(0, 1, 16)
    assert difference(base - 1, base).high < 0
    assert difference(base, base).high == 0
    assert difference(base[:5] - 1, base[:5]).high > 0  # five contexts tell nothing
    mixed = base + np.where(np.arange(16) % 2, 1.0, -1.05)
    assert mixed.mean() < base.mean()
    assert difference(mixed, base).high >= 0


def test_order_limits_and_steps():
    found = {"a": quality(0.1, 1.005), "b": quality(0.2, 1.2), "c": quality(0.3)}
    assert ordered(found, ("a", "b"), ("b", "c")).holds
    assert not ordered(found, ("a", "b"), ("c", "b")).holds
    assert not ordered(found, ("a", "a")).holds
    assert monotone(found, ["c", "b", "a"]).holds
    assert not monotone(found, ["a", "b", "c"]).holds
    assert kept(found, {"a": AS_GOOD}).holds
    assert not kept(found, {"a": AS_GOOD, "b": AS_GOOD}).holds
    assert ordered(found, ("a", "b")).ours.rows["b"][1:] == pytest.approx((0.2, 0.5, 0.25))


def test_an_order_within_chance_says_so():
    found = {"a": quality(0.1), "b": quality(0.11)}
    found["a"].kl[:2] += 0.03
    assert not (order := ordered(found, ("a", "b"))).holds
    assert found["a"].kl.mean() < found["b"].kl.mean()
    assert (
        "an interval includes 0"
        in check(claim(lambda lab: order, why_not_reproduced="no"), FakeLab()).explanation
    )
    assert ordered(found, ("b", "a")).why_not_reproduced == ""


def by_name(paper, name):
    return next(c for c in papers.PAPERS[paper][1] if c.name == name)


def cells(ct, tt, cc, tc):
    return {
        name: quality(kl, 1 + kl)
        for name, kl in zip((kivi.CT, kivi.TT, kivi.CC, kivi.TC, kivi.FOUR),
                            (ct, tt, cc, tc, 0.01), strict=True)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "found", "status"),
    [
        ("best layout", cells(0.1, 0.2, 0.3, 0.4), REPRODUCED),
        ("best layout", cells(0.1, 0.2, 0.09, 0.4), NOT_REPRODUCED),
        ("values per channel", cells(0.1, 0.2, 0.3, 0.4), REPRODUCED),
        ("values per channel", cells(0.1, 0.2, 0.15, 0.4), NOT_REPRODUCED),
        ("4-bit", cells(0.1, 0.2, 0.3, 0.4), REPRODUCED),
        ("4-bit", cells(0.1, 0.02, 0.3, 0.4), NOT_REPRODUCED),
    ],
)
def test_the_rules_of_kivis_layouts(name, found, status):
    assert check(by_name("kivi", name), FakeLab(found)).status == status


@pytest.mark.parametrize(
    ("name", "changed", "status"),
    [
        ("recall rate", {}, REPRODUCED),
        ("recall rate", {clusterkv.QUEST: 0.49}, NOT_REPRODUCED),
        ("recall rate", {clusterkv.INFINIGEN: 0.6}, NOT_REPRODUCED),
        ("distance", {}, REPRODUCED),
        ("distance", {"L2, L/80": 0.495}, NOT_REPRODUCED),
        ("number of clusters", {}, REPRODUCED),
        ("number of clusters", {"cosine, L/20": 0.7}, NOT_REPRODUCED),
    ],
)
def test_the_rules_of_recall_rates(name, changed, status):
    rates = {
        "cosine, L/160": 0.4, "cosine, L/80": 0.5, "cosine, L/40": 0.54, "cosine, L/20": 0.55,
        "L2, L/80": 0.3, "inner product, L/80": 0.2, clusterkv.QUEST: 0.3,
        clusterkv.INFINIGEN: 0.3,
    } | changed  # fmt: skip
    lab = FakeLab(rates={key: {256: x, 512: x} for key, x in rates.items()})
    assert check(by_name("clusterkv", name), lab).status == status


@pytest.mark.parametrize(
    ("recent", "status"),
    [((0.1, 0.3, 0.3), REPRODUCED), ((0.3, 0.3, 0.3), NOT_REPRODUCED)],  # heavy: 0.2
)
def test_no_trend_between_heavy_hitters_and_recent_tokens(recent, status):
    shares = ("5%", "20%", "45%")
    found = {f"heavy {x}": quality(0.2) for x in shares}
    found |= {f"recent {x}": quality(kl) for x, kl in zip(shares, recent, strict=True)}
    assert check(by_name("minikv", "heavy or recent"), FakeLab(found)).status == status


@pytest.mark.parametrize(
    ("half", "fifth", "status"),
    [(0.04, 0.06, REPRODUCED), (0.06, 0.2, NOT_REPRODUCED), (0.04, 0.04, NOT_REPRODUCED)],
)
def test_half_of_the_cache_keeps_what_a_fifth_loses(half, fifth, status):
    found = {
        f"{name} {share}": quality(0.1, 1 + (half if share == "50%" else fifth))
        for name in ("H2O", "SnapKV")
        for share in ("50%", "20%", "10%", "5%")
    }
    assert check(by_name("minikv", "much eviction"), FakeLab(found)).status == status


@pytest.mark.parametrize(("damped", "status"), [(0.06, REPRODUCED), (0.04, NOT_REPRODUCED)])
def test_damping_restores_half_of_the_loss_at_most(damped, status):
    found = {f"α = {x:g}": quality(0.1 if x == 1 else damped) for x in keyformer.DAMPING}
    assert check(by_name("keyformer", "damping"), FakeLab(found)).status == status


@pytest.mark.parametrize(
    ("name", "kept", "in_page", "status"),
    [
        ("changing importance", [1.0, 0.5], 9, REPRODUCED),
        ("changing importance", [1.0, 0.51], 1, NOT_REPRODUCED),
        ("fragmented pages", [1.0], 2.0, REPRODUCED),
        ("fragmented pages", [1.0], 2.1, NOT_REPRODUCED),
    ],
)
def test_the_rules_of_importance(name, kept, in_page, status):
    lab = FakeLab()
    lab.importance = lambda tokens: Importance(kept, in_page)
    assert check(by_name("clusterkv", name), lab).status == status


def at_length(recipe, short, long):
    """A step takes 100 ms, of some recipes at 4k tokens or less `short`, later `long` ms."""
    return lambda name, context: 100 if recipe not in name else short if context <= 4096 else long


@pytest.mark.parametrize(
    ("paper", "name", "ms", "status"),
    [
        ("keyformer", "throughput", at_length("keyformer", 80, 50), REPRODUCED),
        ("keyformer", "throughput", at_length("keyformer", 80, 51), NOT_REPRODUCED),
        ("keyformer", "throughput", at_length("keyformer", 40, 50), NOT_REPRODUCED),
        ("minikv", "speed", at_length("minikv", 110, 99), REPRODUCED),
        ("minikv", "speed", at_length("minikv", 90, 101), NOT_REPRODUCED),
        ("clusterkv", "speed", at_length("full", 100, 201), REPRODUCED),
        ("clusterkv", "speed", at_length("full", 201, 199), NOT_REPRODUCED),
        ("clusterkv", "InfiniGen", at_length("infinigen", 230, 0), REPRODUCED),
        ("clusterkv", "InfiniGen", at_length("infinigen", 229, 0), NOT_REPRODUCED),
    ],
)
def test_the_rules_of_speed(paper, name, ms, status):
    assert check(by_name(paper, name), FakeLab(ms=ms)).status == status


def test_throughput_is_that_of_the_rows_that_fit():
    found = throughput(
        FakeLab(ms=lambda *_: 100), LLAMA_2_7B, "kivi", tokens=4096, rows=2, least=2.35
    )
    rows, ms, speed = found.ours.rows["kivi"]
    assert (rows, ms, speed) == (9, 100, 90)  # 4.9 times smaller
    assert found.ours.rows["full"] == (2, 100, 20)
    assert found.holds


def test_a_cause_that_no_model_changes_is_stated_for_all():
    lab = FakeLab(ms=lambda *_: 100)
    lab.name = "another"
    cause = check(by_name("keyformer", "throughput"), lab).explanation
    assert cause.startswith("a step reads 404 MB")


# what claims contain


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_claim_is_complete(paper):
    title, claims = papers.PAPERS[paper]
    assert re.search(r"\(arXiv:\d{4}\.\d{5}(v\d)?\)$", title)
    assert len({c.name for c in claims}) == len(claims)
    for c in claims:
        assert c.text.endswith("."), c.name
        assert (c.test is None) == bool(c.why_not_testable), c.name
        assert c.test is None or c.rule, c.name
        for cells in () if c.paper is None else c.paper.rows.values():
            assert len(cells) == len(c.paper.columns), c.name


# the command


@pytest.fixture
def two_claims(monkeypatch):
    def breaks(lab):
        raise InputError("no calibration")

    claims = (
        replace(claim(breaks), name="breaks"),
        claim(lambda lab: Finding(OURS, True, "1 < 2")),
        replace(claim(why_not_testable="needs an A100"), name="speed"),
    )
    monkeypatch.setitem(papers.PAPERS, "kivi", ("KIVI", claims))
    monkeypatch.setattr("kvloom_lab.models.load_model", lambda *_: tiny.llama())
    return monkeypatch


def run(*args):
    return CliRunner().invoke(app, ["papers", *map(str, args)])


def test_the_command_prints_verdicts_and_writes_json(two_claims, tmp_path):
    found = run("kivi", "--quick", "--json", tmp_path / "out.json")
    assert found.exit_code == 1  # one claim failed
    assert "no figures for breaks" in found.stderr
    assert re.search(r"failed: no calibration.*\nreproduced\n.*not testable here: needs an A100",
                     found.stdout, re.DOTALL)  # fmt: skip
    assert found.stdout.endswith("1 reproduced, 1 not testable here, 1 failed\n")
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["paper"], data["environment"]["quick"]) == ("kivi", True)
    assert [c["status"] for c in data["claims"]] == [FAILED, REPRODUCED, NOT_TESTABLE]
    assert data["claims"][1]["ours"] == {"columns": ["score"], "rows": {"a": [1.0], "b": ["OOM"]}}


def test_ctrl_c_keeps_what_is_finished(two_claims):
    def interrupt(lab):
        raise KeyboardInterrupt

    title, claims = papers.PAPERS["kivi"]
    ended = (claims[1], replace(claim(interrupt), name="later"), claims[2])
    two_claims.setitem(papers.PAPERS, "kivi", (title, ended))
    found = run("kivi", "--json", "-")
    assert found.exit_code == 130
    assert "interrupted; not measured: later, speed" in found.stderr
    data = json.loads(found.stdout)
    assert [c["name"] for c in data["claims"]] == ["one"]
    assert data["environment"]["missing"] == ["later", "speed"]


def test_an_unknown_paper_is_refused():
    found = run("kvquant")
    assert found.exit_code == 2
    assert "there is no paper 'kvquant'; choose from kivi, skvq" in found.stderr


# the lab


@pytest.fixture(scope="module")
def lab():
    return Lab(tiny.llama(head_dim=32), tiny.tokenizer(), tiny.TEXT, size=SIZE)


def test_a_claim_is_tested_on_a_tiny_model(lab):
    found = check(by_name("keyformer", "window"), lab)
    assert found.status in (REPRODUCED, NOT_REPRODUCED), found.explanation
    full = found.ours.rows["full"]
    assert full[:3] == pytest.approx((1.0, 0.0, 1.0), abs=1e-6)
    assert found.ours.rows["Window"][1] > 0


def test_quality_is_measured_once_and_full_is_exact(lab, monkeypatch):
    first = lab.quality(["window:tokens=24"])["window:tokens=24"]
    assert first.nll.shape == first.kl.shape == (2,)
    assert 0 < first.bytes_share < 0.5
    assert first.ratio == pytest.approx(np.exp(first.nll.mean() - first.full_nll.mean()))
    module = SimpleNamespace(calls=0)
    real = lab.model.forward

    def counted(*args, **kwargs):
        module.calls += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(lab.model, "forward", counted)
    again = lab.quality(["window:tokens=24"])["window:tokens=24"]
    assert module.calls == 0
    assert np.array_equal(again.kl, first.kl)


def test_two_recipes_of_one_name_are_measured_apart(lab):
    one, two = (lab.quality([named(f"window:tokens={n}", "same")])["same"] for n in (20, 80))
    again = lab.quality([named("window:tokens=20", "same")])["same"]
    assert one.bytes_share < two.bytes_share
    assert np.array_equal(one.kl, again.kl)


def test_contexts_fit_the_model(lab, monkeypatch):
    assert (lab.context, lab.long_context) == (96, 256)
    monkeypatch.setattr(lab.model.config, "max_position_embeddings", 150)
    assert (lab.context, lab.long_context) == (86, 86)


def test_a_recipe_without_figures_names_itself(lab):
    with pytest.raises(InputError, match=r"kivi:group=64: .*head_dim=32"):
        lab.quality(["kivi:group=64"])


def test_a_missing_calibration_is_refused_with_the_command_that_makes_it(lab):
    with pytest.raises(InputError, match=r"kvloom calibrate .*--recipes \"skvq:group=32,rptq\""):
        lab.check_calibration(("skvq:group=32", "rptq"))
    lab.check_calibration(("kivi:group=32",))


def test_a_text_that_is_too_short_is_refused_before_any_claim():
    with pytest.raises(InputError, match=r"the text has \d+ tokens, and the claims read"):
        Lab(tiny.llama(), tiny.tokenizer(), "A short text.", size=SIZE)


def test_recall_rates_are_shares_and_rise_with_the_budget(lab):
    rates = lab.recall()
    for by in rates.values():
        assert list(by) == sorted(by)
        assert all(0 < x <= 1 for x in by.values())
        assert max(by.values()) == by[max(by)] > by[min(by)]


def test_importance_starts_with_all_and_pages_hold_some(lab):
    found = lab.importance(16)
    assert found.kept[0] == 1
    assert all(0 <= x <= 1 for x in found.kept)
    assert len(found.kept) == SIZE.new_tokens
    assert 1 <= found.in_page <= 16


def test_noise_raises_the_entropy_of_the_mean(lab):
    for plain, noised in lab.entropies(8).values():
        assert 0 < plain < noised


def test_errors_of_formats_are_means_over_layers(lab):
    found = lab.errors([kivi.cell(8, "T", "T"), kivi.cell(2, "T", "T")])
    eight, two = found["8bit (K - T, V - T)"], found["2bit (K - T, V - T)"]
    assert 0 < eight.keys < two.keys < 1
    each = lab.errors([kivi.cell(8, "T", "T"), kivi.cell(2, "T", "T")], elementwise=True)
    assert each["2bit (K - T, V - T)"].keys > two.keys  # small elements err most


def test_steps_are_timed_and_read_the_weights_and_the_cache(lab):
    shape = ModelShape(2, 2, 32, layers=1, hidden=64, intermediate=64, vocabulary=64)
    steps = lab.steps(shape, ["full", "h2o:tokens=32"], 128)
    assert all(step.ms > 0 for step in steps.values())
    read = {name: step.read_bytes for name, step in steps.items()}
    saved = 2 * 2 * 32 * 2 * (128 - 32)  # keys and values in two heads, bf16
    assert saved <= read["full"] - read["h2o:tokens=32"] < read["full"]
