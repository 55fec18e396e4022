"""The caches of transformers, filled to a depth without computing a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor

from .timing import Candidate, TooSlow, problem, time_limit

INSTALL = {
    "DynamicCache": "",
    "QuantizedCache quanto-4": "optimum-quanto",
    "QuantizedCache hqq-4": "hqq",
    "QuantizedCache fp8": "-U transformers",
}
"""The caches by name, and the argument of `pip install` for one that is missing."""
NAMES = dict(zip(("dynamic", "quanto", "hqq", "fp8"), INSTALL, strict=True))
"""The caches by the names that `--baselines` takes."""
LIMIT_S = 60.0
"""The most seconds for filling a cache that was not named, and for its steps."""


def candidate(
    name: str,
    config: Any,
    k: Tensor,
    v: Tensor,
    build: Callable[[Any], Candidate],
    limit_s: float | None,
) -> Candidate:
    """Return what `build` makes of a filled cache, or a candidate with a problem.

    limit_s: the most seconds for filling it, and for a step; None: no limit. Other arguments as for
    `filled`.
    """
    try:
        with time_limit(limit_s, "filling it"):
            cache = filled(name, config, k, v)
    except (ImportError, ValueError) as error:
        return Candidate(name, problem=missing(name, error))
    except (Exception, TooSlow) as error:
        return Candidate(name, problem=problem(error))
    made = build(cache)
    made.limit_s = limit_s
    return made


def filled(name: str, config: Any, k: Tensor, v: Tensor) -> transformers.Cache:
    """Return the cache with a name in `INSTALL`, with k, v [B, Hk, N, D] in every layer.

    Raises `ImportError` or `ValueError` as `empty`.
    """
    cache = empty(name, config)
    for i in range(config.num_hidden_layers):
        cache.update(k, v, i)
    return cache


def empty(name: str, config: Any) -> transformers.Cache:
    """Return a new cache with a name in `INSTALL`.

    Raises `ImportError` or `ValueError` if this installation does not have the cache.
    """
    if name == "DynamicCache":
        return transformers.DynamicCache(config=config)
    backend, _, bits = name.split()[1].partition("-")
    axis = 1 if backend == "hqq" else 0
    options = {"nbits": int(bits), "axis_key": axis, "axis_value": axis} if bits else {}
    return transformers.QuantizedCache(backend, config=config, **options)


def missing(name: str, error: Exception) -> str:
    """Return why a cache of `INSTALL` is missing, with the command that installs it."""
    if isinstance(error, ImportError):
        return f"not installed: pip install {INSTALL[name]}"
    return f"not in this version of transformers ({error}): pip install {INSTALL[name]}"


def nbytes(cache: Any) -> int:
    """Return the bytes of all tensors in a cache of transformers, or in a part of one."""
    if isinstance(cache, Tensor):
        if hasattr(cache, "__tensor_flatten__"):  # a tensor subclass of quanto
            return sum(nbytes(getattr(cache, name)) for name in cache.__tensor_flatten__()[0])
        return cache.nbytes
    if isinstance(cache, dict):
        return sum(nbytes(x) for x in cache.values())
    if isinstance(cache, (list, tuple)):
        return sum(nbytes(x) for x in cache)
    if isinstance(cache, (transformers.Cache, transformers.cache_utils.CacheLayerMixin)):
        return nbytes(vars(cache))
    return 0
