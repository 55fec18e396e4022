"""A whole calibration: ranges from contexts, groups from the ranges, clip factors by search.

Decides the order of the work and when a saved state is reused. Memory grows with the number of
layers, not with the text: running ranges, and one sample a layer. The state is saved next to the
result as `NAME.partial`; it is reused if model, text and settings are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import CalibrationError
from ..hf import compat
from ..hf.layer_facts import identity, undoable_ropes
from ..hf.recording import AttentionInputs
from ..hf.routing import attachment_restored
from ..hf.shard import needs_whole
from ..positions.rope import Rope
from ..progress import TotalProgress
from ..recipe.spec import Recipe
from ..store import LayerEncoding, Packed
from ..store.calibration import Calibration, format_of, kind_of, largest, shape_of
from .clip_search import AttentionSample, ExactAttention, search_clip
from .ranges import CONTEXTS, LAYERS, group_channels, read_ranges
from .recorder import record

MIN_CONTEXTS = 4


@dataclass(frozen=True)
class Settings:
    """How much text to read.

    Attributes:
        contexts: The most contexts that are read for the ranges of channels.
        context: Tokens of a context.
        settled: Every 8 contexts, the share of each range that these 8 added is computed. Reading
            stops when its mean over all channels, layers, keys and values is below `settled`.
        sample_contexts: The number of first contexts on which clip factors are searched.
        sample_tokens: Tokens of each of these contexts.
        queries: Sampled queries.
        sinks: First tokens that these attend to unquantized.
        recent: Newest tokens that these attend to unquantized.
    """

    contexts: int = 64
    context: int = 1024
    settled: float = 0.02
    sample_contexts: int = 4
    sample_tokens: int = 1024
    queries: int = 64
    sinks: int = 5
    recent: int = 128


def calibrate(
    model: PreTrainedModel,
    ids: Tensor,
    recipes: Iterable[Recipe],
    out: Path,
    settings: Settings | None = None,
    progress: TotalProgress | None = None,
) -> Calibration:
    """Calibrate a model for the formats of the recipes; the model is left as it was.

    It continues an interrupted run.

    Args:
        model: The model, loaded.
        ids: int64 [M, T], contexts.
        recipes: Those whose formats need a calibration.
        out: The file of the result.
        settings: How much text to read.
        progress: Called with finished units of work.

    Returns:
        What `out` holds. `read` in its settings is the number of contexts that were read.

    Raises:
        CalibrationError: The file cannot be written, contexts are too short for clip factors, or a
            format packs keys before a RoPE that cannot be undone.
        IncompatibleRecipe: A recipe does not fit the model.
        NotFinite: Keys or values are not finite.
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
    needs_whole(model, "a calibration")
    tokens = min(settings.sample_tokens, ids.shape[1])
    least = 2 * (settings.sinks + settings.recent)
    if tokens < least and any(isinstance(f.clip, str) for _, f in formats):
        raise CalibrationError(
            f"clip factors are searched on tokens between the first {settings.sinks} and the "
            f"newest {settings.recent}, and contexts have {tokens}; use contexts of {least} tokens "
            "or more"
        )
    for recipe in recipes:
        recipe.check(compat.geometry(model))
    with attachment_restored(model):
        return _calibrate(model, ids, formats, out, settings, progress or (lambda *_: None))


def _calibrate(
    model: PreTrainedModel,
    ids: Tensor,
    formats: list[tuple[str, Packed]],
    out: Path,
    settings: Settings,
    on_step: TotalProgress,
) -> Calibration:
    layers, ropes = compat.geometry(model).layer_indices, _ropes(model, formats)
    partial = out.with_name(out.name + ".partial")
    text = hashlib.sha256(ids.cpu().numpy().astype(np.int64).tobytes()).hexdigest()
    about = {**asdict(settings), "contexts": len(ids), "formats": [_spell(*f) for f in formats]}
    calibration = _resume(partial, Calibration(identity(model), text, about, name=out.name))
    done = calibration.tensors.setdefault("done", torch.zeros(3, dtype=torch.int64))
    read_ranges(model, ids, calibration, partial, ropes, settings.settled, on_step)
    searched = [(side, f) for side, f in formats if isinstance(f.clip, str)]
    unfinished = int(done[LAYERS]) < len(layers)
    samples = _samples(model, ids, settings) if searched and unfinished else {}
    for i in range(int(done[LAYERS]), len(layers)):
        on_step("calibrating layers", i, len(layers))
        layer = layers[i]
        for side, fmt in formats:
            _add_groups(calibration, layer, side, fmt)
        if searched:
            attention = ExactAttention(samples.pop(layer))
            for side, fmt in searched:
                _add_clip(calibration, layer, side, fmt, attention, ropes.get(layer))
        done[LAYERS] = i + 1
        calibration.save(partial)
    on_step("calibrating layers", len(layers), len(layers))
    calibration.settings = {**calibration.settings, "read": int(done[CONTEXTS])}
    del calibration.tensors["done"]
    calibration.save(out)
    partial.unlink(missing_ok=True)
    return calibration


