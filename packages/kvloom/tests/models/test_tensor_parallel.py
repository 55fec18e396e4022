"""Two processes with half of the heads each: the tokens of one process, half of the bytes.

`ranks` is what each process does; all of it runs once, as starting processes takes seconds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
import zoo

import kvloom
import kvloom_lab
from kvloom.calibrate import calibrate
from kvloom.errors import SavedCacheError
from kvloom.recipe.resolve import resolve

pytest.importorskip("accelerate", reason="transformers 5.10 needs it for tp_plan")

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
GUIDE = ROOT / "docs/guides/tensor-parallel.md"
MODELS = *ranks.NEW, *ranks.ARCHITECTURES
EVICTS = ("minikv", "h2o", "snapkv", "pyramidkv", "keyformer", "random", "kvzip", "expected")


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Run each test once: the processes choose their kernels by the environment."""


def launch(script: Path, *arguments: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks.RANKS}", str(script), *arguments]
    paths = [str(HERE), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finished(process: subprocess.Popen) -> str:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
    return out


def save_models(folder: Path) -> dict:
    trained = kvloom_lab.reference_model(torch.float32)
    wider = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    models = {"trained": trained, "random": zoo.build("llama-gqa", **wider)}
    models |= {name: zoo.build(name) for name in ranks.ARCHITECTURES}
    for name, (q_heads, kv_heads) in ranks.UNEVEN.items():
        sizes = {"hidden_size": 96, "num_attention_heads": q_heads}
        models[name] = zoo.build("llama-gqa", num_key_value_heads=kv_heads, **sizes)
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return models


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """What one process and each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    models = save_models(folder)
    text = kvloom_lab.reference_tokenizer()((ROOT / "LICENSE").read_text())["input_ids"]
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(3, 199, (300,), generator=generator).tolist()
    ids = {"trained": text[:506], "random": drawn}
    (folder / "ids.json").write_text(json.dumps(ids))
    formats = [name.removesuffix("calibration=").rstrip(":,") for name in ranks.CALIBRATED]
    recipes = [resolve(name) for name in (*formats, "skvq:group=64")]
    rows = torch.tensor(text[:540]).view(2, 270)
    calibrate(models["trained"], rows, recipes, folder / "calibration.kvcal")
    cache = kvloom.Cache(models["random"], "near-lossless")
    ranks.generate(models["random"], cache, drawn, 2)
    cache.save(folder / "whole.kv")
    process = launch(HERE / "ranks.py", str(folder), folder=folder)
    try:
        one = ranks.of_models(folder, models, ids)
    finally:
        out = finished(process)
    found = [json.loads((folder / f"rank{i}.json").read_text()) for i in range(ranks.RANKS)]
    return {"one": one, "ranks": found, "folder": folder, "models": models, "ids": ids, "out": out}


def field(found: dict, key: str) -> dict:
    """What is found of each recipe of a model."""
    return {recipe: its[key] for recipe, its in found.items()}


def test_tokens_are_those_of_one_process(subtests, results):
    for name in MODELS:
        with subtests.test(name):
            for rank in results["ranks"]:
                found = field(rank["recipes"][name], "tokens")
                assert found == field(results["one"][name], "tokens")


@pytest.mark.parametrize("name", ranks.NEW)
def test_each_head_keeps_the_tokens_that_it_keeps_in_one_process(results, name):
    evicting = [recipe for recipe in ranks.RECIPES[name] if recipe.startswith(EVICTS)]
    assert evicting
    for recipe in evicting:
        layers = [rank["recipes"][name][recipe]["kept"] for rank in results["ranks"]]
        found = [[n for part in heads for n in part] for heads in zip(*layers, strict=True)]
        assert found, recipe
        assert found == results["one"][name][recipe]["kept"], recipe


@pytest.mark.parametrize("recipe", ranks.RECIPES["beams"])
def test_beams_of_padded_rows_are_those_of_one_process(results, recipe):
    for rank in results["ranks"]:
        assert rank["recipes"]["beams"][recipe] == results["one"]["beams"][recipe]


@pytest.mark.parametrize("name", ["trained", "random"])
def test_full_gives_the_tokens_of_plain_transformers(results, name):
    model = ranks.load(results["folder"] / name)
    plain = ranks.generate(model, None, results["ids"][name], ranks.NEW[name])
    for rank in results["ranks"]:
        assert rank["recipes"][name]["full"]["tokens"] == plain


def test_each_rank_holds_its_heads_and_their_bytes(subtests, results):
    for name in MODELS:
        with subtests.test(name):
            parts = 1 if name == "phi3" else ranks.RANKS  # it gathers the keys of all ranks
            for rank in results["ranks"]:
                for recipe, found in rank["recipes"][name].items():
                    one = results["one"][name][recipe]
                    assert [n * parts for n in found["heads"]] == one["heads"], recipe
                    for count in ("nbytes", "predicted"):  # the heads of a layer may share 8 bytes
                        over = found[count] * parts - one[count]
                        assert 0 <= over <= 8 * len(one["heads"]), recipe


def test_a_rank_goes_on_from_the_file_that_it_saved_and_refuses_that_of_another(subtests, results):
    for recipe in ("near-lossless", "keyformer", "clusterkv:tokens=96"):
        for i, rank in enumerate(results["ranks"]):
            with subtests.test(recipe=recipe, rank=i):
                saved = rank["saved"][recipe]
                assert saved["again"] == saved["on"]
                assert saved["other"].startswith("SavedCacheError")
                says = f"holds the cache of rank {1 - i} of 2, and this process is rank {i} of 2"
                assert says in saved["other"]


def test_files_of_a_rank_and_of_one_process_are_refused_by_each_other(results):
    for rank in results["ranks"]:
        assert "holds the cache of a whole model" in rank["refused"]["whole"]
    with pytest.raises(SavedCacheError, match="of rank 0 of 2, and this process is a whole model"):
        kvloom.Cache.load(results["models"]["random"], results["folder"] / "keyformer.rank0.kv")


def test_what_needs_all_heads_is_refused_before_anything_is_changed(results):
    for rank in results["ranks"]:
        refused = rank["refused"]
        if ranks.RECORDED:
            assert "IncompatibleRecipe" in refused["skvq"]
            assert "use groups within a head, such as skvq:span=head" in refused["skvq"]
        else:
            assert "UnsupportedModel" in refused["skvq"]
            assert "install transformers 5.23" in refused["skvq"]
        assert "IncompatibleRecipe" in refused["variance"]
        assert (
            "layers='variance' divides a budget by the scores of all heads" in (refused["variance"])
        )
        assert "UnsupportedModel: a calibration needs all heads" in refused["calibrate"]
        assert "UnsupportedModel: kvloom_lab.auto needs all heads" in refused["auto"]
        assert refused["routed"] == ""


def test_a_model_that_other_code_divided_is_refused(results):
    for rank in results["ranks"]:
        assert (
            "CacheMisuse: layer 0: the model gives 2 key/value heads and this process should have 4"
        ) in rank["refused"]["by other code"]


@pytest.mark.parametrize("name", ranks.UNEVEN)
def test_heads_that_do_not_divide_are_refused(results, name):
    q_heads, kv_heads = ranks.UNEVEN[name]
    for rank in results["ranks"]:
        assert (
            f"its {q_heads} query and {kv_heads} key/value heads cannot be divided equally over 2"
        ) in rank["refused"][name]


@pytest.mark.skipif(not ranks.RECORDED, reason="this transformers takes tp_plan only")
def test_the_newer_spelling_loads_the_same(results):
    for rank in results["ranks"]:
        assert rank["config"] == rank["recipes"]["random"]["kivi"]


@pytest.mark.slow
def test_the_example_of_the_guide(tmp_path):
    guide = GUIDE.read_text()
    code, printed = guide.split("```python\n", 1)[1].split("```\n", 1)
    script = tmp_path / "generate.py"
    script.write_text(code)
    out = finished(launch(script, folder=tmp_path))
    expected = printed.split("```\n", 1)[1].split("```", 1)[0]
    lines = re.findall(r"rank \d: .*?(?:bytes|tokens)", out)  # ranks write line ends apart
    assert sorted(lines) == sorted(expected.splitlines())
