"""What identifies the beginning of a prompt in a prompt store: a chain of SHA-256 digests.

The chain starts from a seed, which covers all that a cache depends on beside the tokens: weights,
config, adapters, recipe, calibration, versions and the tenant. Each further digest covers the one
before and a block of token ids. Fields have their length before them, so that no two sequences of
fields have the same bytes. A model that may change in a way that the seed does not show is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ...cache.layer_state import VERSION
from ...errors import RecipeError, StoreError
from .. import compat, rotary, save
from ..forward import RoutedForward
from ..layer_facts import BOOKKEEPING, is_plain, sample
from ..routed_cache import RoutedCache

BLOCK = 64
"""Tokens of a block: an entry of a store covers whole blocks."""

FORMAT = 1
"""The version of this identity and of the entries; raise it when either changes."""

_CHUNK = 1 << 26  # numbers that are copied to the host at a time
_OF_FILES = ("_name_or_path", "transformers_version", "use_cache")
"""Fields of a config that do not change what a model computes."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FUNCTIONS = FunctionType, BuiltinFunctionType
_NO_PARTS = {*vars(torch.nn.Module()), "forward", "_old_forward"}
_KNOWN = ("accelerate", "kvloom", "peft", "torch", "transformers")
"""Packages whose hooks, forwards and objects change nothing that a seed does not show."""

_DIGESTS: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[tuple, bytes]]] = WeakKeyDictionary()


def chain(seed: bytes, ids: Tensor, size: int = BLOCK) -> list[bytes]:
    """Return the digest after each whole block of `size` token ids [1, N]."""
    digests, digest = [], seed
    canonical = ids.reshape(-1).to("cpu", torch.int64).numpy().astype("<i8")
    for end in range(size, len(canonical) + 1, size):
        block = canonical[end - size : end].tobytes()
        digest = hashlib.sha256(digest + _framed(block)).digest()
        digests.append(digest)
    return digests


def seed(cache: RoutedCache, tenant: str) -> bytes:
    """Return the SHA-256 of all that the state of a cache depends on beside the tokens.

    Raises `StoreError` for a model or a recipe that cannot be identified.
    """
    return combined(fields(cache, tenant))


def combined(parts: dict[str, bytes]) -> bytes:
    """Return the SHA-256 of named fields."""
    digest = hashlib.sha256()
    for name, value in parts.items():
        digest.update(_framed(name.encode()))
        digest.update(_framed(value))
    return digest.digest()


def fields(cache: RoutedCache, tenant: str) -> dict[str, bytes]:
    """Return the fields of a seed; raises `StoreError` as `seed` does."""
    model = cache.owner.model
    if problem := _problem(model):
        raise StoreError(f"a prompt store cannot identify the model: {problem}")
    weights = b"".join(_weights(model))
    try:
        recipe = cache.recipe.to_dict()
    except RecipeError as error:
        raise StoreError(f"a prompt store cannot identify the recipe: {error}") from error
    device = model.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return {
        "format": version(),
        "transformers": transformers.__version__.encode(),
        "tenant": tenant.encode(),
        "recipe": json_bytes(recipe),
        "calibration": json_bytes(save.calibration(cache)),
        "dtype": json_bytes([model.dtype, autocast]),
        "config": encoded(model.config.to_dict()),
        "attention": attention(model),
        "modules": json_bytes(list(_modules(model))),
        "weights": weights,
    }


def _framed(value: bytes) -> bytes:
    """Return bytes with their length before them."""
    return len(value).to_bytes(8, "little") + value


def attention(model: PreTrainedModel) -> bytes:
    """Return the bytes of the attention that a model computes with now."""
    return json_bytes(compat.decoder_config(model)._attn_implementation)


def version() -> bytes:
    """Return the versions of this identity and of saved caches."""
    return f"{FORMAT}.{VERSION}".encode()


def encoded(config: dict[str, Any]) -> bytes:
    """Return the bytes of what a model's config says of what the model computes."""
    return json_bytes({name: x for name, x in config.items() if name not in _OF_FILES})


