"""A kernel backend: the bounds of pages in one pass, for keys without padding or with."""

import torch

from kvloom.kernels import Backend, Coverage, ops


def page_bounds(x, page, nonpadding):
    """Return the least and largest key of each page: 2 x [B, Hk, N / page, D] of x [B, Hk, N, D].

    nonpadding: bool [B, 1, N], False for padding; None: no padding.
    """
    pages = x.unflatten(2, (-1, page))
    if nonpadding is None:
        return pages.aminmax(dim=3)
    hidden = ~nonpadding.unflatten(2, (-1, page)).unsqueeze(-1)
    largest = torch.finfo(x.dtype).max
    low = pages.masked_fill(hidden, largest).amin(dim=3)
    return low, pages.masked_fill(hidden, -largest).amax(dim=3)


def other_dtype(x, page, nonpadding):
    """Return why a case is not covered; cases differ in what the operation's `case` reads."""
    return None if x.dtype == torch.float32 else f"keys are {x.dtype}, not torch.float32"


ops.page_bounds.register(
    "one-pass",
    Backend(bind=lambda *_: page_bounds, coverage=Coverage(("keys in fp32", other_dtype))),
)
