"""Pages of continuous batching in a prompt store.

A page is an entry of its own: its bytes in all layers, under a key that covers all tokens up to its
end. Decides what identifies a page, when it is written, and that a file is what its key says before
it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ...errors import SavedCacheError, StoreError
from ...recipe.spec import Recipe
from ...store import LayerEncoding
from .. import save
from ..routed_cache import RoutedCache
from . import identity
from .store import PAGE, PromptStore

_MOST_WAITING = 1 << 23  # bytes of pages


class StoredPages:
    """The pages of an engine in a prompt store.

    about: what files say of the model and the recipe (`save.described`). identify: returns the
    fields that identify all that a page depends on beside its tokens. Raises `StoreError` if the
    model or the recipe cannot be identified.
    """

    def __init__(
        self, store: PromptStore, about: dict[str, Any], identify: Callable[[], dict[str, bytes]]
    ) -> None:
        self.store, self.identify = store, identify
        self.fields = identify()
        self.about = {**about, "layers": PAGE}
        self._waiting: dict[str, tuple[Sequence[int], Tensor]] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_cache(cls, store: PromptStore, cache: RoutedCache) -> StoredPages:
        """Return the pages of continuous batching with the model and the recipe of a cache."""
        attention = identity.attention(cache.owner.model)

        def identify() -> dict[str, bytes]:
            fields = identity.fields(cache, store.tenant)
            return fields | {"attention": attention}  # while a manager runs, it is kvloom's own

        return cls(store, save.origin(cache), identify)

    @classmethod
    def of_engine(
        cls,
        store: PromptStore,
        engine: str,
        recipe: Recipe,
        config: dict[str, Any],
        encodings: Sequence[tuple[LayerEncoding | None, LayerEncoding | None]],
        settings: dict[str, Any],
    ) -> StoredPages:
        """Return the pages of an engine that has a model of its own.

        engine: its name and version. config: of the model, as transformers has it. encodings: the
        calibrated ones of each layer. settings: all else that a page depends on, the weights too;
        JSON has them, or their text.
        """
        model = {"model": (config["architectures"] or [config["model_type"]])[0], "engine": engine}
        about = save.described(recipe, model, save.encodings_checksum(encodings))
        fields = {
            "format": identity.version(),
            "tenant": store.tenant.encode(),
            "config": identity.encoded(config),
            "settings": identity.json_bytes(
                [engine, about["recipe"], about["calibration"], settings]
            ),
        }
        return cls(store, about, lambda: fields)

    def keys(self, ids: Sequence[int], size: int, salt: str = "") -> list[str]:
        """Return the key of each whole page of `size` tokens; salt: of a group of requests."""
        fields = self.fields | {"page": str(size).encode()}
        seed = identity.combined(fields | ({"salt": salt.encode()} if salt else {}))
        return [key.hex() for key in identity.chain(seed, torch.tensor(ids), size)]

    def load(self, key: str, ids: Sequence[int], nbytes: int) -> Tensor | None:
        """Return the bytes of a page with these tokens, uint8 [nbytes]; None if it is not stored.

        A damaged file is set aside, with a warning.
        """
        waiting = self._waiting.get(key)
        if waiting is not None and list(waiting[0]) == list(ids):
            return waiting[1]
        path = self.store.index.path(key)
        if not path.exists():
            return None
        try:
            try:
                page = _read(path, key, ids, nbytes)
            except SavedCacheError as error:
                self.store.forget(key, error)
                return None
            self.store.index.touch(key)
        except StoreError as error:
            self.store.warn(str(error))
            return None
        return page

    def changed(self) -> bool:
        """Return whether the model is another than at first; raises `StoreError` as `identify`."""
        return self.identify() != self.fields

    def put(self, key: str, ids: Sequence[int], page: Tensor) -> None:
        """Store the bytes of a page with these tokens, at the latest at the next `flush`."""
        with self._lock:
            self._waiting[key] = ids, page
            waiting = sum(page.nbytes for _, page in self._waiting.values())
        if waiting > _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write the pages that wait, unless they are stored; warn where it fails.

        The model is identified once for all of them. Pages of one that has changed are dropped.
        """
        with self._lock:
            pages, self._waiting = self._waiting, {}
        if not pages:
            return
        try:
            if self.changed():
                raise StoreError(
                    "the model has changed since kvloom.continuous began; leave the block and "
                    "enter it again"
                )
            names = self.about["model"]["model"], self.about["recipe"]["name"]
            for key, (ids, page) in pages.items():
                write = partial(save.write, self.about, {PAGE: page})
                self.store.add(names, key, torch.tensor(ids)[None], page.nbytes, write)
            self.store.prune()
        except StoreError as error:
            self.store.warn(f"pages are not stored: {error}")


def _read(path: Path, key: str, ids: Sequence[int], nbytes: int) -> Tensor:
    """Return the bytes of a page; raises `SavedCacheError` for a file that is not this page."""
    if save.read(path).get("prompt") != key:
        raise SavedCacheError(f"{str(path)!r} is another entry; remove the file")
    try:
        with safe_open(path, "pt") as file:
            page: Tensor = file.get_tensor(PAGE)
        if not torch.equal(save.prompt_ids(path), torch.tensor(ids)):
            raise ValueError("its token ids are others")
        if (page.dtype, page.shape) != (torch.uint8, (nbytes,)):
            raise ValueError(f"it holds {page.dtype} {list(page.shape)}")
    except Exception as error:
        raise SavedCacheError(f"{str(path)!r} is damaged ({error}); remove it") from error
    return page
