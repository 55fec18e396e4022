"""Whole models decode alike whichever backend attends."""

import torch
import zoo

import kvloom
from kvloom.kernels import dispatch


def test_generate_gives_the_same_tokens_by_kernels_and_by_the_reference():
    found = {}
    dispatch.ran.clear()
    for backend in dispatch.CHOICES:
        model = zoo.build("llama-gqa")
        cache = kvloom.Cache(model, "kivi:group=16,residual=32")
        with dispatch.use(backend):
            found[backend] = model.generate(
                **zoo.batch(), max_new_tokens=60, do_sample=False, past_key_values=cache
            )
    assert torch.equal(found["auto"], found["ref"])
    assert dispatch.ran["attend", "cpu", ""] == 3 * 59
