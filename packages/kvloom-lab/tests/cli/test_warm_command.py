"""`kvloom warm`: the kernels of a model's steps are on disk, and it needs no weights."""

import pytest
from command_line import run
from transformers import AutoConfig

import kvloom
from kvloom.cache import rehearse
from kvloom.kernels import ops, use_backend
from kvloom.kernels.append import cpu as append
from kvloom.kernels.append.cpu_kernel import kernel as append_kernel
from kvloom.kernels.attend.cpu import coverage, decode_kernel
from kvloom_lab.models import model_without_weights


def test_kernels_are_stored_without_weights(here, tmp_path, monkeypatch):
    from numba import config

    kernels, model = tmp_path / "kernels", tmp_path / "model"
    model.mkdir()
    for file in (here / "model").iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(config, "CACHE_DIR", str(kernels))
    for cached in (coverage.kernel, decode_kernel.kernel, append.compiled, append_kernel):
        cached.cache_clear()
    for op in ops.OPS.values():
        monkeypatch.setattr(op, "bindings", {})
    found = run("warm", model, "--recipes", "full")
    assert found.exit_code == 0, found.output
    assert "\nfull: " in f"\n{found.output}"
    names = {path.name.partition(".")[0] for path in kernels.rglob("*.nbc")}
    assert names == {"cpu_kernel", "decode_kernel"}


@pytest.mark.parametrize("recipe", ["small", "h2o:tokens=40,positions=renumbered", "clusterkv"])
def test_a_step_of_every_recipe_is_rehearsed_without_weights(here, recipe):
    config = AutoConfig.from_pretrained(here / "model")
    cache = kvloom.Cache(model_without_weights(config, "float32"), recipe)
    with use_backend("ref"):
        rehearse(cache.rehearsals(), prompt=True)
    assert cache.get_seq_length() == 0
