"""`kvloom inspect`: run a recipe on a text, and record every layer and head as plain data.

    from kvloom_lab.inspect import trace_recipe
    from kvloom_lab.show.pages import inspect_page
    Path("page.html").write_text(inspect_page(trace_recipe(model, tokenizer, "h2o", "some text")))

Step 0 is after the prompt, step s is after the s-th generated token was read. An evicted or packed
token stays so; hence one number for each token, the step of the change, describes all steps. The
tokens that a step of recall reads change from step to step, so they are a list by step, as runs of
consecutive tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvloom import Cache, __version__
from kvloom.cache import LayerCache, LayerContents, layer_contents
from kvloom.errors import InputError
from kvloom.hf import ObservedStep, attachment_restored, observe_steps, read_tokens
from kvloom.keep import PROTECTED
from kvloom.progress import Progress
from kvloom.recipe import Recipe, resolve
from kvloom.store import Format, Packed

from .eval.decoding import stop_ids
from .models import check_positions
from .workload.text import leading_ids, tokenize


def prompt_ids(
    model: PreTrainedModel | PreTrainedConfig,
    tokenizer: Any,
    text: str,
    context: int | None,
    new_tokens: int,
) -> tuple[list[int], int]:
    """Return the prompt's ids, and how many ids the whole text has.

    model: the model or its config. context: use only the first `context` ids; None for all. Raises
    `InputError` for a text that is empty or too long.
    """
    if not text.strip():
        raise InputError("the text is empty; give some text to inspect")
    if new_tokens < 0 or (context is not None and context < 1):
        raise InputError(
            f"context={context} must be 1 or more and new_tokens={new_tokens} 0 or more"
        )
    whole = [*leading_ids(tokenizer), *tokenize(tokenizer, text).tolist()]
    ids = whole[:context]
    check_positions(model, len(ids), new_tokens)
    return ids, len(whole)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds.

    Of several tokens that form one character, only the last adds text.
    """

    def decode(lo: int, hi: int) -> str:
        return tokenizer.decode(list(ids[lo:hi]), clean_up_tokenization_spaces=False)

    texts: list[str] = []
    # Decoding starts one token earlier, because the first token may lose its leading space.
    begin = finished = 0
    for i in range(len(ids)):
        whole = decode(begin, i + 1)
        if whole.endswith("\ufffd") and i - finished < 3:  # a character has at most four bytes
            texts.append("")
            continue
        texts.append(whole[len(decode(begin, finished)) :])
        begin, finished = i, i + 1
    return texts


NEVER = -1


