"""What of a cache is state: it is taken out as JSON and named tensors, and given back.

`_STATE` names the attributes of every class that are state; `_MADE` names those that come from the
recipe and the model, or live no longer than a step. An attribute in neither table is refused, so
that none is forgotten silently. `FORMAT` is a version and a digest of the table: after an attribute
was added, removed or renamed, older files are refused and the prompt must be prefilled again.
Raise the version where the file's structure, or the meaning of a stored number, changes.

State is given to an empty cache, object by object; it names no classes, and makes no objects but
`Slots`. A tensor has the name of where it is found, as `2.body.keys.packed.codes`. Spare room is
not taken, but made again, so that tensors lie as they lay: the cache goes on as the other one would
have, bit for bit, and grows at the same steps.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..cache.keeper import Keeper
from ..cache.layer import LayerCache
from ..cache.recalled import RecalledLayer
from ..cache.scored import ScoredLayer
from ..cache.segment import Segment
from ..cache.sinks import Sinks
from ..cache.slots import Slots
from ..cache.spared import SparedLayer
from ..errors import SavedCacheError
from ..recall import Far, Finder, Traffic
from ..recall.clusters import ClusterFinder
from ..recall.offload import Shelf
from ..recall.pages import PageFinder, TopKFinder
from ..recall.tiers import FileRows, Rows
from ..store import Lane
from ..store.buffer import Buffer
from ..store.codec import codec
from ..store.packed import PackedTokens

_TENSOR = "tensor"  # stands for the tensor of the same path; no state is a text
_HOST = ("stretches", "source")  # tensors that stay on the host whatever the device

_STATE: dict[type, str] = {
    LayerCache: "like body sinks seen budget read recording trace",
    ScoredLayer: "keeper slots",
    SparedLayer: "spared asked",
    RecalledLayer: "far finder mask",
    Segment: "keys values first kept away index start begun",
    Lane: "packed tail recent",
    PackedTokens: "codes scale zero count",
    Buffer: "data start stop",
    Sinks: "keys values start padded",
    Slots: "keys values scores free index",
    Keeper: "scores heavy recent asked done prompt_tokens budget_waits",
    Finder: "tokens",
    ClusterFinder: "centroids size start order alive",
    PageFinder: "low high",
    TopKFinder: "real",
    Far: "shelves stretches source tokens like traffic near place blocks turn",
    Shelf: "rows widths",
    Rows: "data count",
    DynamicSlidingWindowLayer: "keys values cumulative_length is_initialized record_past",
}
_MADE: dict[type, str] = {
    LayerCache: "recipe name place rope known most pending held undo",
    ScoredLayer: "keep together fresh see choice",
    RecalledLayer: "recall aside lost query chosen",
    PackedTokens: "fmt channels rope codec dtype _like",
    Buffer: "tight most before",
    Sinks: "count",
    Keeper: "keep sinks place",
    ClusterFinder: "options",
    PageFinder: "page",
    Far: "tier forms unit",
    Shelf: "form unit",
    Rows: "pinned copied",
    FileRows: "folder path _gone",
    DynamicSlidingWindowLayer: "sliding_window _sliding_window_tensor dtype device",
}
_LAYOUT = sorted(f"{kind.__name__}: {names}" for kind, names in _STATE.items())
_DIGEST = hashlib.sha256(repr(_LAYOUT).encode()).hexdigest()[:8]
FORMAT = f"2-{_DIGEST}"
UNCHECKED = f"1-{_DIGEST}"  # the same without a checksum, which is still read


def take(x: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """What is found at path, as JSON; its tensors, on the host, go to `tensors`."""
    if x is None or isinstance(x, int):
        return x
    if isinstance(x, Tensor):
        whole = torch.contiguous_format  # and a copy: layers may share a mask
        tensors[path] = x.detach().to("cpu", copy=True, memory_format=whole)
        return _TENSOR
    if isinstance(x, (list, tuple)):
        return [take(y, f"{path}.{i}", tensors) for i, y in enumerate(x)]
    names = _names(_STATE, x)
    unknown = sorted(vars(x).keys() - {*names, *_names(_MADE, x)})
    if unknown:
        raise SavedCacheError(
            f"{type(x).__name__} has {', '.join(unknown)}, of which saving knows nothing; save "
            "caches of kvloom's own layers and transformers' sliding windows"
        )
    if isinstance(x, Rows | Buffer):
        if x.data is None:
            return None
        tensors[path] = x.view().detach().cpu().contiguous()
        return x.count if isinstance(x, Rows) else [x.start, x.stop, x.data.shape[2]]
    return {
        name: take(getattr(x, name), f"{path}.{name}", tensors) for name in names if name in vars(x)
    }


class Giver:
    """Gives one layer of an empty cache its state back: JSON, and tensors of a safetensors file.

    The file lies in memory and may change, so every tensor is copied, once.
    """

    def __init__(self, file: Any, device: torch.device) -> None:
        self.file, self.device = file, device

    def give(self, old: Any, said: Any, path: str) -> Any:
        """What `take` said of `path`, in the place of old."""
        if isinstance(old, Buffer | Rows):
            if said is not None:
                self._refill(old, said, self.file.get_tensor(path))
            return old
        if said == _TENSOR:
            device = "cpu" if path.endswith(_HOST) else self.device
            return self.file.get_tensor(path).to(device, copy=True)
        if isinstance(said, list):
            olds = old or [None] * len(said)
            new = [
                self.give(x, y, f"{path}.{i}")
                for i, (x, y) in enumerate(zip(olds, said, strict=True))
            ]
            return Traffic(*new) if isinstance(old, Traffic) else new
        if not isinstance(said, dict):
            return said
        x = Slots.__new__(Slots) if old is None else old
        self._prepare(x, said, path)
        for name in _names(_STATE, x):
            if name in said:
                setattr(x, name, self.give(getattr(x, name, None), said[name], f"{path}.{name}"))
        return x

    def _prepare(self, x: Any, said: dict[str, Any], path: str) -> None:
        """Make what an object makes when its first tokens come."""
        if isinstance(x, PackedTokens) and said["codes"] is not None:
            like = self.give(None, _TENSOR, f"{path.partition('.')[0]}.like")
            x.codec, x.dtype = codec(x.fmt, x.channels, like), like.dtype
        elif isinstance(x, Far) and said["shelves"]:
            x.shelves = x.shelves or x.empty_shelves(pinned=self.device.type == "cuda")
        elif isinstance(x, DynamicSlidingWindowLayer) and said["is_initialized"]:
            like = self.file.get_tensor(f"{path}.keys").new_empty(0, device=self.device)
            x.lazy_initialization(like, like)

    def _refill(self, x: Buffer | Rows, said: Any, held: Tensor) -> None:
        """Let x hold these tokens, with as much room around them as there was in a buffer."""
        if isinstance(x, Rows):
            x.append(held)
            return
        x.start, x.stop, room = said
        x.data = held.new_empty(*held.shape[:2], room, *held.shape[3:], device=self.device)
        x.view().copy_(held)


def _names(table: dict[type, str], x: Any) -> list[str]:
    """What a table says of an object's class and those it derives from."""
    return [name for kind in type(x).__mro__[::-1] for name in table.get(kind, "").split()]
