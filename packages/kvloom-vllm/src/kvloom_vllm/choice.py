"""Which attention backend an engine gets: kvloom's if it has a recipe, otherwise vLLM's own.

vLLM resolves `CPU_ATTN` of this module by name, once per process and kind of layer, and keeps the
class. So the class of either answer checks each layer it is used for: an engine of the same process
with another answer is refused rather than served by the wrong class.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import request

LATENT = ("CPU_MLA", "AMX_MLA")
STATES = ("MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN")
NAMES = ("CPU_ATTN", *LATENT, *STATES)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config

    if name == "CPU_ATTN" and request.recipe_text(get_current_vllm_config()) is not None:
        from .backend import KvloomBackend

        return KvloomBackend
    return _own(name)


@cache
def _own(name: str) -> Any:
    """Return vLLM's own backend, which refuses an engine that asks for a recipe."""
    from vllm.config import get_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname

    base = resolve_obj_by_qualname(member(name).value)

    def checked(method: str) -> Any:
        def get() -> Any:
            """Return vLLM's own class."""
            recipe = request.recipe_text(get_current_vllm_config())
            if recipe is not None:
                raise ValueError(_why_not(name, recipe))
            return getattr(base, method)()

        return staticmethod(get)

    # the same class to anyone who asks for its name; states have no implementation of attention
    method = "get_builder_cls" if name in STATES else "get_impl_cls"
    return type(base.__name__, (base,), {"__module__": base.__module__, method: checked(method)})


def member(name: str) -> Any:
    """Return the member of vLLM's registries with a name of `NAMES`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

    return MambaAttentionBackendEnum[name] if name in STATES else AttentionBackendEnum[name]


def _why_not(name: str, recipe: str) -> str:
    if name == "CPU_ATTN":
        return (
            f"recipe {recipe!r}: this process began with an engine without kvloom, and vLLM keeps "
            "that choice; start this engine in a process of its own"
        )
    if name in LATENT:
        return (
            f"recipe {recipe!r}: multi-head latent attention (MLA) stores one compressed vector "
            "per token, which kvloom does not pack; run this model without kvloom"
        )
    return (
        f"recipe {recipe!r}: layers with a state instead of keys and values (Mamba, linear "
        "attention) have nothing that kvloom packs; run this model without kvloom"
    )
