"""Tensor parallelism: which heads of a model this process holds.

transformers divides the heads of every layer over the ranks of a process group; a cache then sees
the keys and values of its own heads only. Decides which rank this is, and which divisions are
refused. The model's config keeps the counts of the whole model.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModel

_KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""Names of the modules of transformers' models that compute keys."""


class Shard(NamedTuple):
    """The part of a process: number `rank` of `ranks` equal parts of the heads."""

    rank: int = 0
    ranks: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"


WHOLE = Shard()


def weights_shard(model: PreTrainedModel) -> Shard:
    """Return which part of the weights this process holds; `WHOLE` without tensor parallelism."""
    ranks = getattr(model, "_tp_size", None) or 1
    mesh = getattr(model, "_device_mesh", None)
    if ranks == 1 or mesh is None:
        return WHOLE
    if "tp" in (mesh.mesh_dim_names or ()):
        mesh = mesh["tp"]
    return Shard(mesh.get_local_rank(), ranks)


def heads_shard(model: PreTrainedModel) -> Shard:
    """Return this process's part of the model's heads; `WHOLE` where it holds all of them.

    A plan that gathers the keys of all ranks (Phi-3) leaves every rank all heads.
    """
    part = weights_shard(model)
    return part if part == WHOLE or _divides_heads(model.tp_plan) else WHOLE


def problem(model: PreTrainedModel, q_heads: int, kv_heads: int) -> str | None:
    """Return why kvloom cannot run on this process's part of a model; None if it can.

    q_heads, kv_heads: those of the whole model.
    """
    mesh = getattr(model, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if "pp" in names and mesh["pp"].size() > 1:  # type: ignore[index]
        return "pipeline parallelism is not supported; use tensor parallelism alone"
    ranks = heads_shard(model).ranks
    if q_heads % ranks or kv_heads % ranks:
        fits = [str(n) for n in range(1, ranks) if q_heads % n == 0 and kv_heads % n == 0]
        return (
            f"its {q_heads} query and {kv_heads} key/value heads cannot be divided equally over "
            f"{ranks} ranks, and transformers would cut a head; use {' or '.join(fits)}"
        )
    return None


def needs_whole(model: PreTrainedModel, what: str) -> None:
    """Raise `UnsupportedModel` if this process holds a part of the heads only.

    what: what needs all heads, as the subject of a sentence.
    """
    part = heads_shard(model)
    if part != WHOLE:
        raise UnsupportedModel(
            f"{what} needs all heads of the model, and this process is {part}; load the model "
            "without tensor parallelism"
        )


def running() -> bool:
    """Whether this process is one of several of a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_gathers(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` if the weights of a divided model cannot be gathered by `whole`."""
    divided = any(hasattr(weight, "full_tensor") for weight in model.parameters())
    if weights_shard(model) != WHOLE and not divided:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be identified: this transformers divides its weights "
            "without a record of how; install transformers 5.23, or use a recipe without "
            "calibration that was not tuned"
        )


def local(weight: Tensor) -> Tensor:
    """Return what this process holds of a weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def whole(weight: Tensor) -> Tensor:
    """Return all of a weight; every rank has to call this, as it gathers a divided one."""
    gather: Any = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


def _divides_heads(plan: dict[str, str] | None) -> bool:
    """Return whether a plan of tensor parallelism divides the keys of attention by heads."""
    return any(
        re.sub(r"\.(weight|bias)$", "", name).rpartition(".")[2] in _KEYS and style == "colwise"
        for name, style in (plan or {}).items()
    )
