"""Laws and whole models run by the kernels that a user gets, and by the reference."""

from __future__ import annotations

import pytest

from kvloom.kernels import dispatch


@pytest.fixture(autouse=True, params=dispatch.CHOICES)
def kernels(request):
    """Run the test by this backend. By default each case runs by one of them: see `pairwise`."""
    with dispatch.use(request.param):
        yield
