"""A whole calibration: ranges from contexts, groups from the ranges, clip factors by search.

Decides the order, when enough is read, what is saved on the way and when a saved state is used
again. Memory grows with the layers, not with the text: running ranges, and one sample a layer. The
state is saved beside the result, as `NAME.partial`, and used if model, text and settings are the
same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import CalibrationError
from ..hf import attach, compat
from ..hf.metadata import identity, undoable_rope
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from ..store import Packed
from ..store.calibration import Calibration, format_of, kind_of, largest, shape_of
from ..store.codec import Channels, consecutive
from . import groups, record
from .attention import Attention, Sample
from .clip import search

LEAST_CONTEXTS = 4
_CHECK_EVERY = 8  # contexts: ranges are compared with those of the last check, and saved

_CONTEXTS, _READ, _LAYERS = range(3)  # places in the saved state: contexts read, all read, layers

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""


@dataclass(frozen=True)
class Settings:
    """How much to read.

    At most `contexts` contexts of `context` tokens each give the ranges of channels. Every 8
    contexts, the share of each range that these 8 added is computed; reading ends when its mean
    over all channels, layers, keys and values is below `settled`. Clip factors are searched on the
    first `sample_contexts` contexts, `sample_tokens` tokens each, with `queries` queries that see
    the first `sinks` and the newest `recent` tokens unpacked.
    """

    contexts: int = 64
    context: int = 1024
    settled: float = 0.02
    sample_contexts: int = 4
    sample_tokens: int = 1024
    queries: int = 64
    sinks: int = 5
    recent: int = 128


def contexts(ids: np.ndarray, first: list[int], settings: Settings) -> Tensor:
    """Cut contexts from a text's ids, int64 [contexts, context], each opened by the ids `first`.

    Spread over the whole text, never overlapping; fewer if the text is short. Raises
    `CalibrationError` if there are not even `LEAST_CONTEXTS`.
    """
    body = settings.context - len(first)
    count = min(settings.contexts, len(ids) // body) if body > 0 else 0
    if count < LEAST_CONTEXTS:
        raise CalibrationError(
            f"the text has {len(ids)} tokens, and calibration needs {LEAST_CONTEXTS} contexts of "
            f"{settings.context}; give more text or a smaller context"
        )
    begins = np.linspace(0, len(ids) - body, count).astype(int)
    return torch.from_numpy(np.stack([[*first, *ids[b : b + body]] for b in begins]))


def calibrate(
    model: PreTrainedModel,
    ids: Tensor,
    recipes: Iterable[Recipe],
    out: Path,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Calibrate a model on contexts ids [M, T] for what the recipes need; write and return it.

    Continues what an interrupted run left. The settings in the file say how many contexts were
    `read`. The model is left as it was. Raises `CalibrationError`, `IncompatibleRecipe` or
    `NotFinite`.
    """
    settings = settings or Settings()
    recipes = list(recipes)
    formats = sorted(
        {
            (side, f)
            for recipe in recipes
            for store in recipe.stores
            for side, f in store.quantized.items()
            if f.calibrated
        },
        key=str,
    )
    for recipe in recipes:
        recipe.check(compat.geometry(model))
    routed_before = getattr(model, "_kvloom", None) is not None
    try:
        return _calibrate(model, ids, formats, out, settings, progress or (lambda *_: None))
    finally:
        if not routed_before and getattr(model, "_kvloom", None) is not None:
            attach.detach(model)


def _calibrate(
    model: PreTrainedModel,
    ids: Tensor,
    formats: list[tuple[str, Packed]],
    out: Path,
    settings: Settings,
    tell: Progress,
) -> Calibration:
    layers, rope = record.layers(model), _rotary(model, formats)
    partial = out.with_name(out.name + ".partial")
    text = hashlib.sha256(ids.cpu().numpy().astype(np.int64).tobytes()).hexdigest()
    about = {**asdict(settings), "contexts": len(ids), "formats": [_spell(*f) for f in formats]}
    found = _resume(partial, Calibration(identity(model), text, about, name=out.name))
    done = found.tensors.setdefault("done", torch.zeros(3, dtype=torch.int64))
    _read(model, ids, found, partial, rope, settings.settled, tell)
    searched = [
        (side, f) for side, f in formats if f.transform and isinstance(f.transform.clip, str)
    ]
    samples: dict[int, Sample] = {}
    if searched and int(done[_LAYERS]) < len(layers):
        some = ids[: settings.sample_contexts, : settings.sample_tokens]
        exact = settings.sinks, settings.recent

        def sample(number: int, seen: record.Seen) -> None:
            samples[number] = Sample.of(seen, settings.queries, exact)

        record.read(model, some, sample)
    for at in range(int(done[_LAYERS]), len(layers)):
        tell("calibrating layers", at, len(layers))
        layer = layers[at]
        for side, fmt in formats:
            _group(found, layer, side, fmt)
        if searched:
            attention = Attention(samples.pop(layer))
            for side, fmt in searched:
                _search(found, layer, side, fmt, attention, rope)
        done[_LAYERS] = at + 1
        found.save(partial)
    tell("calibrating layers", len(layers), len(layers))
    found.settings = {**found.settings, "read": int(done[_CONTEXTS])}
    del found.tensors["done"]
    found.save(out)
    partial.unlink(missing_ok=True)
    return found