def _resume(partial: Path, fresh: Calibration) -> Calibration:
    """Return the saved state if model, text and settings are those of `fresh`, else `fresh`."""
    try:
        saved = Calibration.load(partial)
    except CalibrationError:
        return fresh
    matches = (saved.model, saved.text, saved.settings) == (fresh.model, fresh.text, fresh.settings)
    saved.name = fresh.name
    return saved if matches else fresh


def _samples(model: PreTrainedModel, ids: Tensor, settings: Settings) -> dict[int, AttentionSample]:
    """Return the sample of each layer on which clip factors are searched."""
    samples: dict[int, AttentionSample] = {}
    exact = settings.sinks, settings.recent

    def add(layer: int, inputs: AttentionInputs) -> None:
        samples[layer] = AttentionSample.of(inputs, settings.queries, exact)

    record(model, ids[: settings.sample_contexts, : settings.sample_tokens], add)
    return samples


def _add_groups(calibration: Calibration, layer: int, side: str, fmt: Packed) -> None:
    """Group the channels of a layer's keys or values, where the format reorders them."""
    kind = kind_of(side, fmt)
    name = f"groups.{layer}.{kind}.{shape_of(fmt)}"
    if not fmt.reorder or name in calibration.tensors:
        return
    low, high = calibration.ranges(layer, kind)
    if fmt.smooth:
        max_abs = largest(low, high)
        low, high = low / max_abs, high / max_abs
    calibration.tensors[name] = group_channels(low, high, fmt.span, fmt.group)


def _add_clip(
    calibration: Calibration,
    layer: int,
    side: str,
    fmt: Packed,
    exact: ExactAttention,
    rope: Rope | None,
) -> None:
    """Search the clip factors of a format in a layer, unless they are found already."""
    name = f"{layer}.{kind_of(side, fmt)}.{format_of(fmt)}"
    if f"clip.{name}" in calibration.tensors:
        return
    unclipped = replace(fmt, clip=1.0)
    encoding = calibration.encoding(layer, side, unclipped)
    if encoding is None:
        heads, dim = exact.k.shape[1], exact.k.shape[3]
        encoding = LayerEncoding(unclipped.encoding, heads, dim, fmt.consecutive(heads, dim))
    by_group, by_layer = search_clip(exact, side, encoding, rope if fmt.pre_rope else None)
    calibration.tensors[f"clip.{name}"] = by_group
    calibration.tensors[f"clip_layer.{name}"] = by_layer


def _ropes(model: PreTrainedModel, formats: list[tuple[str, Packed]]) -> dict[int, Rope]:
    """Return the rotary embedding of each layer; empty if no format needs what a model lacks."""
    try:
        return undoable_ropes(model)
    except CalibrationError:
        if any(fmt.pre_rope for _, fmt in formats):
            raise
        return {}


def _spell(side: str, fmt: Packed) -> str:
    clip = f".clip-{fmt.clip}" if isinstance(fmt.clip, str) else ""
    return f"{kind_of(side, fmt)}.{format_of(fmt)}{clip}"


def cut_contexts(ids: np.ndarray, first: list[int], settings: Settings) -> Tensor:
    """Cut contexts from a text's ids [N]; each starts with the ids `first`.

    Returns int64 [contexts, context]. Contexts are spread over the whole text and never overlap;
    there are fewer if the text is short. Raises `CalibrationError` for fewer than `MIN_CONTEXTS`.
    """
    body = settings.context - len(first)
    count = min(settings.contexts, len(ids) // body) if body > 0 else 0
    if count < MIN_CONTEXTS:
        raise CalibrationError(
            f"the text has {len(ids)} tokens, and calibration needs {MIN_CONTEXTS} contexts of "
            f"{settings.context}; give more text or a smaller context"
        )
    starts = np.linspace(0, len(ids) - body, count).astype(int)
    return torch.from_numpy(np.stack([[*first, *ids[s : s + body]] for s in starts]))
