"""KIVI: a tuning-free asymmetric 2bit quantization for KV cache (arXiv:2402.02750v2)."""

from __future__ import annotations

from kvloom.recipe import Protect, Recipe, resolve
from kvloom.store import Packed, Store

from .claim import Claim, ClaimTable, Finding
from .judge import (
    KEEPS,
    LEAST_FOUND,
    all_hold,
    difference,
    kept,
    ordered,
    quality_figures,
    require_retrieval,
    shares,
)
from .lab import Lab, named

GROUP = 32
TASKS = ("CoQA", "TruthfulQA", "GSM8K")
NO_SINK = (
    "the reference model has hardly a sink: its first token receives 0.7% of the attention, and "
    "the norm of its value is 0.86 of the median (SmolLM2-135M: 21% and 0.36). A sink's small "
    "value is lost where it shares a scale with other tokens: on SmolLM2-135M the output error of "
    "values per channel is 1.8 times that per token, most of it from the group of the first token"
)


def cell(bits: int, keys: str, values: str) -> Recipe:
    """Return keys and values packed along the axes "C" (channel) or "T" (token), group 32.

    As in Table 3 there is no window. Every cell leaves the newest tokens exact that do not fill a
    group of 32, because a group per channel needs 32 tokens.
    """
    axis = {"C": "channel", "T": "token"}
    packed = [Packed(bits, axis[x], GROUP, residual=GROUP) for x in (keys, values)]
    name = f"{bits}bit (K - {keys}, V - {values})"
    return Recipe(store=Store(packed[0], packed[1]), protect=Protect(), name=name)


FOUR, TT, CC, TC, CT = (
    "4bit (K - T, V - T)", "2bit (K - T, V - T)", "2bit (K - C, V - C)", "2bit (K - T, V - C)",
    "2bit (K - C, V - T)",
)  # fmt: skip
CELLS = (cell(4, "T", "T"), *(cell(2, k, v) for k, v in ("TT", "CC", "TC", "CT")))
TABLE3 = ClaimTable(
    TASKS,
    {
        "16bit": (66.37, 29.53, 22.67),
        FOUR: (66.73, 29.14, 20.92),
        CT: (63.53, 28.60, 12.21),
        TT: (52.93, 24.98, 4.55),
        CC: (2.88, 0.74, 0.00),
        TC: (2.80, 0.26, 0.08),
        "KIVI-4": (66.38, 29.49, 23.65),
        "KIVI-2": (66.23, 29.84, 20.77),
    },
)


def _four_bit(lab: Lab) -> Finding:
    found = lab.quality(CELLS)
    keeps = kept(found, {FOUR: KEEPS})
    drop = found[TT].ratio
    return all_hold(
        keeps,
        Finding(keeps.ours, drop > KEEPS, f"{TT}: {drop:.3f} (must be above {KEEPS})"),
        ordered(found, (FOUR, TT)),
    )


def _best_cell(lab: Lab) -> Finding:
    return ordered(lab.quality(CELLS), (CT, TT), (CT, CC), (CT, TC))


def _values_per_channel(lab: Lab) -> Finding:
    return ordered(lab.quality(CELLS), (TT, CC), (TT, TC), (CT, CC), (CT, TC))


def _format_errors(lab: Lab) -> dict[str, dict[str, float]]:
    return lab.errors([cell(2, "T", "T"), cell(2, "C", "C")])


def _key_errors(lab: Lab) -> Finding:
    found = _format_errors(lab)
    rows = {
        "keys": (found[TT]["keys"], found[CC]["keys"]),
        "attention": (found[TT]["weights"], found[CC]["weights"]),
    }
    ratio = rows["attention"][0] / rows["attention"][1]
    return Finding(
        ClaimTable(("K Per-Token", "K Per-Channel"), rows),
        ratio >= 2 and rows["keys"][0] > rows["keys"][1],
        f"attention error per token is {ratio:.2f} times that per channel",
    )


def _value_errors(lab: Lab) -> Finding:
    found = _format_errors(lab)
    rows = {
        "values": (found[TT]["values"], found[CC]["values"]),
        "output": (found[TT]["output_values"], found[CC]["output_values"]),
    }
    ratio = rows["output"][1] / rows["output"][0]
    return Finding(
        ClaimTable(("V Per-Token", "V Per-Channel"), rows),
        ratio >= 2,
        f"output error per channel is {ratio:.2f} times that per token",
    )


