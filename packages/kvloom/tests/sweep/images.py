"""Prompts with an image, for models that take pixels in one of the usual shapes or by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

TOKEN_NAMES = "image_token_id", "image_token_index", "image_patch_id", "video_token_index"
Inputs = dict[str, Tensor]


def prompts(model: PreTrainedModel, text: Inputs) -> Iterator[Inputs]:
    """Yield `text` [R, T] with an image in each row, in each shape that the model may take."""
    own = BY_HAND.get(model.config.model_type)
    if own is not None:
        yield own(model, text)
        return
    for pixels in _pixels(model, len(text["input_ids"])):
        try:
            with torch.no_grad():
                tokens = _features(model, pixels)
        except Exception:
            continue
        yield {**_with_tokens(model, text, tokens), **pixels}


def _pixels(model: PreTrainedModel, rows: int) -> Iterator[Inputs]:
    """Yield random images of one size in the usual shapes."""
    vision = getattr(model.config, "vision_config", None) or model.config
    size = getattr(vision, "image_size", None) or 32
    size = size if isinstance(size, int) else max(size)
    patch = getattr(vision, "patch_size", 16)
    patch = patch if isinstance(patch, int) else patch[0]
    whole = _noise(rows, 3, size, size)
    yield {"pixel_values": whole}
    yield {"pixel_values": whole, "image_sizes": torch.full((rows, 2), size)}
    yield {"pixel_values": whole[:, None]}
    sizes = torch.full((rows, 2), 2 * size)
    yield {"pixel_values": _noise(rows, 5, 3, size, size), "image_sizes": sizes}
    grid = 2 * (getattr(vision, "spatial_merge_size", None) or 2)
    grids = torch.tensor([[1, grid, grid]] * rows)
    for frames in (getattr(vision, "temporal_patch_size", None) or 2, 1):
        flat = _noise(rows * grid * grid, 3 * frames * patch * patch)
        yield {"pixel_values": flat, "image_grid_thw": grids}
    yield {"pixel_values": _noise(rows * grid * grid, 3, patch, patch), "image_grid_thw": grids}


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def _features(model: PreTrainedModel, pixels: Inputs) -> int | None:
    """Return how many tokens an image takes; None if the model does not put it among them."""
    owner = next((m for m in (model, model.base_model) if hasattr(m, "get_image_features")), None)
    if owner is None:
        return None
    out: Any = owner.get_image_features(**pixels)
    pooled = getattr(out, "pooler_output", out)
    found = out.last_hidden_state if pooled is None else pooled
    width = model.config.get_text_config(decoder=True).hidden_size
    parts = found if isinstance(found, list | tuple) else [found]
    rows = len(pixels.get("image_grid_thw", pixels["pixel_values"]))
    return sum(part.numel() for part in parts) // width // rows


def _with_tokens(model: PreTrainedModel, text: Inputs, tokens: int | None) -> Inputs:
    """Return the prompts with `tokens` image tokens after the padding of each row."""
    ids, mask = text["input_ids"].clone(), text["attention_mask"].clone()
    names = [name for name in TOKEN_NAMES if getattr(model.config, name, None) is not None]
    if not tokens or not names:
        return {"input_ids": ids, "attention_mask": mask}
    image = torch.full((len(ids), tokens), getattr(model.config, names[0]))
    start = int((mask == 0).sum(1).max()) + 1  # after the longest padding
    ids = torch.cat([ids[:, :start], image, ids[:, start:]], dim=1)
    mask = torch.cat([mask[:, :start], torch.ones_like(image), mask[:, start:]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    accepted = inspect.signature(model.forward).parameters
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in accepted:
            inputs[name] = (ids == image[0, 0]).long()
    return inputs


def _gemma4(model: PreTrainedModel, text: Inputs) -> Inputs:
    """Return 6 by 6 patches, which are pooled to 4 tokens."""
    rows = len(text["input_ids"])
    grid = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(rows, 36, 2)
    patches = _noise(rows, 36, 3 * model.config.vision_config.patch_size**2)
    inputs = _with_tokens(model, text, 4)
    return {**inputs, "pixel_values": patches, "image_position_ids": grid}


def _mllama(model: PreTrainedModel, text: Inputs) -> Inputs:
    """Return an image of one tile of four, to which every token may attend."""
    rows, tokens = text["input_ids"].shape
    tiles = torch.tensor([1, 0, 0, 0])
    return {
        **text,
        "pixel_values": _noise(rows, 1, 4, 3, 32, 32),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": tiles.expand(rows, 1, 4),
        "cross_attention_mask": tiles.expand(rows, tokens, 1, 4).clone(),
    }


def _q_former(model: PreTrainedModel, text: Inputs) -> Inputs:
    """Return an image and the tokens that ask for its features; a video has 2 frames."""
    rows, frames = len(text["input_ids"]), 2
    pixels = {"pixel_values": _noise(rows, 3, 32, 32)}
    count = model.config.num_query_tokens
    if model.config.model_type == "instructblipvideo":
        pixels, count = {"pixel_values": _noise(rows, frames, 3, 32, 32)}, count * frames
    if model.config.model_type != "blip-2":
        pixels["qformer_input_ids"] = text["input_ids"][:, -5:]
    return {**_with_tokens(model, text, count), **pixels}


def _idefics(model: PreTrainedModel, text: Inputs) -> Inputs:
    rows, tokens = text["input_ids"].shape
    seen = torch.ones(rows, tokens, 1, dtype=torch.long)
    return {**text, "pixel_values": _noise(rows, 1, 3, 32, 32), "image_attention_mask": seen}


def _kosmos2(model: PreTrainedModel, text: Inputs) -> Inputs:
    place = torch.zeros_like(text["input_ids"])
    place[:, -8 : -8 + model.config.latent_query_num] = 1
    pixels = _noise(len(place), 3, 32, 32)
    return {**text, "pixel_values": pixels, "image_embeds_position_mask": place}


def _pix2struct(model: PreTrainedModel, text: Inputs) -> Inputs:
    rows = len(text["input_ids"])
    patches = _noise(rows, 8, 2 + model.config.vision_config.patch_embed_hidden_size)
    patches[:, :, :2] = torch.arange(8)[:, None]  # row and column
    return {"flattened_patches": patches, "attention_mask": torch.ones(rows, 8)}


def _udop(model: PreTrainedModel, text: Inputs) -> Inputs:
    rows, tokens = text["input_ids"].shape
    return {**text, "bbox": torch.zeros(rows, tokens, 4), "pixel_values": _noise(rows, 3, 32, 32)}


def _pixels_only(model: PreTrainedModel, text: Inputs) -> Inputs:
    return {"pixel_values": _noise(len(text["input_ids"]), 3, 32, 32)}


BY_HAND: dict[str, Callable[[PreTrainedModel, Inputs], Inputs]] = {
    "blip-2": _q_former,
    "gemma4": _gemma4,
    "idefics": _idefics,
    "instructblip": _q_former,
    "instructblipvideo": _q_former,
    "kosmos-2": _kosmos2,
    "mllama": _mllama,
    "pix2struct": _pix2struct,
    "udop": _udop,
    "vision-encoder-decoder": _pixels_only,
}
