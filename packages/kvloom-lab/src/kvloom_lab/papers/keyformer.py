"""Keyformer: KV cache reduction through key tokens selection (arXiv:2403.09054)."""

from __future__ import annotations

import numpy as np

from .claim import Claim, ClaimTable, Finding
from .judge import AS_GOOD, all_hold, difference, kept, ordered, quality_figures
from .lab import Lab, Quality, named

BUDGETS = (0.2, 0.5, 0.7, 0.9)
TABLE3 = ClaimTable(
    ("ROUGE-1", "ROUGE-2", "ROUGE-L"),
    {
        "Full": (38.6373, 17.6329, 24.506),
        "Window": (18.1296, 4.2655, 11.5288),
        "H2O": (36.9616, 16.3865, 24.2301),
        "StreamingLLM": (1.3572, 0.0179, 1.0281),
        "Keyformer (New Pos)": (36.9152, 16.9092, 23.7218),
        "Keyformer (Org Pos)": (38.7134, 17.5976, 24.5724),
        "Keyformer (Shared)": (38.2537, 17.3732, 24.2579),
    },
)
NOISES = ("gumbel", "gaussian", "constant", "none")
RECENT = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def _at_60(lab: Lab) -> dict[str, Quality]:
    tokens = int(0.6 * lab.context)
    return lab.quality(
        [
            named(f"window:tokens={tokens}", "Window"),
            named("h2o:fraction=0.6,recent=0.3", "H2O"),
            named(f"streaming:tokens={tokens},positions=renumbered", "StreamingLLM"),
            named("keyformer:fraction=0.6,positions=renumbered", "Keyformer (New Pos)"),
            named("keyformer:fraction=0.6", "Keyformer (Org Pos)"),
            named("keyformer:fraction=0.6,shared=true", "Keyformer (Shared)"),
        ]
    )


def _window(lab: Lab) -> Finding:
    return ordered(_at_60(lab), ("Keyformer (Org Pos)", "Window"), ("H2O", "Window"))


def _streaming(lab: Lab) -> Finding:
    return ordered(_at_60(lab), ("Keyformer (Org Pos)", "StreamingLLM"), ("Window", "StreamingLLM"))


def _positions(lab: Lab) -> Finding:
    return ordered(_at_60(lab), ("Keyformer (Org Pos)", "Keyformer (New Pos)"))


def _shared(lab: Lab) -> Finding:
    return ordered(_at_60(lab), ("Keyformer (Org Pos)", "Keyformer (Shared)"))


def _sweep(lab: Lab) -> dict[str, Quality]:
    recipes = []
    for budget in BUDGETS:
        recipes.append(named(f"h2o:fraction={budget},recent=0.3", f"H2O {budget:.0%}"))
        recipes.append(named(f"keyformer:fraction={budget}", f"Keyformer {budget:.0%}"))
    return lab.quality(recipes)


def _beats_h2o(lab: Lab) -> Finding:
    pairs = ((f"Keyformer {b:.0%}", f"H2O {b:.0%}") for b in BUDGETS)
    return ordered(_sweep(lab), *pairs)


def _iso_accuracy(lab: Lab) -> Finding:
    found = _sweep(lab)
    keeps = kept(found, {"Keyformer 70%": AS_GOOD})
    ratio = found["H2O 90%"].ratio
    return all_hold(
        keeps,
        Finding(keeps.ours, ratio > AS_GOOD, f"H2O 90%: {ratio:.4f} (must be above {AS_GOOD})"),
    )


def _noise(lab: Lab) -> Finding:
    found = lab.quality([named(f"keyformer:fraction=0.6,noise={x}", x) for x in NOISES])
    return all_hold(
        ordered(found, *(("gumbel", x) for x in NOISES[1:])),
        ordered(found, ("none", "gaussian"), ("gaussian", "constant")),
    )


def _recent(lab: Lab) -> Finding:
    recipes = [named(f"keyformer:fraction=0.5,recent={r}", f"recent {r:.0%}") for r in RECENT]
    found = lab.quality(recipes)
    inside = {"recent 20%", "recent 30%"}
    kl = {recipe.name: float(found[recipe.name].kl.mean()) for recipe in recipes}
    best = min(kl, key=lambda name: kl[name])
    ends = [name for name in kl if name not in inside]
    intervals = {name: difference(found[best].kl, found[name].kl) for name in ends if name != best}
    evidence = f"best: {best}; its KL minus " + "; ".join(f"{n}: {x}" for n, x in intervals.items())
    holds = best in inside and all(x.high < 0 for x in intervals.values())
    return Finding(quality_figures(found), holds, evidence)


def _key_tokens(lab: Lab) -> Finding:
    layers = lab.attention_layers()
    most = float(np.mean([layer.most for layer in layers]))
    rows = {f"layer {x.number}": (x.most,) for x in layers} | {"mean": (most,)}
    return Finding(
        ClaimTable(("tokens with 90% of the attention",), rows),
        most <= 0.4,
        f"mean over layers: {most:.0%} of the tokens",
    )