class LayerTrace:
    """The record of one layer: int64 gone and packed [Hk, N], fp32 scores [Hk, N]."""

    def __init__(self, layer_index: int, layer: LayerCache, heads: int, tokens: int) -> None:
        """Allocate the record for the tokens of the whole run."""
        self.layer_index, self.layer = layer_index, layer
        self.gone = torch.full((heads, tokens), NEVER)
        packs = () if layer.recipe.store.exact else ("keys", "values")
        self.packed = {side: self.gone.clone() for side in packs}
        self.first_scores = torch.full((heads, tokens), math.nan)
        self.last_scores = self.first_scores.clone()
        self.held: list[int] = []  # by step, tokens in the cache of a head, on average
        self.mass: list[Tensor] = []  # by step, [Hk]
        self.step_mass = torch.empty(0)  # exact attention mass of the current step, [Hk, N]
        self.contents: LayerContents | None = None
        # With recall: what each step read, and each token's place in the index.
        self.index = None if layer.recipe.recall is None else layer.recipe.recall.index.kind
        self.read: list[Tensor] = []  # by step, bool [Hk, seen]
        self.read_mass: list[Tensor] = []  # by step, [Hk]
        self.indexed, self.parts = self.gone.clone(), self.gone.clone()

    def before_attention(self, step: ObservedStep) -> None:
        """Compute the exact attention mass of a step."""
        heads, n = step.keys.shape[1:3]
        self.step_mass = step.mass()[0].view(heads, -1, n).sum(dim=1).cpu()

    def after_step(self, step: int) -> None:
        """Record the content of the cache after a step."""
        contents, before = layer_contents(self.layer), self.contents
        kept, seen = contents.kept, self.layer.seen
        gone = self.gone[:, :seen]
        assert not (kept & (gone != NEVER)).any(), "an evicted token is in the cache again"
        gone[~kept & (gone == NEVER)] = step
        self.held.append(round(kept.sum().item() / len(kept)))
        self.mass.append(self._share(kept))
        for side, packed in self.packed.items():
            packed[:, :seen][contents.packed[side] & (packed[:, :seen] == NEVER)] = step
        if self.index is not None:
            self._record_recall(step, contents, before)
        if contents.scores is not None and (
            before is None or contents.scores is not before.scores
        ):  # an eviction in this step
            index, scores = (x[0].cpu() for x in contents.scores)
            self.last_scores.scatter_(1, index, scores)
            if step == 0:
                self.first_scores.scatter_(1, index, scores)
        self.contents = contents

    def _record_recall(
        self, step: int, contents: LayerContents, before: LayerContents | None
    ) -> None:
        """Record what a step read: all tokens but those that it could leave out and did."""
        read = contents.kept.clone()
        if contents.recalled is not None:
            if before is not None:
                tokens = before.selectable.shape[1]
                read[:, :tokens] &= ~before.selectable
            read |= contents.recalled
        self.read.append(read)
        self.read_mass.append(self._share(read))
        indexed = self.indexed[:, : self.layer.seen]
        indexed[contents.indexed & (indexed == NEVER)] = step
        parts = self.parts[:, : self.layer.seen]
        parts[contents.indexed] = contents.parts[contents.indexed]

    def _share(self, tokens: Tensor) -> Tensor:
        """Return the share of the step's attention mass on tokens, bool [Hk, N]; fp32 [Hk]."""
        return (self.step_mass * tokens).sum(dim=1) / self.step_mass.sum(dim=1)

    def plain(self, tokens: int) -> dict[str, Any]:
        """Return the record of the first `tokens` tokens as plain data; see `trace_recipe`."""
        contents = self.contents
        assert contents is not None
        return {
            "number": self.layer_index,
            "budget": contents.budget_tokens,
            "index": self.index,
            "held": self.held,
            "heads": [
                {
                    "gone": self.gone[h, :tokens].tolist(),
                    "mass": [round(m[h].item(), 6) for m in self.mass],
                    "scores": {
                        "first": _plain_scores(self.first_scores[h, :tokens]),
                        "last": _plain_scores(self.last_scores[h, :tokens]),
                    }
                    if contents.by_score
                    else None,
                    "packed": {side: x[h, :tokens].tolist() for side, x in self.packed.items()}
                    or None,
                    **self._plain_recall(h, tokens),
                }
                for h in range(len(self.gone))
            ],
        }

    def _plain_recall(self, head: int, tokens: int) -> dict[str, Any]:
        """Return what recall read for a head; None for one that reads its whole cache."""
        if self.index is None:
            return dict.fromkeys(("read", "read_mass", "indexed", "parts"))
        return {
            "read": [runs(read[head]) for read in self.read],
            "read_mass": [round(mass[head].item(), 6) for mass in self.read_mass],
            "indexed": self.indexed[head, :tokens].tolist(),
            "parts": None if self.index == "topk" else self.parts[head, :tokens].tolist(),
        }


def runs(marks: Tensor) -> list[int]:
    """Return the runs of True in bool marks [N]: [first, length, first, length, ...]."""
    padded = torch.cat([marks.new_zeros(1), marks, marks.new_zeros(1)]).int()
    begins, ends = ((padded.diff() == sign).nonzero().flatten() for sign in (1, -1))
    return torch.stack([begins, ends - begins], dim=1).flatten().tolist()


def _plain_scores(scores: Tensor) -> list[float | str | None]:
    def plain(x: float) -> float | str | None:
        return None if math.isnan(x) else "inf" if x >= PROTECTED else float(f"{x:.4g}")

    return [plain(x) for x in scores.tolist()]


