"""Settings of all tests of kernels."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned():
    """Fill memory with NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
