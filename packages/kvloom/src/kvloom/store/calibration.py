"""A calibration of a model, as a file: ranges of channels, groups, clip factors.

Decides the file's names and checks, and which of its numbers a format gets. A file is safetensors:
numbers and text, never code. `kvloom.calibrate` computes the numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..encoding import LayerEncoding
from ..errors import CalibrationError
from . import files
from .formats import Packed

VERSION = 1
KINDS = ("keys", "raw_keys", "values")
"""What is measured: keys after RoPE, keys before it, values."""


@dataclass
class Calibration:
    """Tensors by name, and what they were computed from.

    model: its `hf.layer_facts.identity`. text: SHA-256 of the text's tokens. settings: how
    it was calibrated. Tensors: `range.{layer}.{kind}` fp32 [2, Hk, D], minimum and maximum of each
    channel; `groups.{layer}.{kind}.{shape}` int32 [Hk, D]; `clip.{layer}.{kind}.{format}` fp32
    [groups] and `clip_layer.…` fp32 [1].
    """

    model: dict[str, Any]
    text: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    name: str = "calibration"

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        about = {"version": VERSION, "model": self.model, "text": self.text,
                 "settings": self.settings, "sum": checksum(self.tensors)}  # fmt: skip
        tensors = {n: t.cpu().contiguous() for n, t in self.tensors.items()}
        written = {"kvloom_calibration": json.dumps(about)}
        files.write(Path(path), tensors, written, CalibrationError)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file; raises `CalibrationError` if it is missing, damaged or another version's."""
        path = Path(path)
        remedy = "calibrate again with `kvloom calibrate`"
        if not path.is_file():
            raise CalibrationError(f"there is no calibration {str(path)!r}; make it with "
                                   "`kvloom calibrate`")  # fmt: skip
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("kvloom_calibration", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            # files of former versions have a checksum of their tensors alone
            intact = tensors.pop(files.CHECKSUM, None) is None or files.intact(path)
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise CalibrationError(
                f"{str(path)!r} is damaged or no calibration; {remedy}"
            ) from error
        if not isinstance(about, dict):
            raise CalibrationError(f"{str(path)!r} is safetensors, but no calibration; {remedy}")
        if about.get("version") != VERSION:
            raise CalibrationError(
                f"{str(path)!r} has calibration format {about.get('version')}, this kvloom reads "
                f"{VERSION}; {remedy}"
            )
        if not intact or about.get("sum") != checksum(tensors):
            raise CalibrationError(f"{str(path)!r} is damaged: its checksum is wrong; {remedy}")
        missing = [name for name in ("model", "text", "settings") if name not in about]
        if missing:
            raise CalibrationError(f"{str(path)!r} is damaged: no {missing[0]}; {remedy}")
        return cls(about["model"], about["text"], about["settings"], tensors, path.name)

    def encoding(self, layer: int, side: str, fmt: Packed) -> LayerEncoding | None:
        """Return `fmt` bound to a layer's "keys" or "values"; None if it needs no calibration.

        Raises `CalibrationError` if the file does not have it.
        """
        if not fmt.calibrated:
            return None
        kind = kind_of(side, fmt)
        low, high = self.ranges(layer, kind)
        clip = divisor = lows = highs = None
        if fmt.smooth:
            divisor = largest(low, high)
            low, high = low / divisor, high / divisor
        group_of = fmt.consecutive(*low.shape)
        if fmt.reorder:
            group_of = self._find(f"groups.{layer}.{kind}.{shape_of(fmt)}", side, fmt).long()
        if fmt.static:
            lows, highs = group_ranges(low, high, group_of)
        elif isinstance(fmt.clip, str):
            name = "clip" if fmt.clip == "group" else "clip_layer"
            clip = self._find(f"{name}.{layer}.{kind}.{format_of(fmt)}", side, fmt)
        heads, dim = low.shape
        return LayerEncoding(fmt.encoding, heads, dim, group_of, clip, divisor, lows, highs)

    def ranges(self, layer: int, kind: str) -> tuple[Tensor, Tensor]:
        """Return minimum and maximum of each channel, fp32 [Hk, D] each."""
        limits = self.tensors.get(f"range.{layer}.{kind}")
        if limits is None:
            what = kind.replace("_", " ")
            raise CalibrationError(
                f"{self.name} has no ranges for the {what} of layer {layer}; calibrate again with "
                "`kvloom calibrate`"
            )
        low, high = limits
        return low, high

    def _find(self, name: str, side: str, fmt: Packed) -> Tensor:
        if name not in self.tensors:
            raise CalibrationError(
                f"{self.name} was not made for {side} at {fmt.bits} bit in groups of {fmt.group}; "
                "name the recipe as it is: `kvloom calibrate … --recipes NAME:OPTIONS`"
            )
        return self.tensors[name]


def kind_of(side: str, fmt: Packed) -> str:
    """Return which of `KINDS` the format of a side packs."""
    return "raw_keys" if fmt.pre_rope else side


def shape_of(fmt: Packed) -> str:
    """Return a name for what the groups of a format depend on."""
    smooth = ".smooth" if fmt.smooth else ""
    return f"{fmt.span}.{fmt.group}{smooth}"


def format_of(fmt: Packed) -> str:
    """Return a name for what clip factors depend on; the dtype of metadata is not part of it."""
    order = "reordered" if fmt.reorder else "consecutive"
    return f"{shape_of(fmt)}.{order}.{fmt.bits}"


def largest(low: Tensor, high: Tensor) -> Tensor:
    """Return the largest magnitude of each channel, 1 where it is 0: shaped as low and high."""
    max_abs = torch.maximum(low.abs(), high.abs())
    return torch.where(max_abs > 0, max_abs, torch.ones_like(max_abs))


def group_ranges(low: Tensor, high: Tensor, group_of: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least low and greatest high [Hk, D] of each group's channels: [groups] each."""
    groups, index = int(group_of.max()) + 1, group_of.reshape(-1)
    lows = low.new_full((groups,), torch.inf).scatter_reduce(0, index, low.reshape(-1), "amin")
    highs = high.new_full((groups,), -torch.inf).scatter_reduce(0, index, high.reshape(-1), "amax")
    return lows, highs


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes, in hex."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].cpu().contiguous()
        total.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        total.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def of_heads(layer_encoding: LayerEncoding, side: str, first: int, heads: int) -> LayerEncoding:
    """Return the encoding of `heads` key/value heads from number `first` on; groups count from 0.

    Under tensor parallelism a process holds a part of the heads. layer_encoding: of all heads, of
    "keys" or "values". Raises `CalibrationError` where a group has channels of these heads and of
    others.
    """
    all_groups = layer_encoding.group_of
    assert all_groups is not None, "a calibration has the group of every channel"
    groups_of_heads = all_groups[first : first + heads]
    groups = groups_of_heads.unique()
    others = torch.cat([all_groups[:first], all_groups[first + heads :]])
    expected = layer_encoding.encoding.groups(heads, layer_encoding.head_dim)
    if torch.isin(groups, others).any() or len(groups) != expected:
        raise CalibrationError(
            f'{side}: groups of span="layer" have channels of all heads, and this process holds '
            f"{heads} of {len(all_groups)} (tensor parallelism); use groups within a head, such as "
            "skvq:span=head,group=64, and calibrate for it"
        )

    def of_groups(x: Tensor | None) -> Tensor | None:
        each_group = x is not None and len(x) == int(all_groups.max()) + 1
        return x[groups] if x is not None and each_group else x

    return LayerEncoding(
        layer_encoding.encoding, heads, layer_encoding.head_dim,
        torch.searchsorted(groups, groups_of_heads.contiguous()),
        of_groups(layer_encoding.clip),
        None if layer_encoding.divisor is None else layer_encoding.divisor[first : first + heads],
        of_groups(layer_encoding.low),
        of_groups(layer_encoding.high),
    )  # fmt: skip
