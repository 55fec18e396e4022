"""`kvloom check`: every mode of generation against the plain model."""

import pytest
import torch
import zoo
from test_self_check import new_model

from kvloom.kernels import ops
from kvloom.kernels.attend import prompt
from kvloom.kernels.attend.reference import AttentionState
from kvloom.kernels.dispatch import Backend, Binding
from kvloom.recipe.resolve import resolve
from kvloom_lab import reference_model
from kvloom_lab.analyse import modes
from kvloom_lab.analyse.modes import DIFFERENT, EQUAL, NOT_COMPARED, PLAIN_FAILS, check_modes


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


def kernels_row(model, recipe, monkeypatch):
    """The row of a recipe's kernels alone."""
    monkeypatch.setattr(modes, "MODES", {})
    return list(check_modes(model, resolve(recipe)))[-1]


def change(op, monkeypatch, changed):
    """Let the CPU kernels of an operation return what `changed` makes of their arguments."""
    right = op.backends["cpu"]

    def bind(*args, **options):
        run = right.bind(*args, **options)
        return lambda *given, **options: changed(run, *given, **options)

    monkeypatch.setitem(op.backends, "cpu", Backend(bind, right.coverage))
    monkeypatch.setattr(op, "bindings", {})


def test_a_prompt_is_longer_than_the_budget(kernels, monkeypatch):
    model = zoo.build("llama-gqa")
    change(ops.page_scores, monkeypatch, lambda run, *args, **options: -run(*args, **options))
    found = kernels_row(model, "quest:tokens=400", monkeypatch)
    assert found.result == DIFFERENT


def test_a_row_without_padding_is_compared(kernels, monkeypatch):
    def wrong(run, q, regions, *args, **options):
        state = run(q, regions, *args, **options)
        padded = any(region.visible is not None for region in regions)
        return state if padded else state._replace(out=1.5 * state.out)

    change(ops.attend, monkeypatch, wrong)
    assert kernels_row(zoo.build("llama-gqa"), "kivi-4:group=16", monkeypatch).result == DIFFERENT


def test_a_recipe_that_does_nothing_is_not_compared(kernels, monkeypatch):
    model = zoo.build("llama-gqa", max_position_embeddings=600)
    found = kernels_row(model, "snapkv:tokens=1024", monkeypatch)
    assert (found.result, found.tokens) == (NOT_COMPARED, None)
    assert found.note == "it does not pack, evict or skip in all layers at 596 tokens"


def test_a_model_that_refuses_padding_is_compared_by_its_dtype():
    def unpadded(module, args, options):
        mask = options.get("attention_mask")
        assert mask is None or mask.all()

    model = new_model("flatter")
    model.register_forward_pre_hook(unpadded, with_kwargs=True)
    found = {x.mode: x.result for x in check_modes(model)}
    assert found["greedy, left-padded batch"] == PLAIN_FAILS
    assert found["second turn"] == found["prompt in chunks"] == DIFFERENT