def _kivi_keeps(lab: Lab) -> Finding:
    return kept(lab.quality(["kivi-4", "kivi"]), {"kivi-4": KEEPS, "kivi": KEEPS})


def _window(lab: Lab) -> Finding:
    return ordered(lab.quality([cell(2, "C", "T"), "kivi"]), ("kivi", CT))


def _grouped(lab: Lab, group: int) -> Recipe:
    """Return KIVI with another group; a group of values is at most a head wide."""
    values = min(group, lab.geometry.head_dim)
    recipe = resolve("kivi")
    store = Store(Packed(2, "channel", group, residual=128), Packed(2, "token", values))
    return Recipe(store=store, protect=recipe.protect, name=f"G = {group}")


def _group_size(lab: Lab) -> Finding:
    recipes = [_grouped(lab, group) for group in (32, 64, 128)]
    found = lab.quality(recipes)
    first = difference(found["G = 64"].kl, found["G = 32"].kl)
    second = difference(found["G = 128"].kl, found["G = 64"].kl)
    return Finding(
        quality_figures(found),
        second.low > 0 and second.mean > first.mean,
        f"KL of 64 minus 32: {first}; of 128 minus 64: {second}",
    )


def _residual(lab: Lab) -> Finding:
    recipes = [named(f"kivi:residual={r}", f"R = {r}") for r in (32, 64, 96, 128)]
    found = lab.quality(recipes)
    ratios = [found[recipe.name].ratio for recipe in recipes]
    spread = max(ratios) / min(ratios)
    return Finding(
        quality_figures(found), spread <= 1.02, f"largest over smallest perplexity: {spread:.3f}"
    )


def _passkey(lab: Lab) -> Finding:
    variant = "passkey"
    found = lab.needles(["kivi-4", "kivi"], variant)
    if found["full"].mean() < LEAST_FOUND:
        variant = "multikey"
        found = lab.needles(["kivi-4", "kivi"], variant)
    require_retrieval(found)
    least = float(found["full"].mean()) - 0.05
    ours = {name: float(found[name].mean()) for name in ("kivi-4", "kivi")}
    evidence = "; ".join(f"{name}: {x:.0%}" for name, x in ours.items())
    return Finding(
        shares(found), min(ours.values()) >= least, f"{variant}: {evidence} (least {least:.0%})"
    )