def trace_recipe(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Recipe | str,
    text: str,
    *,
    context: int | None = None,
    new_tokens: int = 32,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Prefill a text with a recipe's cache, generate greedily, return the record as plain data.

    The model is left as it was.

    Args:
        model: The model, loaded.
        tokenizer: The model's.
        recipe: A recipe or its name.
        text: The prompt.
        context: Prefill only this many tokens.
        new_tokens: How many tokens to generate.
        progress: Called with a total of `new_tokens` + 1 units.

    Returns:
        Tokens (texts), prompt_tokens, text_tokens (before it was cut), steps (new_tokens, or fewer
        if the model ends its text), formats of keys and values, views (the useful ones among
        "read", "kept" and "format"), stock_layers (numbers of the layers that kvloom does not
        compress), and layers: number, budget (tokens; None: nothing is evicted), held (tokens in
        the cache of a head, by step, the mean of heads) and heads. A head has

        - gone: by token, the step after which it is evicted, -1: never
        - mass: by step, the share of the exact attention of the step's queries to all tokens so far
          that is on tokens in the cache after the step
        - scores: first and last by token, None: no score, "inf": protected (None: the recipe does
          not score)
        - packed: keys and values by token, the step after which they are packed, -1: never (None:
          the recipe packs nothing)

        A layer with recall has an index, "clusters", "pages", "partial-keys" or "topk" (None: it
        reads its whole cache); its heads have (else None)

        - read: by step, the tokens that the step read, its own included, as runs: first, length,
          first, length, ...; the union of query heads that select separately
        - read_mass: by step, the share of the exact attention on these
        - indexed: by token, the step after which it is in the index, -1: never
        - parts: by token, the number of its cluster or page in the end, -1: none (None: "topk")

    Raises:
        InputError: The text is empty or too long.
        UnsupportedModel: As `Cache` does.
        IncompatibleRecipe: As `Cache` does.
    """
    resolved = resolve(recipe)
    ids, text_tokens = prompt_ids(model, tokenizer, text, context, new_tokens)
    with attachment_restored(model), torch.inference_mode():
        cache = Cache(model, resolved)
        read, layers = _run(model, cache, ids, new_tokens, progress or (lambda what, units: None))
    g = cache.geometry
    store = resolved.for_model(g).store
    return {
        "kvloom": __version__,
        "recipe": resolved.name,
        "toml": resolved.to_toml(),
        "tokens": token_texts(tokenizer, read),
        "prompt_tokens": len(ids),
        "text_tokens": text_tokens,
        "steps": len(read) - len(ids),
        "formats": {
            "keys": _format_text(store.keys, g.dtype, g.dims[0]),
            "values": _format_text(store.values, g.dtype, g.dims[1]),
        },
        "views": _views(resolved),
        "stock_layers": sorted({*range(len(cache.layers))} - {*cache.geometry.layer_indices}),
        "layers": [layer.plain(len(read)) for layer in layers],
    }


def _run(
    model: PreTrainedModel, cache: Cache, ids: list[int], new_tokens: int, on_step: Progress
) -> tuple[list[int], list[LayerTrace]]:
    """Prefill ids and generate; return all ids that were read, and the record of each layer."""
    layer_indices = cache.geometry.layer_indices
    size = cache.geometry.kv_heads, len(ids) + new_tokens
    layers = [
        LayerTrace(i, r.cache, *size) for i, r in zip(layer_indices, cache.full_layers, strict=True)
    ]
    observe_steps(cache, lambda observed: layers[observed.layer].before_attention(observed))
    ends = stop_ids(model)
    read, new = list(ids), list(ids)
    for step in range(new_tokens + 1):
        on_step("reading the prompt" if step == 0 else "generating", 0)
        logits = read_tokens(model, torch.tensor([new], device=model.device), cache)
        for layer in layers:
            layer.after_step(step)
        on_step("generating", 1)
        new = logits.argmax(-1).tolist()
        if step == new_tokens or new[0] in ends:
            break
        read += new
    return read, layers


def _views(recipe: Recipe) -> list[str]:
    """Return the views of the page that show something for this recipe."""
    views = ["read"] if recipe.recall is not None else []
    if recipe.keep is not None or (recipe.store.exact and not views):
        views.append("kept")
    return views if recipe.store.exact else [*views, "format"]


def _format_text(fmt: Format | None, dtype: torch.dtype, head_dim: int) -> str:
    if fmt is None:
        return f"exact, {str(dtype).removeprefix('torch.')}"
    bits = fmt.bits_per_value(head_dim)
    if not isinstance(fmt, Packed):
        return f"{fmt.kind} ({bits:g} bits per value)"
    group = fmt.group or head_dim
    return f"{fmt.bits} bit per {fmt.axis}, groups of {group} ({bits:g} bits per value)"
