"""A loose comparison that an output of zeros does not pass."""

from __future__ import annotations

from torch import Tensor


def assert_near(got: Tensor, want: Tensor, share: float) -> None:
    """Assert that the error's norm is at most `share` of the norm of what is expected.

    What is expected must be far from zero: its root mean square is at least 0.01.
    """
    assert share < 0.5
    assert got.shape == want.shape
    size = want.double().norm().item()
    assert size > 0.01 * want.numel() ** 0.5, f"nearly nothing is expected: norm {size}"
    off = (got.double() - want.double()).norm().item() / size
    assert off <= share, f"off by {off:.4f} of the norm"