def json_bytes(value: Any) -> bytes:
    """Return canonical JSON; what JSON does not have, by its text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _problem(model: PreTrainedModel) -> str | None:
    """Return why a model may change in a way that a seed does not show; None: it may not."""
    if model.training:
        return "it is in training mode; call model.eval()"
    if any(getattr(torch.nn.modules.module, f"_global{kind}") for kind in _HOOKS):
        return "all modules have a global forward hook; remove the hook"
    for name, module in model.named_modules():
        hooks = [hook for kind in _HOOKS for hook in getattr(module, kind).values()]
        if not all(map(_is_known, hooks)):
            return f"{name or 'it'} has a forward hook; remove the hook"
        if any(isinstance(hook, partial) and _package(hook) == "peft" for hook in hooks):
            return (
                f"the call chooses an adapter of {name} (adapter_names, or an activated LoRA); set "
                "the adapter of the model, or use it without a store"
            )
        if _is_replaced(module):
            return f"{name or 'it'} has a forward that other code has replaced; restore it"
        for key, x in vars(module).items():
            if key not in _NO_PARTS and not _shows_what_it_does(x):
                return (
                    f"{name or 'it'} has {key!r}, a {type(x).__name__} that code of your own has "
                    "made; give modules numbers, text, tensors and modules alone"
                )
        if rotary.changes(module):
            return f"{name} changes with the length of a text; use the model without a store"
    return None


def _shows_what_it_does(x: Any) -> bool:
    """Return whether an attribute of a module is in the seed, or of code that does not change."""
    if isinstance(x, dict):
        return all(map(_shows_what_it_does, (*x, *x.values())))
    if isinstance(x, list | tuple | set):
        return all(map(_shows_what_it_does, x))
    return is_plain(x) or isinstance(x, Tensor | torch.nn.Module) or _is_known(x)


def _is_replaced(module: torch.nn.Module) -> bool:
    """Return whether code that is not of `_KNOWN` has replaced a module's forward.

    kvloom and accelerate run the forward that was there before theirs.
    """
    forward = vars(module).get("forward")
    if isinstance(forward, RoutedForward):
        forward = forward.replaced
    own = type(module).forward
    calls = forward, vars(module).get("_old_forward")
    return any(
        call is not None and getattr(call, "__func__", None) is not own and not _is_known(call)
        for call in calls
    )


def _is_known(call: Any) -> bool:
    """Return whether code of `_KNOWN` has made a hook or a forward, whatever it wraps."""
    return _package(call) in ("", *_KNOWN)


def _package(call: Any) -> str:
    """Return the package whose code has made a hook or a forward, "" for a built-in function."""
    call = call.func if isinstance(call, partial) else call
    call = getattr(call, "__func__", call)
    if isinstance(call, BuiltinFunctionType):
        return ""
    defined_in = getattr(call, "__globals__", {}).get("__name__", type(call).__module__)
    return str(defined_in).partition(".")[0]


def _modules(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the name, class and plain attributes of each module, and the names of functions.

    They include what adapters are active, and how they are scaled.
    """
    for name, module in model.named_modules():
        kind = type(module)
        attributes = {key: x for key, x in vars(module).items() if key not in BOOKKEEPING}
        plain = {key: x for key, x in attributes.items() if is_plain(x)}
        functions = {k: x.__name__ for k, x in attributes.items() if isinstance(x, _FUNCTIONS)}
        yield name, f"{kind.__module__}.{kind.__qualname__}", plain, functions


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a model by name: parameters, buffers and attributes."""
    for prefix, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        attributes = {key: x for key, x in vars(module).items() if isinstance(x, Tensor)}
        for name, x in {**tensors, **attributes}.items():
            if x is not None:
                yield f"{prefix}.{name}", x


def _weights(model: PreTrainedModel) -> Iterator[bytes]:
    """Yield a digest of each tensor; those that did not change are not read again.

    A change in place raises a tensor's version. One through `.data` does not, as peft's merging of
    weights; so some numbers of each tensor are compared, too.
    """
    known = _DIGESTS.setdefault(model, {})
    for name, x in _tensors(model):
        if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise StoreError(
                f"a prompt store cannot identify the model: {name} is a {type(x).__name__}; load "
                "the model with weights in plain tensors"
            )
        if x.is_meta or x.is_inference():
            place = "on the meta device" if x.is_meta else "made in inference mode"
            raise StoreError(
                f"a prompt store cannot identify the model: {name} is {place}; load the model with "
                "all weights in memory, and outside torch.inference_mode"
            )
        flat = x.detach().reshape(-1)
        some = _bytes(sample(flat))
        stamp = x.data_ptr(), x._version, x.shape, x.stride(), x.dtype, x.device, some
        if name not in known or known[name][0] != stamp:
            known[name] = stamp, _digest(name, flat, x.shape)
        yield known[name][1]


def _digest(name: str, flat: Tensor, shape: torch.Size) -> bytes:
    """Return the SHA-256 of a tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(_framed(json_bytes([name, flat.dtype, list(shape)])))
    for part in flat.split(_CHUNK):
        digest.update(_bytes(part))
    return digest.digest()


def _bytes(flat: Tensor) -> bytes:
    """Return the bytes of a flat tensor."""
    return flat.contiguous().cpu().view(torch.uint8).numpy().tobytes()
