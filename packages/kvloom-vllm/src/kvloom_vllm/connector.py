"""The pages of prompts in a prompt store, from which an engine that starts again loads them.

vLLM makes a connector for its scheduler and one for its worker. The scheduler's reads and checks a
page before it says that the page's tokens need not be computed. So no load fails later: the
worker's copies checked bytes into blocks. It writes the pages of a prompt after the step that has
computed them. Decides what identifies a page of an engine.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.model_executor.model_loader.utils import get_model_cls

from kvloom import PromptStore
from kvloom.hf import StoredPages
from kvloom.paged import PackedPages

from . import engine, request
from .backend import KvloomImpl

OPTIONS = ("folder", "max_bytes", "max_age", "tenant")


@dataclass
class Identity(KVConnectorHandshakeMetadata):
    """What the worker tells the scheduler: see `StoredPages`. nbytes: of a page in all layers."""

    about: dict[str, Any]
    fields: dict[str, bytes]
    nbytes: int


@dataclass
class Step(KVConnectorMetadata):
    """Pages to load before a step, and to store after it.

    loads: blocks, and the bytes of their pages. stores: keys, token ids and blocks.
    """

    loads: list[tuple[int, Tensor]] = field(default_factory=list)
    stores: list[tuple[str, list[int], int]] = field(default_factory=list)


@dataclass
class Prompt:
    """The prompt of a request. keys: of its full pages. known: how many are stored, or will be."""

    ids: list[int]
    keys: list[str]
    known: int = 0


class KvloomStore(KVConnectorBase_V1, SupportsHMA):
    """A connector of vLLM; its extra config has the arguments of `kvloom.PromptStore`."""

    pages: StoredPages
    nbytes: int

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if request.recipe_text(vllm_config) is None:
            raise ValueError(
                f"{request.CONNECTOR} stores packed pages; ask for a recipe, such as "
                f'additional_config={{"{request.KEY}": "near-lossless"}}'
            )
        options = self._kv_transfer_config.kv_connector_extra_config
        if "folder" not in options or set(options) - set(OPTIONS):
            raise ValueError(
                f"{request.CONNECTOR} was given {sorted(options)}; give the folder of a prompt "
                f"store, and of {', '.join(OPTIONS[1:])} what it needs"
            )
        self.store = PromptStore(**options)
        self.page: int = vllm_config.cache_config.block_size
        (self.group,) = kv_cache_config.prefix_cacheable_group_ids
        self.prompts: dict[str, Prompt] = {}
        self.found: tuple[Prompt | None, int, list[Tensor]] = None, 0, []  # from a page on
        self.step = Step()
        self.stopped = False

    # --- in the scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Take what identifies pages from the only worker."""
        (identity,) = metadata.values()
        self.pages = StoredPages(self.store, identity.about, lambda: identity.fields)
        self.nbytes = identity.nbytes

    def on_new_request(self, request: Any) -> None:
        """Note a request whose prompt is given by token ids alone, and does not change later."""
        ids = request.prompt_token_ids
        others = request.mm_features, request.prompt_embeds, request.lora_request, request.resumable
        if ids and not any(x is not None and x is not False and x != [] for x in others):
            keys = self.pages.keys(ids, self.page, request.cache_salt or "")
            self.prompts[request.request_id] = Prompt(list(ids), keys)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens after these have stored pages, all of which are read now."""
        prompt, first = self.prompts.get(request.request_id), num_computed_tokens // self.page
        if prompt is None or self.stopped:
            return 0, False
        if self.found[0] is not prompt or self.found[1] != first:
            whole = (request.num_tokens - 1) // self.page  # one token at least is computed
            pages = self._read(prompt, range(first, min(whole, len(prompt.keys))))
            self.found = prompt, first, list(pages)
        return len(self.found[2]) * self.page, False

    def _read(self, prompt: Prompt, numbers: Iterable[int]) -> Iterator[Tensor]:
        """Yield the bytes of stored pages until one is missing."""
        for i in numbers:
            ids = prompt.ids[i * self.page : (i + 1) * self.page]
            page = self.pages.load(prompt.keys[i], ids, self.nbytes)
            if page is None:
                return
            yield page.clone()  # the file may change

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load what was found into the blocks of a request."""
        prompt, first, pages = self.found
        count = num_external_tokens // self.page
        if count:
            assert prompt is self.prompts[request.request_id]
            own = blocks.get_block_ids()[self.group][first : first + count]
            self.step.loads += zip(own, pages[:count], strict=True)
        self.found = None, 0, []

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """Return the pages to load before the step, and to store after it."""
        later, new = scheduler_output.scheduled_cached_reqs, scheduler_output.scheduled_new_reqs
        begins = dict(zip(later.req_ids, later.num_computed_tokens, strict=True))
        begins |= {x.req_id: x.num_computed_tokens for x in new}
        for name, begin in begins.items():
            prompt = self.prompts.get(name)
            if prompt is None or self.stopped:
                continue
            end = (begin + scheduler_output.num_scheduled_tokens[name]) // self.page
            for i in range(prompt.known, min(end, len(prompt.keys))):
                if not self.store.index.path(prompt.keys[i]).exists():
                    ids = prompt.ids[i * self.page : (i + 1) * self.page]
                    block = self._kv_cache_manager.get_block_ids(name)[self.group][i]
                    self.step.stores.append((prompt.keys[i], ids, block))
            prompt.known = max(prompt.known, min(end, len(prompt.keys)))
        step, self.step = self.step, Step()
        return step

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks can be freed."""
        self.prompts.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Use the store no more: caches are reset when weights have changed."""
        self.stopped = True
        return True

    # --- in the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the pages of each layer in vLLM's memory, and identify them."""
        config = self._vllm_config
        layers = config.compilation_config.static_forward_context
        layouts = engine.of(config).layouts
        memory = {
            engine.layer_index(name): tensor
            for name, tensor in kv_caches.items()
            if isinstance(getattr(layers[name], "impl", None), KvloomImpl)
        }
        self.memory = [PackedPages(layouts[i], memory[i]).raw for i in sorted(layouts)]
        plans, model = [layouts[i].plan for i in sorted(layouts)], config.model_config
        self.pages = StoredPages.of_engine(
            self.store, f"vLLM {vllm.__version__}", engine.of(config).recipe,
            model.hf_config.to_dict(), [plan.calibrated for plan in plans],
            {
                "weights": weights_sum(Path(model.model), engine.of(config).began),
                "class": str(get_model_cls(model)),
                "model": [model.dtype, model.max_model_len, model.quantization],
                "layouts": [[layouts[i].pieces, layouts[i].sinks] for i in sorted(layouts)],
            },
        )  # fmt: skip

    def get_handshake_metadata(self) -> Identity:
        """Return what the scheduler's connector needs."""
        nbytes = sum(raw.shape[1] for raw in self.memory)
        return Identity(self.pages.about, self.pages.fields, nbytes)

    def start_load_kv(self, forward_context: Any, **others: Any) -> None:
        """Copy the pages of a step into their blocks."""
        for block, page in self._get_connector_metadata().loads:
            parts = page.split([raw.shape[1] for raw in self.memory])
            for raw, part in zip(self.memory, parts, strict=True):
                raw[block] = part

    def wait_for_save(self) -> None:
        """Store the pages that the step has filled; vLLM calls this after a failure, too."""
        if sys.exc_info()[0] is not None:
            return
        for key, ids, block in self._get_connector_metadata().stores:
            self.pages.put(key, ids, torch.cat([raw[block] for raw in self.memory]))
        self.pages.flush()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all pages are loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, *args: Any, **others: Any) -> None:
        """Do nothing: pages are stored after the step."""


def weights_sum(folder: Path, began: float) -> str:
    """Return the SHA-256 of a checkpoint.

    Raises `ValueError` if a file was changed since an engine began, in seconds since 1970: it may
    have loaded other weights.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        if path.stat().st_ctime > began - 0.1:  # clocks of file systems lag behind
            raise ValueError(
                f"kvloom in vLLM: {path} was changed after this engine began, and a prompt store "
                "must know which weights were loaded; start the engine again"
            )
    return digest.hexdigest()
