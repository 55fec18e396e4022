"""Compare `full` with the plain model in every mode of generation, and a recipe's kernels with
their reference.

Random tokens; each mode runs once on the plain model and once with a kvloom cache. A recipe has no
plain counterpart, so its row compares the kernels that it uses with the reference in torch.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvloom import Cache
from kvloom.cache import LayerCache, holds_packed
from kvloom.errors import KvloomError
from kvloom.hf import (
    generate_sample,
    least_tolerance,
    logits_difference,
    rounding_tolerance,
    routed_trial,
    sample_batch,
)
from kvloom.kernels import operations_run, use_backend
from kvloom.recipe import Recipe

_PROMPT, _LONGEST = 384, 6144  # tokens of a recipe's prompt: doubled until all its parts act
EQUAL, DIFFERENT, REFUSED, PLAIN_FAILS = "equal", "different", "refused", "plain fails"
NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class ModeCheck:
    """What one mode gave.

    Attributes:
        mode: The mode.
        result: "equal", "different", "refused" (by kvloom), "plain fails" (without kvloom), or
            "not compared" (a recipe that does nothing with the longest prompt).
        difference: Of logits, relative to their spread; None if they were not compared.
        tokens: The share of generated tokens that are equal.
        seconds: Of wall time, both runs.
        note: The error, or the kernels that ran.
    """

    mode: str
    result: str
    difference: float | None
    tokens: float | None
    seconds: float
    note: str = ""


def check_modes(
    model: PreTrainedModel,
    recipe: Recipe | None = None,
    on_mode: Callable[[str, int, int], None] = lambda *_: None,
) -> Iterator[ModeCheck]:
    """Yield the check of every mode, and of the kernels of a recipe.

    Args:
        model: A model that kvloom does not refuse.
        recipe: Whose kernels to compare with the reference; None leaves that out.
        on_mode: Called with the mode's name, its number and the number of modes.
    """
    rows = len(MODES) + 1 + (recipe is not None)
    limit = _limit(model)
    for i, (name, run) in enumerate(MODES.items()):
        on_mode(name, i, rows)
        yield _compare(limit, name, partial(_plain, model, run), partial(_routed, model, run))
    on_mode("save and load", rows - 2, rows)
    yield _compare(
        limit, "save and load", partial(_routed, model, _second_turn),
        partial(_routed, model, _saved_turn),
    )  # fmt: skip
    if recipe is not None:
        on_mode("kernels", rows - 1, rows)
        yield _kernels(model, recipe, limit)


def _padded(model: PreTrainedModel, **options: Any) -> Any:
    return generate_sample(model, sample_batch(model), **options)


def _beams(model: PreTrainedModel) -> Any:
    """Logits of the first step: later ones are in the order of the beams."""
    out = _padded(model, num_beams=3)
    return SimpleNamespace(logits=out.logits[:1], sequences=out.sequences)


def _right_padded(model: PreTrainedModel) -> Any:
    """Logits of the real tokens of a direct call."""
    sample = sample_batch(model)
    sample["attention_mask"] = sample["attention_mask"].flip(1)
    with torch.no_grad():
        logits = model(**sample, use_cache=True).logits
    return SimpleNamespace(logits=[logits[sample["attention_mask"].bool()]], sequences=None)


def _sampled(model: PreTrainedModel) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _padded(model, do_sample=True, top_k=50)


def _embedded(model: PreTrainedModel) -> Any:
    sample = sample_batch(model)
    embeds = model.get_input_embeddings()(sample.pop("input_ids"))
    return generate_sample(model, {**sample, "inputs_embeds": embeds})


def _second_turn(model: PreTrainedModel, through: Callable[[Any], Any] = lambda x: x) -> Any:
    """A second prompt after a first answer; `through` changes the cache in between."""
    sample = {name: x[:1] for name, x in sample_batch(model).items()}
    first = generate_sample(model, sample)
    ids = torch.cat([first.sequences, sample["input_ids"][:, :5]], dim=1)
    turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return generate_sample(model, turn, past_key_values=through(first.past_key_values))


def _saved_turn(model: PreTrainedModel) -> Any:
    def saved(cache: Cache) -> Cache:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "cache.kv")
            cache.save(path)
            return Cache.load(model, path)

    return _second_turn(model, saved)


def _one_row(model: PreTrainedModel, **options: Any) -> Any:
    return generate_sample(
        model, {name: x[:1] for name, x in sample_batch(model).items()}, **options
    )


MODES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "greedy, left-padded batch": _padded,
    "right-padded batch": _right_padded,
    "beams": _beams,
    "sampling": _sampled,
    "prompt in chunks": partial(_one_row, prefill_chunk_size=16),
    "second turn": _second_turn,
    "prompt lookup": partial(_one_row, prompt_lookup_num_tokens=3),
    "embeddings": _embedded,
    "transformers' dynamic cache": lambda model: _padded(
        model, past_key_values=DynamicCache(config=model.config.get_text_config(decoder=True))
    ),
    "transformers' static cache": partial(_padded, cache_implementation="static"),
}
"""Each runs a model, attached or not, and returns what `generate()` does."""


def _plain(model: PreTrainedModel, run: Callable[[PreTrainedModel], Any]) -> Any:
    with routed_trial(model, None):
        return run(model)


def _routed(model: PreTrainedModel, run: Callable[[PreTrainedModel], Any]) -> Any:
    with routed_trial(model, partial(Cache, check=False)):
        return run(model)


def _limit(model: PreTrainedModel) -> float:
    """Return the difference that rounding explains."""
    sample = sample_batch(model)
    try:
        with routed_trial(model, None):
            plain = generate_sample(model, sample)
        return rounding_tolerance(model, sample, plain)
    except Exception:  # the check of each mode reports it
        return least_tolerance(model)


def _kernels(model: PreTrainedModel, recipe: Recipe, limit: float) -> ModeCheck:
    """Compare the kernels that a recipe uses with the reference, by prompts and some steps.

    A batch with padding and a row without are compared. In half precision, rounding moves codes,
    and may evict other tokens. So a recipe may differ by twice what its reference does when the
    embeddings are rounded otherwise, too.
    """
    name, begin = f"kernels of {recipe.name}", time.perf_counter()

    def run(backend: str, sample: dict[str, Tensor]) -> Any:
        with use_backend(backend):
            cache = Cache(model, recipe, check=False)
            return generate_sample(model, sample, past_key_values=cache)

    before = operations_run()
    try:
        batch, row, of_row = _acting_prompts(model, partial(run, "auto"))
        if of_row is None:
            note = f"it does not pack, evict or skip in all layers at {row['input_ids'].shape[1]:,}"
            seconds = time.perf_counter() - begin
            return ModeCheck(name, NOT_COMPARED, None, None, seconds, f"{note} tokens")
        of_batch = partial(run, "ref", batch)
        if model.dtype in (torch.float16, torch.bfloat16):
            exact = of_batch()
            of_batch = partial(lambda x: x, exact)
            with _rounded_otherwise(model):
                limit = max(limit, 2 * logits_difference(exact, run("ref", batch)))
    except KvloomError as error:
        return ModeCheck(name, REFUSED, None, None, time.perf_counter() - begin, str(error))
    comparisons = [
        _compare(limit, name, of_batch, partial(run, "auto", batch)),
        _compare(limit, name, partial(run, "ref", row), lambda: of_row),
    ]
    worst = max(comparisons, key=lambda x: (x.result != EQUAL, x.difference or 0.0))
    ran = sorted(
        {f"{op} ({backend})" for op, backend, _ in operations_run() - before if backend != "ref"}
    )
    note = worst.note or (", ".join(ran) if ran else "no kernel covers it; the reference runs it")
    return replace(worst, note=note, seconds=time.perf_counter() - begin)


def _acting_prompts(
    model: PreTrainedModel, run: Callable[[dict[str, Tensor]], Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Return a padded batch, its row without padding, and what `run` generates from this row.

    run: generates from a prompt with a cache of the recipe. The last is None if not all of the
    recipe acts on the longest prompt.
    """
    tokens, before = _PROMPT, 0
    while True:
        batch = sample_batch(model, tokens)
        row = {name: x[:1] for name, x in batch.items()}
        out = run(row)
        if all(_acts(layer.cache) for layer in out.past_key_values.full_layers):
            return batch, row, out
        length = row["input_ids"].shape[1]
        if tokens >= _LONGEST or length == before:
            return batch, row, None
        tokens, before = 2 * tokens, length


