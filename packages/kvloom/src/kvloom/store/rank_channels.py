"""The calibrated channels of some of a model's key/value heads.

Under tensor parallelism a process holds a part of the heads. Groups of channels that reach over
heads of several processes are refused: the range of a group needs all of its channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CalibrationError
from .codec import Channels
from .formats import Packed


def of_heads(channels: Channels, fmt: Packed, side: str, first: int, heads: int) -> Channels:
    """Return the channels of `heads` key/value heads from number `first` on; groups count from 0.

    channels: of all heads, in format `fmt` of "keys" or "values". Raises `CalibrationError` where
    a group has channels of these heads and of others.
    """
    all_groups = channels.group_of
    assert all_groups is not None, "a calibration has the group of every channel"
    own = all_groups[first : first + heads]
    groups = own.unique()
    others = torch.cat([all_groups[:first], all_groups[first + heads :]])
    expected = fmt.groups(heads, own.shape[1])
    if torch.isin(groups, others).any() or len(groups) != expected:
        raise CalibrationError(
            f'{side}: groups of span="layer" have channels of all heads, and this process holds '
            f"{heads} of {len(all_groups)} (tensor parallelism); use groups within a head, such as "
            "skvq:span=head,group=64, and calibrate for it"
        )

    def chosen(x: Tensor | None) -> Tensor | None:
        each_group = x is not None and len(x) == int(all_groups.max()) + 1
        return x[groups] if x is not None and each_group else x

    return Channels(
        torch.searchsorted(groups, own.contiguous()),
        chosen(channels.clip),
        None if channels.divisor is None else channels.divisor[first : first + heads],
        chosen(channels.low),
        chosen(channels.high),
    )
