"""Means with intervals over samples, the share of bytes, and the Pareto front."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from kvloom_lab.eval.summary import (
    Figures,
    bootstrap,
    chance,
    higher_is_better,
    main_score,
    paired_difference,
    pareto,
    summarize,
)
from kvloom_lab.eval.tasks import TASKS, Niah


def line(recipe, sample, share=0.25, **scores):
    return {
        "task": "niah", "sample": sample, "recipe": recipe, "scores": scores,
        "kv_bytes": 1000 * share, "exact_bytes": 1000,
        "seconds": {"prefill": 1.5, "decode": 2.0, "steps": 10},
    }  # fmt: skip


def test_an_interval_is_that_of_a_naive_bootstrap():
    values = np.random.default_rng(3).exponential(size=60)
    rng = np.random.default_rng(99)  # other resamples: the bounds agree up to their own noise
    means = [rng.choice(values, len(values)).mean() for _ in range(4000)]
    found = bootstrap(values.tolist())
    assert found.mean == pytest.approx(values.mean())
    spread = np.std(means)
    assert found.low == pytest.approx(np.quantile(means, 0.025), abs=0.2 * spread)
    assert found.high == pytest.approx(np.quantile(means, 0.975), abs=0.2 * spread)
    assert found.samples == 60
    assert bootstrap(values.tolist()) == found


def test_intervals_contain_the_truth_as_often_as_they_claim():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        found = bootstrap(rng.normal(size=50).tolist())
        hits += found.low <= 0 <= found.high
    assert 0.90 <= hits / 300 <= 0.98


@pytest.mark.parametrize("samples", [6, 8, 12])
def test_intervals_of_few_samples_are_wide_enough(samples):
    rng = np.random.default_rng(0)
    found = [bootstrap(rng.normal(size=samples).tolist()) for _ in range(600)]
    hits = sum(x.low <= 0 <= x.high for x in found)
    assert 0.92 <= hits / 600 <= 0.97  # plain percentiles: 0.85 to 0.91


def in_contexts(rng, contexts=30, samples=10):
    """Values around 0 of which half of the variance is shared in a context, and the contexts."""
    shared = rng.normal(size=(contexts, 1)) + rng.normal(size=(contexts, samples))
    return shared.ravel().tolist(), np.repeat(np.arange(contexts), samples).tolist()


def test_an_interval_of_shared_contexts_is_that_of_whole_contexts():
    groups = [[0.0], [1.0, 1.0], [3.0, 4.0, 2.0], [5.0] * 4, [2.0, 0.0], [7.0]]
    values, contexts = np.concatenate(groups).tolist(), list("abbcccddddeef")
    rng = np.random.default_rng(99)
    means = [np.concatenate([groups[i] for i in rng.choice(6, 6)]).mean() for _ in range(4000)]
    found, spread = bootstrap(values, contexts), np.std(means)
    tail = NormalDist().cdf(-2.5706 * math.sqrt(6 / 5))  # Student's t, five degrees of freedom
    assert (found.mean, found.samples) == (pytest.approx(np.mean(values)), 13)
    assert found.low == pytest.approx(np.quantile(means, tail), abs=0.3 * spread)
    assert found.high == pytest.approx(np.quantile(means, 1 - tail), abs=0.3 * spread)
    assert bootstrap(values, range(13)) == bootstrap(values)
    assert bootstrap(values[:12], contexts[:12]).low is None  # five contexts are too few


def test_intervals_and_verdicts_hold_in_shared_contexts():
    rng = np.random.default_rng(0)
    hits, equal = 0, 0
    for _ in range(300):
        values, contexts = in_contexts(rng)
        found = bootstrap(values, contexts)
        hits += found.low <= 0 <= found.high
        equal += paired_difference(values, higher=True, contexts=contexts).verdict == "equal"
    assert 0.90 <= hits / 300 <= 0.98
    assert 0.92 <= equal / 300 <= 0.98


def test_values_without_spread_or_that_are_not_finite():
    assert (bootstrap([1.0] * 6).low, bootstrap([1.0] * 6).high) == (1, 1)
    assert bootstrap([1.0] * 5).low is bootstrap([1.0] * 5).high is None
    assert bootstrap([1.0, math.nan, math.inf, 3.0]).mean == 2
    assert bootstrap([1.0, math.nan, 3.0]).samples == 2
    with pytest.raises(ValueError, match="at least one finite value"):
        bootstrap([math.nan])


def test_figures_of_recipes():
    lines = [line("full", f"s{i}", share=1.0, correct=1.0) for i in range(4)]
    lines += [line("kivi", f"s{i}", share=0.1 * (i + 1), correct=float(i > 0)) for i in range(4)]
    lines += [{"task": "niah", "sample": "s0", "recipe": "skvq", "problem": "does not fit"}]
    full, kivi, skvq = summarize(lines)
    assert (full.recipe, full.share, full.over_full) == ("full", 1.0, {})
    assert kivi.share == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4)
    assert (kivi.samples, kivi.problems, kivi.exact_bytes) == (4, 0, 1000)
    assert kivi.scores["correct"].mean == 0.75
    assert kivi.over_full["correct"].mean == -0.25
    assert (kivi.prefill_s, kivi.decode_tokens_s) == (1.5, 5.0)
    assert skvq == Figures("niah", "skvq", 0, 1, "does not fit")


def test_means_of_numbers_that_some_lines_have():
    quest = [{**line("quest", f"s{i}", correct=1.0), "tokens_read": 10 * i} for i in range(3)]
    found = summarize([*quest, line("quest", "old", correct=1.0), line("full", "s0", correct=1.0)])
    assert [(f.tokens_read, f.bits_per_value) for f in found] == [(10, None), (None, None)]


def test_differences_are_of_the_same_samples():
    lines = [line("full", f"s{i}", correct=10.0 * i) for i in range(9)]
    lines += [line("h2o", f"s{i}", correct=10.0 * i - 1) for i in (8, 1, 3, 4, 5, 7)]
    h2o = summarize(lines)[1]
    assert (h2o.over_full["correct"].low, h2o.over_full["correct"].high) == (-1, -1)
    assert h2o.scores["correct"].mean == pytest.approx(280 / 6 - 1)


@pytest.mark.parametrize(
    ("won", "lost", "p"), [(0, 0, 1.0), (3, 3, 1.0), (1, 6, 0.125), (0, 6, 1 / 32)]
)
def test_chance_is_the_binomial_test_of_the_samples_that_differ(won, lost, p):
    found = chance([1.0] * won + [-1.0] * lost + [0.0] * 20)
    assert found == pytest.approx(p, abs=0.01)  # signs are drawn


def test_a_difference_within_chance_is_equal():
    one_side, both_sides = [-1.0] * 6 + [0.0] * 46, [-1.0] * 6 + [1.0] + [0.0] * 45
    assert paired_difference(one_side, higher=True).verdict == "worse"
    assert paired_difference(one_side, higher=False).verdict == "better"
    assert paired_difference(both_sides, higher=True).verdict == "equal"
    assert paired_difference([0.0] * 9, higher=True).verdict == "equal"


def test_scores_that_are_no_pass_or_fail_are_judged_by_the_same_test():
    losses = paired_difference([0.01, 0.03, 0.02, 0.04, 0.01, 0.02], higher=False)
    assert (losses.won, losses.lost, losses.verdict) == (0, 6, "worse")
    assert paired_difference([0.4, -0.1, 0.2, -0.3, 0.1, 0.1], higher=False).verdict == "equal"


def test_few_contexts_have_no_verdict():
    for contexts in range(1, 6):
        losses = [-1.0] * 4 * contexts
        found = paired_difference(losses, higher=True, contexts=[*range(contexts)] * 4)
        assert found.verdict == "too few"
        assert chance(losses, [*range(contexts)] * 4) > 0.05
    assert paired_difference([0.5], higher=True).verdict == "too few"


def test_questions_about_one_context_are_one_piece_of_evidence():
    names = [f"prose/multikey/2048/{i}/{depth}" for i in range(8) for depth in (0, 0.111, 1)]
    lines = [line("full", name, correct=1.0) for name in names]
    lines += [line("h2o", name, correct=float(i >= 6)) for i, name in enumerate(names)]
    shared = summarize(lines)[1].over_full["correct"]  # six lost, in two contexts
    assert (shared.lost, shared.verdict) == (6, "equal")
    separate = [x | {"sample": x["sample"].replace("multikey", "single")} for x in lines]
    own = summarize(separate)[1].over_full["correct"]
    assert (own.lost, own.verdict) == (6, "worse")
    assert shared.low < own.low < own.high < shared.high == 0


def test_a_later_line_of_a_sample_replaces_the_earlier():
    found = summarize([line("h2o", "a", correct=0.0), line("h2o", "a", correct=1.0)])
    assert (found[0].samples, found[0].scores["correct"].mean) == (1, 1)


def test_perplexity_is_of_the_mean_loss():
    found = summarize([line("kivi", f"{i}", nll=1.0 + 2 * (i % 2)) for i in range(6)])[0].scores
    assert found["perplexity"].mean == pytest.approx(math.exp(2))
    assert found["perplexity"].low == pytest.approx(math.exp(found["nll"].low))
    assert found["perplexity"].high == pytest.approx(math.exp(3))
    assert "nll" not in summarize([line("kivi", "a", nll=None)])[0].scores


def test_the_usual_score_of_a_task():
    assert main_score("perplexity", ["nll", "perplexity"]) == "perplexity"
    assert main_score("ruler", ["time", "correct"]) == "correct"
    assert main_score("longbench", ["f1", "rouge"]) == "f1"
    assert higher_is_better("niah", "correct")
    assert not higher_is_better("trace", "kl_p999")
    assert not higher_is_better("perplexity", "perplexity")


def test_every_task_says_what_it_measures():
    assert {name for name, task in TASKS.items() if not task.about.endswith((".", "?"))} == set()


def test_every_task_declares_the_direction_of_its_scores(monkeypatch):
    class Seconds(Niah):
        name, main_score, lower_is_better = "seconds", "time", ("time",)

    monkeypatch.setitem(TASKS._entries, "seconds", Seconds)
    assert not higher_is_better("seconds", "time")
    assert higher_is_better("seconds", "kl_mean")


@pytest.mark.parametrize("higher", [True, False])
def test_the_front_is_what_no_point_beats(higher):
    rng = np.random.default_rng(1)
    points = [tuple(p) for p in rng.integers(0, 12, (80, 2)).tolist()]  # with ties
    points[3:5] = [(None, 5), (4, None)]
    sign = 1 if higher else -1

    def beaten(p):
        return any(
            None not in q and q[0] <= p[0] and sign * q[1] >= sign * p[1] and q != p for q in points
        )

    want = {i for i, p in enumerate(points) if None not in p and not beaten(p)}
    found = pareto(points, higher)
    assert set(found) == want
    assert len(found) == len(want)
    assert [points[i][0] for i in found] == sorted(points[i][0] for i in found)
