"""The continuous batching of transformers with a recipe's packed pages.

Decides which models and which versions of transformers it runs with; `packed` decides how.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from ...errors import CacheMisuse, IncompatibleRecipe, InputError, UnsupportedModel
from ...paged import check_pages_hold
from ...recipe import Recipe, resolve
from .. import compat
from ..cache import Cache
from ..layer_facts import recipe_for
from ..prompts.pages import StoredPages
from ..prompts.store import PromptStore
from ..rotary import changes
from ..routing import attachment_restored
from ..supported import supported_model

TESTED = ("5.23.0",)
"""The versions of transformers that the tests run. The hooks are private: others are refused."""

ENGINE = "continuous batching"


@contextmanager
def continuous(
    model: PreTrainedModel,
    recipe: Recipe | str | Path = "near-lossless",
    store: PromptStore | None = None,
) -> Iterator[None]:
    """Pack the pages of the model's continuous batching, in a `with` statement.

    In the block, `generate_batch` and `init_continuous_batching` of the model use packed pages. A
    manager that still runs at the end of the block is stopped. An error in the thread of a manager
    is raised where the manager stops.

    Args:
        model: As for `Cache`, on a CPU. Each layer attends to all tokens.
        recipe: As for `Cache`; one that reads every token, and evicts at most from the prompt.
        store: Full pages are stored in it when their request ends, and prompts begin with the
            stored pages of their tokens.

    Raises:
        InputError: The version of transformers is not tested. In the block, from transformers'
            functions: a setting that packed pages do not serve, or a request that does not fit.
        UnsupportedModel: Kernels for pages do not compute the model's attention.
        RecipeError: There is no such recipe.
        IncompatibleRecipe: The recipe does not fit the model, or pages.
        CacheMisuse: The model batches continuously already. In the block: its weights have changed.
        StoreError: The store cannot identify the model or the recipe.
    """
    if transformers.__version__ not in TESTED:
        raise InputError(
            f"kvloom.continuous was tested with transformers {', '.join(TESTED)}, and this is "
            f"{transformers.__version__}; install transformers=={TESTED[-1]}"
        )
    from .packed import PackedBatching

    model, named = supported_model(model), resolve(recipe)
    check_pages_hold(named, ENGINE, evicts=True)
    _check_model(model)
    if store is not None and named.keeps_by_score:
        problem = "a prompt store holds every token of a prompt, and this recipe evicts some"
        raise IncompatibleRecipe(named.name, [f"{problem}; leave out the store"])
    with attachment_restored(model):
        cache = Cache(model, named)  # which refuses what does not fit
    named = recipe_for(model, named)
    check_pages_hold(named, ENGINE, evicts=True)
    stored = None if store is None else StoredPages.of_cache(store, cache)
    batching = PackedBatching(model, cache, named, ENGINE, stored)
    model.init_continuous_batching = batching.manager
    try:
        yield
    finally:
        batching.close()


def _check_model(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for what kernels for pages do not compute, by name."""
    geometry, config = compat.geometry(model), compat.decoder_config(model)
    kinds = {*compat.stock_kinds(model), *compat.layer_kinds(model)} - {compat.FULL}
    features = {
        "layers with a sliding window": compat.SLIDING in kinds,
        "latents (MLA)": geometry.latent,
        "values of another size than keys": not geometry.latent
        and geometry.value_dim not in (None, geometry.head_dim),
        "attention sinks": any(
            isinstance(getattr(module, "sinks", None), torch.Tensor) for module in model.modules()
        ),
        "a soft cap of the logits": getattr(config, "attn_logit_softcapping", None) is not None,
        "ALiBi": geometry.alibi,
        "attention that does not go through transformers' interface": compat.has_adapter(model),
        "layers that share keys and values": bool(getattr(config, "num_kv_shared_layers", 0)),
        "heads in several processes": geometry.ranks > 1,
        "a RoPE that changes with the length of a text": any(map(changes, model.modules())),
        f"weights on {model.device}, where pages have no kernels yet": model.device.type != "cpu",
    }
    features |= {f"layers of kind {kind}": True for kind in kinds - {compat.SLIDING}}
    if found := [name for name, has in features.items() if has]:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be batched with packed pages: it has "
            f"{' and '.join(found)}; use model.generate"
        )
    if hasattr(model, "_cached_continuous_batching_manager"):
        raise CacheMisuse(
            "this model has a persistent manager with exact pages; call "
            "model.destroy_cached_continuous_batching_manager() first"
        )
    if "init_continuous_batching" in vars(model):
        raise CacheMisuse("this model is in a block of kvloom.continuous already; leave it first")
