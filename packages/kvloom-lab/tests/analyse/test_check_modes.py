"""`kvloom check`: every mode of generation against the plain model."""

import zoo
from test_self_check import new_model

from kvloom.recipe.resolve import resolve
from kvloom_lab.analyse.modes import DIFFERENT, EQUAL, PLAIN_FAILS, check_modes


def test_every_mode_of_a_supported_model_is_equal(kernels):
    model = zoo.build("llama-gqa")
    found = {x.mode: x for x in check_modes(model, resolve("kivi:group=16,residual=32"))}
    assert {x.result for x in found.values()} == {EQUAL}
    assert found["kernels of kivi:group=16,residual=32"].note.startswith("append (cpu), attend")
    assert {x.tokens for x in found.values()} <= {1.0, None}


def test_a_model_that_kvloom_computes_otherwise_differs(kernels):
    found = {x.mode: x.result for x in check_modes(new_model("flatter"))}
    assert found.pop("transformers' dynamic cache") == EQUAL
    assert found.pop("transformers' static cache") == EQUAL
    assert found.pop("save and load") == EQUAL
    assert set(found.values()) == {DIFFERENT}


def test_a_mode_that_the_plain_model_lacks():
    model = zoo.build("llama-gqa")
    model.prepare_inputs_for_generation = None
    assert {x.result for x in check_modes(model)} == {PLAIN_FAILS, EQUAL}
