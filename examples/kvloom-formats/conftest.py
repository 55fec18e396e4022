"""Settings of the tests: one thread and process, the same random numbers in every test."""

import pytest
import torch

from kvloom.kernels import companion

torch.set_num_threads(1)
companion.disable()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