def _acts(layer: LayerCache) -> bool:
    """Return whether a layer has packed, evicted and skipped tokens, as far as its recipe does."""
    recipe = layer.recipe
    return (
        (recipe.store.exact or holds_packed(layer))
        and (recipe.keep is None or layer.dropped > 0)
        and (recipe.recall is None or layer.tokens_read < layer.seen)
    )


@contextmanager
def _rounded_otherwise(model: PreTrainedModel) -> Iterator[None]:
    """Let each embedding be one rounding error larger or smaller, at random."""
    generator = torch.Generator().manual_seed(0)

    def change(_: Any, __: Any, x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1
        return x * (1 + torch.finfo(x.dtype).eps * signs)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def _compare(
    limit: float, mode: str, expected: Callable[[], Any], routed: Callable[[], Any]
) -> ModeCheck:
    begin = time.perf_counter()
    try:
        plain_output = expected()
    except Exception as error:
        known = isinstance(error, KvloomError)
        result = REFUSED if known else PLAIN_FAILS
        note = str(error) if known else f"{type(error).__name__}: {error}"
        return ModeCheck(mode, result, None, None, time.perf_counter() - begin, note)
    try:
        routed_output = routed()
    except KvloomError as error:
        return ModeCheck(mode, REFUSED, None, None, time.perf_counter() - begin, str(error))
    off, tokens = logits_difference(plain_output, routed_output), None
    if plain_output.sequences is not None:
        tokens = float((plain_output.sequences == routed_output.sequences).float().mean())
    result = EQUAL if off <= limit else DIFFERENT
    return ModeCheck(mode, result, off, tokens, time.perf_counter() - begin)
