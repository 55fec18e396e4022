"""Run a recipe on a text and note, step by step, which tokens every layer and head holds.

Decides what is noted; how it looks is decided by the page. Step 0 is after the prompt, step s after
the s-th generated token was read. A token that is dropped or packed stays so, hence one number a
token says it for all steps; what comes and goes from step to step belongs in lists by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .. import __version__
from ..cache.layer import LayerCache
from ..cache.score_evictor import ScoreEvictor
from ..cache.segment import Segment
from ..errors import InputError
from ..hf import attach, compat
from ..hf.cache import Cache
from ..hf.observe import Observation, observe
from ..hf.routed import RoutedLayer
from ..kernels import ops
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from ..store import Format, Packed
from ..workload.models import check_room
from ..workload.step import step
from ..workload.text import opening, tokenize
from .reading import NOT_READ, Reading

NEVER = -1

Progress = Callable[[str, int], None]
"""Called with what is being done and how many of the `new_tokens` + 1 units were done since."""


def follow(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe | str,
    text: str,
    *,
    context: int | None = None,
    new_tokens: int = 32,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read a text with a recipe's cache, generate greedily, return plain data of what was held.

    context: read the first so many tokens only. The model is left as it was. Raises `InputError`
    for a text that is empty or too long, and what `Cache` and `watch` raise.

    Returns tokens (texts), prompt_tokens, text_tokens (before it was cut), steps (new_tokens, or
    fewer if the model ends its text), formats of keys and values, views that are worth showing,
    stock_layers (numbers of layers that kvloom does not hold), and layers: number, budget (tokens,
    None: nothing is dropped), held (tokens a head holds, by step) and heads. A head has

    - gone: by token, the step after which it is not held any more, -1: never
    - mass: by step, of the exact attention of the step's queries to all tokens so far, the share
      on tokens held after the step
    - scores: first and last by token, None: it was not scored, "inf": protected (None: no scores)
    - packed: keys and values by token, the step after which they are packed, -1: never (None: the
      recipe packs nothing)

    A layer has an index too, "clusters", "pages" or "topk" (None: it reads all it holds); then a
    head has (else None)

    - read: by step, of the tokens held those that the step read, its own among them: first, how
      many, first, how many, ...; of query heads that choose alone, what any of them read
    - read_mass: by step, the share of the exact attention on these
    - indexed: by token, the step after which it is in the index, -1: never
    - parts: by token, the number of its cluster or page in the end, -1: none (None: "topk")
    """
    chosen, tell = resolve(recipe), progress or (lambda what, units: None)
    routed_before = getattr(model, "_kvloom", None) is not None
    ids, text_tokens = read_ids(model, tokenizer, text, context, new_tokens)
    cache = Cache(model, chosen)
    try:
        with torch.inference_mode():
            read, notes = _run(model, cache, ids, new_tokens, tell)
    finally:
        if not routed_before:
            attach.detach(model)
    store = chosen.store
    return {
        "kvloom": __version__,
        "recipe": chosen.name,
        "toml": chosen.to_toml(),
        "tokens": pieces(tokenizer, read),
        "prompt_tokens": len(ids),
        "text_tokens": text_tokens,
        "steps": len(read) - len(ids),
        "formats": {"keys": _said(store.keys, model), "values": _said(store.values, model)},
        "views": _views(chosen),
        "stock_layers": [i for i, x in enumerate(cache.layers) if not isinstance(x, RoutedLayer)],
        "layers": [note.plain(len(read)) for note in notes],
    }


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; all but the last token of a character add nothing."""

    def decode(lo: int, hi: int) -> str:
        return tokenizer.decode(list(ids[lo:hi]), clean_up_tokenization_spaces=False)

    texts: list[str] = []
    begin = told = 0  # decoded from `begin`, for the space a token may lose when it comes first
    for i in range(len(ids)):
        whole = decode(begin, i + 1)
        if whole.endswith("\ufffd") and i - told < 3:  # a character has four bytes at most
            texts.append("")
            continue
        texts.append(whole[len(decode(begin, told)) :])
        begin, told = i, i + 1
    return texts


class _Note:
    """What is known of one layer: int64 gone and packed [Hk, N], fp32 scores [Hk, N]."""

    def __init__(self, number: int, layer: LayerCache, heads: int, tokens: int) -> None:
        """Make room for the tokens of the whole run."""
        self.number, self.layer = number, layer
        self.gone = torch.full((heads, tokens), NEVER)
        packs = () if layer.recipe.store.exact else ("keys", "values")
        self.packed = {side: self.gone.clone() for side in packs}
        self.first = torch.full((heads, tokens), math.nan)
        self.last = self.first.clone()
        self.held: list[int] = []
        self.mass: list[Tensor] = []  # by step, [Hk]
        self.fresh = torch.empty(0)  # exact attention of the running step, [Hk, N]
        self.choice: Any = None
        self.recall = Reading(layer, heads, tokens) if layer.retriever is not None else None

    def look(self, look: Observation) -> None:
        """Take in the exact attention of a step."""
        mass = ops.column_mass(look.q, look.keys, look.scale, softcap=look.softcap, bias=look.bias)[
            0
        ]
        heads, n = look.keys.shape[1], look.keys.shape[2]
        self.fresh = mass.view(heads, -1, n).sum(dim=1).cpu()

    def after(self, step: int) -> None:
        """Take in what the cache holds after a step."""
        seen, index = self.layer.seen, self.layer.logical()[0].cpu()
        held = torch.zeros(len(index), seen, dtype=torch.bool).scatter_(1, index, True)
        gone = self.gone[:, :seen]
        assert not (held & (gone != NEVER)).any(), "a dropped token came back"
        gone[~held & (gone == NEVER)] = step
        self.held.append(index.shape[1])
        self.mass.append((self.fresh * held).sum(dim=1) / self.fresh.sum(dim=1))
        tokens, sinks = self.layer.tokens, self.layer.sinks
        begin = 0 if sinks is None else sinks.count
        if self.recall is not None:
            self.recall.after(step, held, index[:, begin:], self.fresh)
        if isinstance(tokens, Segment):
            for name, side in (("keys", tokens.keys), ("values", tokens.values)):
                if name not in self.packed:
                    continue
                packed = self.packed[name][:, :seen]
                inside = torch.zeros_like(held)
                far = 0 if side.packed is None else tokens.offloaded
                inside.scatter_(1, index[:, begin : begin + far + side.packed_count], True)
                packed[inside & (packed == NEVER)] = step
        choice = self.layer.trace.scored if self.layer.trace is not None else None
        if choice is not None and choice is not self.choice:
            self.choice = choice
            where, scores = (x[0].cpu() for x in choice)
            self.last.scatter_(1, where, scores)
            if step == 0:
                self.first.scatter_(1, where, scores)

    def plain(self, tokens: int) -> dict[str, Any]:
        """Return the notes on the first `tokens` tokens as plain data."""
        evictor = self.layer.evictor
        scored = isinstance(evictor, ScoreEvictor)
        budget = None
        if evictor is not None:
            budget = evictor.room if isinstance(evictor, ScoreEvictor) else evictor.budget
        return {
            "number": self.number,
            "budget": budget,
            "index": None if self.recall is None else self.recall.kind,
            "held": self.held,
            "heads": [
                {
                    "gone": self.gone[h, :tokens].tolist(),
                    "mass": [round(m[h].item(), 6) for m in self.mass],
                    "scores": {
                        "first": _scores(self.first[h, :tokens]),
                        "last": _scores(self.last[h, :tokens]),
                    }
                    if scored
                    else None,
                    "packed": {side: x[h, :tokens].tolist() for side, x in self.packed.items()}
                    or None,
                    **(NOT_READ if self.recall is None else self.recall.plain(h, tokens)),
                }
                for h in range(len(self.gone))
            ],
        }


def _run(
    model: PreTrainedModel, cache: Cache, ids: list[int], new_tokens: int, tell: Progress
) -> tuple[list[int], list[_Note]]:
    """Read ids and generate; return all ids that were read, and the notes of the layers."""
    numbers = [i for i, layer in enumerate(cache.layers) if isinstance(layer, RoutedLayer)]
    size = cache.geometry.kv_heads, len(ids) + new_tokens
    notes = [_Note(i, r.cache, *size) for i, r in zip(numbers, cache.routed, strict=True)]
    observe(cache, lambda look: notes[look.place].look(look))
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    read, fresh = list(ids), list(ids)
    for s in range(new_tokens + 1):
        tell("reading the prompt" if s == 0 else "generating", 0)
        logits = step(model, torch.tensor([fresh], device=model.device), cache)
        for note in notes:
            note.after(s)
        tell("generating", 1)
        fresh = logits.argmax(-1).tolist()
        if s == new_tokens or fresh[0] in ends:
            break
        read += fresh
    return read, notes


def read_ids(
    model: PreTrainedModel | PreTrainedConfig,
    tokenizer: Any,
    text: str,
    context: int | None,
    new_tokens: int,
) -> tuple[list[int], int]:
    """Return the ids that `follow` reads of a text, and how many ids the whole text has.

    model: the model or its config. Raises `InputError` for a text that is empty or too long.
    """
    if not text.strip():
        raise InputError("the text is empty; give some text to look at")
    if new_tokens < 0 or (context is not None and context < 1):
        raise InputError(
            f"context={context} must be 1 or more and new_tokens={new_tokens} 0 or more"
        )
    whole = [*opening(tokenizer), *tokenize(tokenizer, text).tolist()]
    ids = whole[:context]
    check_room(model, len(ids), new_tokens)
    return ids, len(whole)


def _views(recipe: Recipe) -> list[str]:
    """What there is to see: which tokens are read, which are kept, and in what format."""
    views = ["read"] if recipe.recall is not None else []
    if recipe.keep is not None or (recipe.store.exact and not views):
        views.append("kept")
    return views if recipe.store.exact else [*views, "format"]


def _scores(scores: Tensor) -> list[float | str | None]:
    def plain(x: float) -> float | str | None:
        return None if math.isnan(x) else "inf" if x == math.inf else float(f"{x:.4g}")

    return [plain(x) for x in scores.tolist()]


def _said(fmt: Format | None, model: PreTrainedModel) -> str:
    if fmt is None:
        return f"exact, {str(model.dtype).removeprefix('torch.')}"
    head_dim = compat.geometry(model).head_dim
    bits = fmt.bits_a_value(head_dim)
    if not isinstance(fmt, Packed):
        return f"{fmt.kind} ({bits:g} bits a value)"
    group = fmt.group or head_dim
    return f"{fmt.bits} bit per {fmt.axis}, groups of {group} ({bits:g} bits a value)"