def _read(
    model: PreTrainedModel,
    ids: Tensor,
    found: Calibration,
    partial: Path,
    rope: Rope | None,
    settled: float,
    tell: Progress,
) -> None:
    """Find the ranges of all layers; go on where a saved state ends."""
    done, before = found.tensors["done"], _ranges(found)
    while not done[_READ]:
        at = int(done[_CONTEXTS])
        tell("reading contexts", at, len(ids))
        record.read(model, ids[at : at + 1], lambda n, seen: _widen(found.tensors, n, seen, rope))
        done[_CONTEXTS] = at + 1
        last = at + 1 == len(ids)
        if last or (at + 1) % _CHECK_EVERY == 0:
            now = _ranges(found)
            done[_READ] = last or bool(before and _added(before, now) < settled)
            before = now
            found.save(partial)


def _ranges(found: Calibration) -> dict[str, Tensor]:
    return {name: x for name, x in found.tensors.items() if name.startswith("range.")}


def _added(before: dict[str, Tensor], now: dict[str, Tensor]) -> float:
    """The share of the ranges [2, Hk, D] in `now` that `before` lacks, the mean over all."""
    shares = []
    for name, ends in now.items():
        width, was = ends[1] - ends[0], before[name][1] - before[name][0]
        shares.append(torch.where(width > 0, (width - was) / width, 0.0).mean())
    return float(torch.stack(shares).mean())


def _resume(partial: Path, fresh: Calibration) -> Calibration:
    """The saved state if it is of the same model, text and settings."""
    try:
        saved = Calibration.load(partial)
    except CalibrationError:
        return fresh
    same = (saved.model, saved.text, saved.settings) == (fresh.model, fresh.text, fresh.settings)
    saved.name = fresh.name
    return saved if same else fresh


def _widen(tensors: dict[str, Tensor], layer: int, seen: record.Seen, rope: Rope | None) -> None:
    """Widen a layer's ranges by what is seen."""
    kinds = {"keys": seen.k.float(), "values": seen.v.float()}
    if rope is not None:
        at = torch.arange(seen.k.shape[2]).view(1, 1, -1)
        kinds["raw_keys"] = rope.rotate(kinds["keys"], -at)
    for kind, x in kinds.items():
        low, high = x.amin(dim=(0, 2)).cpu(), x.amax(dim=(0, 2)).cpu()  # [Hk, D]
        known = tensors.get(f"range.{layer}.{kind}")
        if known is not None:
            low, high = torch.minimum(low, known[0]), torch.maximum(high, known[1])
        tensors[f"range.{layer}.{kind}"] = torch.stack([low, high])


def _group(found: Calibration, layer: int, side: str, fmt: Packed) -> None:
    assert fmt.transform is not None
    kind = kind_of(side, fmt)
    name = f"groups.{layer}.{kind}.{shape_of(fmt)}"
    if not fmt.transform.reorder or name in found.tensors:
        return
    low, high = found.ranges(layer, kind)
    if fmt.transform.smooth:
        most = largest(low, high)
        low, high = low / most, high / most
    found.tensors[name] = groups.group(low, high, fmt.transform.span, fmt.group)


def _search(
    found: Calibration, layer: int, side: str, fmt: Packed, exact: Attention, rope: Rope | None
) -> None:
    name = f"{layer}.{kind_of(side, fmt)}.{format_of(fmt)}"
    if f"clip.{name}" in found.tensors:
        return
    transform = fmt.transform
    assert transform is not None
    channels = found.channels(layer, side, replace(fmt, transform=replace(transform, clip=1.0)))
    if channels is None:
        heads, dim = exact.k.shape[1], exact.k.shape[3]
        channels = Channels(consecutive(fmt.group, transform, heads, dim))
    alone, together = search(exact, side, fmt, channels, rope if fmt.pre_rope else None)
    found.tensors[f"clip.{name}"] = alone
    found.tensors[f"clip_layer.{name}"] = together


def _rotary(model: PreTrainedModel, formats: list[tuple[str, Packed]]) -> Rope | None:
    """The model's rotary embedding; None if it has none and no format asks for it."""
    try:
        return undoable_rope(model)
    except CalibrationError:
        if any(fmt.pre_rope for _, fmt in formats):
            raise
        return None


def _spell(side: str, fmt: Packed) -> str:
    assert fmt.transform is not None
    clip = "" if isinstance(fmt.transform.clip, float) else f".clip-{fmt.transform.clip}"
    return f"{kind_of(side, fmt)}.{format_of(fmt)}{clip}"
