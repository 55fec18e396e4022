"""Every pair and triple of keep × store × recall, against attention in float64.

The reference model reads a prompt, decodes, takes in a few tokens at once and decodes again, under
every combination that recipes allow: all registered scores, the formats of all named recipes and
those registered besides, all registered indexes. In every layer and step, the output is compared
with attention in float64 over the tokens that the cache holds and reads (tools/held.py), and the
bytes after the prompt with the predicted ones. Variants of a part are tried in pairs only.

    python benchmarks/combinations.py                 # all of them
    python benchmarks/combinations.py --only minikv   # those whose name contains a word
    python benchmarks/combinations.py --every 10      # every tenth
    python benchmarks/combinations.py --padded        # two rows, the second padded; not renumbered
    KVLOOM_KERNELS=ref python benchmarks/combinations.py    # by the reference

Prints a table by store, and every failure. Writes results/<machine>/combinations.json. Exits with
status 1 if a combination fails.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("KVLOOM_KERNELS", "auto")
sys.path.append(str(Path(__file__).parents[1] / "tools"))

import torch

import kvloom
import kvloom_lab
import record
from held import check
from kvloom.errors import IncompatibleRecipe, RecipeError
from kvloom.hf import geometry, layer_ropes
from kvloom.keep import SCORERS, Budget, Keep
from kvloom.kernels import dispatch
from kvloom.recall import INDEXES, Clusters, Recall, Tier
from kvloom.recipe import RECIPES, Protect, Recipe, resolve
from kvloom.store import FORMATS, Store
from kvloom_lab.workload.text import library_text

PROMPT = 376  # 120 tokens after the second block of 128: decoding fills the third
STEPS = (*[1] * 9, 5, 1, 70, 1)
BUDGET = 248  # of a keep: as long a way into a block
ATTENTION = 2.0**-22  # four rounding errors of fp32, over the size that `held.Findings` names
STORED = 1e-6
MORE_STORES = "kivi:bits=3", "kivi:rotate=true", "rtn:bits=8", "rtn:bits=1.5"
SIMILAR = {*MORE_STORES, "kivi-4", "balanced", "small", "tiny", "store", "skvq-k2v1.5"}
"""Stores that differ from another one in bits, or combine two others: tried in pairs only."""


@dataclass(frozen=True)
class Option:
    """One value of an axis: a part of a recipe and the protected tokens that it brings along.

    pairs: whether it is tried in pairs only.
    """

    name: str
    part: Any = None
    sinks: int = 0
    recent: int | tuple[int, int] = 0
    pairs: bool = False


def keeps() -> list[Option]:
    """Return no keep, every score at every time it allows, and variants of a budget."""
    options = [Option("-")]
    prompt = Budget(tokens=BUDGET, recent=32)
    for kind, scorer in SCORERS.items():
        for when, limit in (("prompt", None), ("step", None), ("limit", PROMPT + 10)):
            try:
                keep = Keep(prompt, scorer(), when=when, limit=limit)
            except (RecipeError, TypeError):
                continue
            alone = when != "prompt" or keep.by_age
            options.append(Option(f"{kind} {when}", keep, 4, pairs=alone))
    mass = SCORERS["mass"]()
    recent = SCORERS["recent"]()
    for name, keep in {
        "no sinks": Keep(prompt, mass, when="prompt"),
        "pyramid": Keep(replace(prompt, layers="pyramid"), mass, when="prompt"),
        "variance": Keep(replace(prompt, layers="variance"), mass, when="prompt"),
        "heads": Keep(replace(prompt, head_share=0.2), mass, when="prompt"),
        "heads, joint": Keep(replace(prompt, head_share=0.2, layers="joint"), mass, when="prompt"),
        "shared": Keep(prompt, mass, when="prompt", shared=True),
        "shared step": Keep(prompt, mass, shared=True),
        "renumbered": Keep(prompt, mass, when="prompt", positions="renumbered"),
        "renumbered step": Keep(prompt, mass, positions="renumbered"),
        "renumbered window": Keep(Budget(BUDGET), recent, positions="renumbered"),
    }.items():
        options.append(Option(name, keep, 0 if name == "no sinks" else 4, pairs=True))
    return options


def stores() -> list[Option]:
    """Return the exact store, those of all named recipes, and every other registered format."""
    options = [Option("exact", Store())]
    named = {name: resolve(name) for name in (*RECIPES, *MORE_STORES)}
    # a store gets the name of a recipe that is that store alone, where there is one
    for name in sorted(named, key=lambda name: named[name].budgeted):
        recipe = named[name]
        protect = recipe.protect
        known = any(
            (recipe.store, protect.exact_recents) == (o.part, _pair(o.recent)) for o in options
        )
        if recipe.store.exact or known:
            continue
        similar = name in SIMILAR
        options.append(Option(name, recipe.store, protect.sinks, protect.exact_recent, similar))
    for kind, fmt in FORMATS.items():
        if kind != "packed":
            options.append(Option(kind, Store(fmt(), fmt()), recent=32))
    kivi = resolve("kivi").store
    for side in ("keys", "values"):
        recent = (0, 128) if side == "values" else 0
        option = Option(f"{side} only", Store(**{side: getattr(kivi, side)}), 3, recent, True)
        options.append(option)
    return options


def recalls() -> list[Option]:
    """Return no recall, every index, the ways in which heads choose, and tiers."""
    found = [Option("-")]
    for kind, index in INDEXES.items():
        one = Clusters(8, block=32, block_clusters=4) if index is Clusters else index()
        group = "turns" if index is Clusters else "mean"
        found.append(Option(kind, Recall(one, 48, group, full_layers=0), 4))
        alone = Recall(one, 48, "each", full_layers=0)
        found.append(Option(f"{kind} each", alone, 0, 9, pairs=True))
        if not one.reads_keys:
            tier = Recall(one, 48, group, full_layers=0, tier=Tier("host"))
            found.append(Option(f"{kind} host", tier, 4, pairs=True))
    return found


def combinations() -> Iterator[tuple[str, Recipe | str]]:
    """Yield every name with its recipe, or with the reason why recipes refuse it."""
    for keep, store, recall in itertools.product(keeps(), stores(), recalls()):
        parts = [keep.part is not None, not store.part.exact, recall.part is not None]
        if sum(parts) == 3 and (keep.pairs or store.pairs or recall.pairs):
            continue
        yield _built(keep, store, recall)
    for store in stores():
        if not store.part.exact:
            protect = Protect(store.sinks, store.recent, kvloom.Outliers(20))
            yield f"outliers × {store.name}", Recipe(store=store.part, protect=protect)


def _built(keep: Option, store: Option, recall: Option) -> tuple[str, Recipe | str]:
    name = " × ".join((keep.name, store.name, recall.name))
    sides = [_pair(one.recent) for one in (keep, store, recall)]
    protect = Protect(
        max(one.sinks for one in (keep, store, recall)), tuple(map(max, zip(*sides, strict=True)))
    )
    try:
        wanted = recall.part
        if wanted is not None:  # the protected tokens, and a few more
            room = protect.tokens + (store.part.block_tokens if wanted.tier else 0)
            wanted = replace(wanted, tokens=wanted.tokens + room)
        return name, Recipe(keep.part, store.part, wanted, protect, name)
    except RecipeError as error:
        return name, str(error)


def _pair(recent: int | tuple[int, int]) -> tuple[int, int]:
    return recent if isinstance(recent, tuple) else (recent, recent)


def run(model: Any, ids: torch.Tensor, recipe: Recipe, padded: bool = False) -> dict[str, Any]:
    """Return the errors of one combination, and what is wrong with it."""
    mask = torch.ones_like(ids)
    if padded:
        ids, mask = ids.repeat(2, 1), mask.repeat(2, 1)
        mask[1, : PROMPT // 5] = 0
    cache, plain = kvloom.Cache(model, recipe), kvloom.Cache(model, recipe)
    checked = check(cache, layer_ropes(model)[0])
    at, wrong = 0, checked.wrong
    before = dispatch.ran.copy()
    with torch.no_grad():
        for t in (PROMPT, *STEPS):
            inputs = {"input_ids": ids[:, at : at + t], "attention_mask": mask[:, : at + t]}
            logits = model(**inputs, past_key_values=cache).logits
            if at <= PROMPT:  # what observation adds changes nothing
                other = model(**inputs, past_key_values=plain).logits
                off = (logits - other)[mask[:, at : at + t].bool()].abs().max()
                if off > 1e-4:
                    wrong.append(f"an observed step differs by {off:.1e}")
            if at == 0 and not padded:
                by_variance = recipe.keep is not None and recipe.keep.budget.layers == "variance"
                predicted = recipe.nbytes(PROMPT, geometry(model))
                if predicted != plain.nbytes and not by_variance:
                    wrong.append(f"{plain.nbytes} bytes, {predicted} predicted")
            at += t
    if checked.attention > ATTENTION:
        wrong.append(f"attention is off by {checked.attention:.1e}")
    if checked.stored > STORED:
        wrong.append(f"stored tokens are off by {checked.stored:.1e}")
    if recipe.recall is not None and not checked.recalls:
        wrong.append("no step recalled")
    new = dispatch.ran - before
    by_reference = sorted({f"{op}: {why}" for (op, backend, why) in new if backend == "ref"})
    return {"attention": checked.attention, "stored": checked.stored, "steps": checked.steps,
            "recalled": checked.recalls, "wrong": sorted(set(wrong)),
            "by_reference": by_reference}  # fmt: skip


def main() -> None:
    """Run all combinations."""
    args = record.options(__doc__, only="", padded=False, every=1)
    torch.set_num_threads(1)
    model = kvloom_lab.reference_model(torch.float32)
    tokenizer = kvloom_lab.reference_tokenizer()
    ids = tokenizer(library_text()[:20_000], return_tensors="pt").input_ids[
        :, : PROMPT + sum(STEPS)
    ]
    assert ids.shape[1] == PROMPT + sum(STEPS)
    results: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    wanted = [(n, r) for n, r in combinations() if args.only in n][:: args.every]
    if args.padded:  # tools/held.py does not count the positions of padded rows
        wanted = [(n, r) for n, r in wanted if "renumbered" not in n]
    began = time.time()
    for number, (name, recipe) in enumerate(wanted):
        if sys.stderr.isatty() or number % 50 == 0:
            print(f"{number}/{len(wanted)} {time.time() - began:.0f} s: {name}", file=sys.stderr)
        if isinstance(recipe, str):
            refused[name] = recipe
            continue
        try:
            results[name] = run(model, ids, recipe, args.padded)
        except IncompatibleRecipe as error:
            refused[name] = str(error)
        except Exception as error:  # a failure of one combination is a finding
            results[name] = {"wrong": [f"{type(error).__name__}: {error}"]}
        for line in results.get(name, {}).get("wrong", ()):
            print(f"FAILED {name}: {line}", flush=True)
    print(table(results))
    failed = [name for name, one in results.items() if one["wrong"]]
    slow: dict[str, int] = {}
    for one in results.values():
        for why in one.pop("by_reference", ()):
            slow[why] = slow.get(why, 0) + 1
    print(f"{len(results)} combinations ran, {len(failed)} failed, {len(refused)} are refused")
    if not args.only and args.every == 1:
        name = "combinations" + "_padded" * args.padded + "_ref" * (dispatch.setting() == "ref")
        record.write(name, {"environment": record.environment(), "prompt": PROMPT, "steps": STEPS,
                            "seconds": round(time.time() - began), "by_reference": slow,
                            "ran": results, "refused": _by_reason(refused)})  # fmt: skip
    sys.exit(bool(failed))


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return a row for each store: combinations, failures, the largest errors."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, one in found.items():
        rows.setdefault(name.split(" × ")[1], []).append(one)
    lines = [f"{'store':<24}{'ran':>6}{'failed':>8}{'attention':>11}{'stored':>9}  steps"]
    for store, ones in rows.items():
        attention, stored = (max(o.get(k, 0) for o in ones) for k in ("attention", "stored"))
        lines.append(
            f"{store:<24}{len(ones):>6}{sum(bool(o['wrong']) for o in ones):>8}"
            f"{attention:>11.1e}{stored:>9.1e}  {sum(o.get('steps', 0) for o in ones):,}"
        )
    return "\n".join(lines)


def _by_reason(refused: dict[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        reasons.setdefault(reason, []).append(name)
    return reasons


if __name__ == "__main__":
    main()
