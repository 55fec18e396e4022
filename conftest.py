"""Settings of all tests: hypothesis draws the same examples every time, and never times out.

Examples are small as drawn, so a failing one is shown as it is: shrinking takes minutes.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from backends import takes_rare_kernels
from kvloom.kernels import companion
from sampling import left_out

# The reference compiles nothing. Kernel tests select kernels themselves; laws and tests of whole
# models run by both (backends.py). KVLOOM_KERNELS=auto runs the other tests by kernels too.
os.environ.setdefault("KVLOOM_KERNELS", "ref")

# A test that compiles a kernel waits for it; which one is first depends on the tests before.
companion.disable()

# Tiny tensors: a second thread costs more than it gives, and beside another busy process it makes
# every operation ten times slower.
torch.set_num_threads(1)

# transformers runs the garbage collector after each continuous batch. The collector then visits a
# million objects of imports and tests, so it is off until they exist, and skips them from then on.
gc.disable()

EXAMPLES = {"default": 5, "slow": 10}
for name, examples in EXAMPLES.items():
    settings.register_profile(
        name,
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=examples,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--sample`."""
    parser.addoption(
        "--sample",
        action="store_true",
        help="take few cases of every test, as of those with the mark of this name",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draw more examples where slow cases run."""
    settings.load_profile("default" if config.option.markexpr == "not slow" else "slow")


def pytest_collection_finish() -> None:
    """Let garbage collections pass over what is there before the first test."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _skipped_by_the_collector() -> None:
    """Let garbage collections pass over what earlier modules have left, such as kernels."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed looks for other devices, too


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow the cases that compile much, and those that samples leave out."""
    for item in filter(takes_rare_kernels, items):
        item.add_marker(pytest.mark.slow)
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        for case in left_out(cases, config.option.sample):
            case.add_marker(pytest.mark.slow)