CLAIMS = (
    Claim(
        "key tokens",
        "40% of the tokens receive 90% of the attention.",
        "Figure 3b",
        "the mean over layers at most 40% (attention summed over the prompt's queries)",
        _key_tokens,
        "the attention of the reference model is spread more evenly than that of larger models: it "
        "has hardly a sink (0.7% of the attention on the first token; SmolLM2-135M: 21%)",
        paper=ClaimTable(("tokens with 90% of the attention",), {"caption": (0.40,)}),
    ),
    Claim(
        "window",
        "Keeping recent tokens alone loses much accuracy against Keyformer and H2O.",
        "Figure 7 and Table 3 (MPT-7B, 60% of the cache)",
        "Keyformer and H2O better than the window",
        _window,
        paper=TABLE3.only("Full", "Window", "H2O", "Keyformer (Org Pos)"),
    ),
    Claim(
        "Keyformer or H2O",
        "Keyformer is more accurate than H2O at every budget.",
        "Figure 7 (a plot) and Table 3 (MPT-7B, 60% of the cache)",
        "Keyformer better at each of 20, 50, 70 and 90% of the prompt; both keep 30% of it recent",
        _beats_h2o,
        "with the same share of recent tokens the two differ within chance at every budget: noise "
        "and temperature hardly change which tokens stay on this model (see the claim on noise)",
        paper=TABLE3.only("Full", "H2O", "Keyformer (Org Pos)"),
    ),
    Claim(
        "99% accuracy",
        "Keyformer reaches 99% of the full accuracy with 70% of the cache; H2O does not with 90%.",
        "Figure 7 (a plot without numbers)",
        "perplexity of Keyformer at 70% at most 1% above full, of H2O at 90% more than 1% above",
        _iso_accuracy,
        "Keyformer at 70% does keep it, but so does H2O at 90%: the next tokens of a text need few "
        "of the distant tokens, as the small loss of a window of 60% shows. A summary needs more",
    ),
    Claim(
        "positions",
        "Original positions are more accurate than positions renumbered after eviction.",
        "Table 3 (MPT-7B, 60% of the cache)",
        "original positions better",
        _positions,
        paper=TABLE3.only("Full", "Keyformer (New Pos)", "Keyformer (Org Pos)"),
    ),
    Claim(
        "shared score",
        "A score for each layer is more accurate than one score for all layers.",
        "Table 3 (MPT-7B, 60% of the cache)",
        "one score for each layer better",
        _shared,
        paper=TABLE3.only("Full", "Keyformer (Shared)", "Keyformer (Org Pos)"),
    ),
    Claim(
        "noise",
        "Gumbel noise is best, no adjustment second, Gaussian noise third, a constant last.",
        "Table 4 (ROUGE-2; the caption says 60% KV cache, the text 60% reduction)",
        "Gumbel better than each other, none better than Gaussian, Gaussian better than constant "
        "(60% of the prompt)",
        _noise,
        "a constant drops out of a softmax, so constant and none are the same here to the bit; the "
        "paper reports them far apart and equation 9 does not explain it. The other differences "
        "lie within chance on this model",
        paper=ClaimTable(
            ("Gumbel", "Gaussian", "Constant", "None"),
            {
                "GPT-J-6B": (19.44, 14.53, 12.49, 18.87),
                "Cerebras-GPT-6.7B": (15.25, 9.54, 8.98, 12.73),
                "MPT-7B": (17.57, 10.17, 7.56, 16.38),
            },
        ),
    ),
    Claim(
        "recent tokens",
        "Accuracy is best where 20 to 30% of the budget are recent tokens.",
        "section 4.4.4 and appendix A.4",
        "best share of 0, 10, 20, 30, 50, 70, 90% is 20 or 30%, and better than all outside "
        "(half of the prompt)",
        _recent,
        "from 20% on, all shares lie within chance of each other, and smaller ones are far worse: "
        "predicting the next tokens of a text needs recent tokens most",
    ),
    Claim(
        "StreamingLLM",
        "Attention sinks and recent tokens are far worse than Keyformer, and than a window.",
        "Table 3 (MPT-7B, 60% of the cache)",
        "Keyformer and the window better than StreamingLLM with renumbered positions",
        _streaming,
        "predicting the next tokens of a text needs recent tokens most. StreamingLLM keeps 60% of "
        "the prompt as recent tokens and Keyformer 18%; the first four tokens bring it far above "
        "the window here, with original positions too",
        paper=TABLE3.only("Full", "Window", "StreamingLLM", "Keyformer (Org Pos)"),
    ),
    Claim(
        "ROUGE",
        "Keyformer at 70% keeps ROUGE of summaries, at 50% also after 8k tokens.",
        "Figures 7 and 8",
        why_not_testable="summaries need CNN/DailyMail or GovReport and a model that can write "
        "them; with both: kvloom eval summarize --data FILE --model MODEL --recipes h2o,keyformer "
        "--out DIR",
    ),
    Claim(
        "few-shot",
        "Keyformer keeps few-shot accuracy at half of the cache better than H2O.",
        "Table 2 (MPT-7B, 0 shots)",
        why_not_testable="these tasks need a model that can solve them; with one: python -m "
        "kvloom_lab.eval.lm_eval --model kvloom --model_args pretrained=MODEL,recipe=keyformer "
        "--tasks copa,openbookqa,winogrande,piqa",
        paper=ClaimTable(
            ("COPA", "OpenBookQA", "Winogrande", "PIQA"),
            {
                "Full": (80.0, 41.8, 68.7, 79.9),
                "H2O": (75.0, 37.6, 63.2, 79.4),
                "Keyformer": (76.0, 40.6, 64.1, 79.2),
            },
        ),
    ),
    Claim(
        "throughput",
        "Keyformer at 50% generates 2.4 times as many tokens per second as full attention.",
        "Table 1 (MPT-7B on an A100 of 80 GB)",
        why_not_testable="this needs that GPU and model; kvloom bench generate --recipes "
        "full,h2o,keyformer measures the speed of this machine",
        paper=ClaimTable(
            ("Full Attention", "H2O 90%", "Keyformer 50%"),
            {
                "1024 + 1024": (24.9, 27.8, 32.0),
                "2048 + 2048": (15.0, 20.5, 24.3),
                "4096 + 4096 (BS=1)": (8.3, 14.1, 17.0),
                "4096 + 4096 (BS=2)": ("OOM", "OOM", 19.85),
            },
        ),
    ),
)
