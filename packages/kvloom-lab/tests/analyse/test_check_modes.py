"""`kvloom check`: every mode of generation against the plain model."""

import pytest
import torch
import zoo
from test_self_check import new_model

from kvloom.kernels.attend import prompt
from kvloom.kernels.attend.reference import AttentionState
from kvloom.kernels.dispatch import Backend, Binding
from kvloom.recipe.resolve import resolve
from kvloom_lab import reference_model
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


@pytest.mark.parametrize("recipe", ["kivi-4", "small"])
def test_rounding_that_moves_codes_is_no_difference(recipe, kernels):
    """In bf16, kernels attend to a prompt with other sums than torch does."""
    model = reference_model("bfloat16")
    found = {x.mode: x for x in check_modes(model, resolve(recipe))}
    assert found[f"kernels of {recipe}"].result == EQUAL
    assert found[f"kernels of {recipe}"].difference > 1e-3


def test_a_wrong_kernel_differs_in_bf16(kernels, monkeypatch):
    def nothing(q, *_, **__):
        return AttentionState(q.clone(), q.new_zeros(q.shape[:3], dtype=torch.float32))

    right = prompt.attend_prompt.backends["cpu"]
    wrong = Backend(Binding(nothing, list), right.coverage)
    monkeypatch.setitem(prompt.attend_prompt.backends, "cpu", wrong)
    monkeypatch.setattr(prompt.attend_prompt, "bindings", {})
    found = {x.mode: x for x in check_modes(reference_model("bfloat16"), resolve("kivi-4"))}
    assert found["kernels of kivi-4"].result == DIFFERENT
