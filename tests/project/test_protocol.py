"""The protocol of published figures: what is frozen, and which texts are refused."""

from __future__ import annotations

import importlib

import pytest
import torch

from kvloom.recipe import resolve
from kvloom_lab.eval.sample import Batch, Sample

WORDS = [f"word{i}" for i in range(300)]


@pytest.fixture(scope="module")
def protocol(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.config.rootpath / "benchmarks")
        return importlib.import_module("protocol")


def batch(*contexts):
    samples = [Sample(f"sample {i}", context) for i, context in enumerate(contexts)]
    return Batch(torch.zeros(len(samples), 1), samples)


def test_a_sample_with_a_passage_of_a_used_text_is_refused(protocol):
    used = protocol.UsedText(" ".join(WORDS))
    shared = batch("other text", " ".join(["before", *WORDS[17:81], "after"]))
    other = batch(" ".join(WORDS[17:48]), " ".join(reversed(WORDS)))
    assert used.without([shared, other]) == ([other], ["sample 1"])


def test_a_folder_takes_one_protocol(protocol, tmp_path, capsys):
    frozen = protocol.protocol_of({"niah": [batch("a text")]}, [resolve("kivi")], seed=1)
    assert 'name = "kivi"' in frozen["recipes"]["kivi"]
    protocol.freeze(frozen, tmp_path)
    protocol.freeze(frozen, tmp_path)
    assert frozen["texts"]["niah"] in capsys.readouterr().out
    changed = protocol.protocol_of({"niah": [batch("a Text")]}, [resolve("kivi")], seed=2)
    with pytest.raises(SystemExit, match=r"another protocol \(seed, texts differ\)"):
        protocol.freeze(changed, tmp_path)
