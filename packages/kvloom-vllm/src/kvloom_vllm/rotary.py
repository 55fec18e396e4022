"""How vLLM rotates an engine's keys, for recipes that pack keys before RoPE.

vLLM gives keys after RoPE. They are rotated back before they are packed, and rotated again when
they are read. Decides whether kvloom can do both: `Rope` must rotate keys from one position to
another exactly as vLLM's own module does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT as MADE

from kvloom import Recipe
from kvloom.errors import IncompatibleRecipe
from kvloom.positions import Rope

KINDS = ("RotaryEmbedding", "Llama3RotaryEmbedding")
"""Classes of vLLM whose frequencies depend neither on the length nor on the input."""


def rope(recipe: Recipe) -> Rope:
    """Return the rotary embedding of the models that this process has made.

    Raises `IncompatibleRecipe` unless all of their layers share one that kvloom can undo.
    """
    modules = list(MADE.values())
    kinds = sorted({type(module).__name__ for module in modules})
    if len(modules) != 1:
        why = f"this process has {len(modules)} rotary embeddings ({', '.join(kinds) or 'none'})"
    elif kinds[0] not in KINDS:
        why = f"vLLM rotates keys by {kinds[0]}"
    elif (rope := _tried(modules[0])) is None:
        why = "kvloom does not understand the model's rotary embedding"
    else:
        return rope
    raise IncompatibleRecipe(
        recipe.name,
        [
            f"in vLLM, keys before RoPE need one rotary embedding that can be undone, and {why}; "
            "add pre_rope=false and calibrate for it"
        ],
    )


def _tried(module: Any) -> Rope | None:
    """Return how a module rotates, if that rotates keys from position 3 to 40 as the module."""
    with torch.device("cpu"):
        rope = Rope(module._compute_inv_freq(module.base).float(), not module.is_neox_style)
        angles = module._compute_cos_sin_cache().float()
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(1, module.head_size, generator=generator, dtype=torch.float32)

    def at(position: int) -> Tensor:
        where = torch.tensor([position])
        sizes = module.head_size, module.rotary_dim
        rotated: Tensor = module.forward_static(
            where, raw, None, *sizes, angles, module.is_neox_style
        )[0]
        return rotated[None, None]

    got = rope.rotate(at(3), torch.tensor([[[37]]]))
    return rope if torch.allclose(got, at(40), rtol=1e-3, atol=1e-4) else None