CLAIMS = (
    Claim(
        "4-bit",
        "Per-token quantization keeps the accuracy at 4 bit, and loses much of it at 2 bit.",
        "Table 3 (Llama-2-13B) and OB 1",
        "perplexity at most 5% above full at 4 bit and more than 5% above it at 2 bit; "
        "4 bit better than 2 bit",
        _four_bit,
        paper=TABLE3.only("16bit", FOUR, TT),
    ),
    Claim(
        "best layout",
        "At 2 bit, keys per channel and values per token are the most accurate layout.",
        "Table 3 (Llama-2-13B) and OB 3",
        "better than each of the three other layouts",
        _best_cell,
        NO_SINK,
        paper=TABLE3.only("16bit", CT, TT, CC, TC),
    ),
    Claim(
        "values per channel",
        "Values per channel make the accuracy much worse, however keys are quantized.",
        "Table 3 (Llama-2-13B) and OB 2",
        "both layouts with values per channel worse than both with values per token",
        _values_per_channel,
        NO_SINK,
        paper=TABLE3.only("16bit", CT, TT, CC, TC),
    ),
    Claim(
        "key errors",
        "Keys per token have almost 5 times the attention error of keys per channel.",
        "Table 2 (Llama-2-13B; formula of the norm and bit width not stated)",
        "both errors at 2 bit (norm of the error over norm) larger per token, attention's at least "
        "twice as large",
        _key_errors,
        "the outlier channels of the reference model's keys are small: the largest channel is "
        "3.5 times the median one, as the mean over layers and heads (SmolLM2-135M: 9.5 times)",
        paper=ClaimTable(
            ("K Per-Token", "K Per-Channel"), {"keys": (13.67, 4.55), "attention": (47.00, 9.60)}
        ),
    ),
    Claim(
        "value errors",
        "Values per channel have almost 15 times the output error of values per token.",
        "Table 2 (Llama-2-13B; formula of the norm and bit width not stated)",
        "output error at 2 bit (norm of the error over norm) per channel at least twice that per "
        "token",
        _value_errors,
        NO_SINK,
        paper=ClaimTable(
            ("V Per-Token", "V Per-Channel"), {"values": (4.57, 3.73), "output": (3.55, 49.89)}
        ),
    ),
    Claim(
        "KIVI",
        "KIVI loses at most 2% of the accuracy, at 4 bit and at 2 bit.",
        "Table 3 (Llama-2-13B)",
        "perplexity at most 5% above full",
        _kivi_keeps,
        "4 bit holds, 2 bit does not: the reference model has two key/value heads of 64 a layer. "
        "The paper finds the same for Falcon-7B, with one head: 4 bit is needed there",
        paper=TABLE3.only("16bit", "KIVI-4", "KIVI-2"),
    ),
    Claim(
        "window",
        "The exact window of recent tokens is crucial for hard tasks.",
        "Table 3 (Llama-2-13B), section 4.2.1",
        "KIVI-2 better than the same layout without a window",
        _window,
        paper=TABLE3.only("16bit", CT, "KIVI-2"),
    ),
    Claim(
        "group size",
        "Groups of 32 and 64 are alike; groups of 128 lose accuracy.",
        "Table 5 (Llama-2-13B, residual 128)",
        "64 better than 128, by more than 32 is better than 64; a group of values is at most a "
        "head",
        _group_size,
        "a head of the reference model has 64 channels, so from 64 to 128 only the groups of keys "
        "grow, and those of values stay at 64",
        paper=ClaimTable(("GSM8K",), {"G = 32": (20.77,), "G = 64": (21.00,), "G = 128": (17.29,)}),
    ),
    Claim(
        "residual length",
        "Accuracy and residual length show no consistent pattern; 32 is about as good as 128.",
        "Table 5 (Llama-2-13B, group 32)",
        "perplexities of all four within 2% of each other",
        _residual,
        paper=ClaimTable(
            ("GSM8K",),
            {"R = 32": (20.62,), "R = 64": (19.86,), "R = 96": (20.55,), "R = 128": (20.77,)},
        ),
    ),
    Claim(
        "pass key",
        "KIVI retrieves a hidden pass key as the exact cache does, even at 2 bit.",
        "Figure 4 (Llama-3-8B-Instruct, Mistral-7B-Instruct-v0.2; heatmaps without numbers)",
        "KIVI-4 and KIVI-2 find at most 5 points fewer pass keys than full (template of appendix "
        "B); if full finds less than half of these, the same for needles in kvloom's own words",
        _passkey,
    ),
    Claim(
        "LM-Eval",
        "KIVI-2 keeps CoQA, TruthfulQA and GSM8K.",
        "Table 3 (Llama-2-7B)",
        why_not_testable="these tasks need a model that can solve them; with one: python -m "
        "kvloom_lab.eval.lm_eval --model kvloom "
        "--model_args pretrained=MODEL,recipe=kivi --tasks coqa,truthfulqa_gen,gsm8k",
        paper=ClaimTable(
            TASKS,
            {
                "16bit": (63.88, 30.76, 13.50),
                "KIVI-4": (63.78, 30.80, 13.80),
                "KIVI-2": (63.05, 33.95, 12.74),
            },
        ),
    ),
    Claim(
        "LongBench",
        "KIVI keeps the average over eight tasks of LongBench.",
        "Table 4 (Llama2-7B)",
        why_not_testable="LongBench needs its data and a model of several billion parameters; with "
        "both: kvloom eval longbench --data FOLDER --model MODEL --recipes kivi-4,kivi --out DIR",
        paper=ClaimTable(("Average",), {"16bit": (44.52,), "KIVI-4": (44.59,), "KIVI-2": (44.27,)}),
    ),
    Claim(
        "throughput",
        "KIVI takes 2.6 times less peak memory and gives 2.35 to 3.47 times the throughput.",
        "Figure 5 (Llama-2-7B on an A100 of 80 GB)",
        why_not_testable="this needs that GPU and model; kvloom bench generate measures the speed "
        "of this machine",
    ),
)
