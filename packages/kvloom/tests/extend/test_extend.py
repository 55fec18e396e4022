"""Parts from another distribution: spelling, TOML, predicted bytes, and what is shown of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from examples import EXAMPLES, HERE, installed
from typer.testing import CliRunner

import kvloom
from kvloom.errors import RecipeError
from kvloom.keep import SCORERS, Keep, Scorer, Step, checked
from kvloom.recall import INDEXES
from kvloom.recipe import RECIPES, Geometry, LayerOverride, Recipe, resolve
from kvloom.store import FORMATS, Store
from kvloom_lab.cli.app import app

SPELLED = [
    "evict:score=value-norm,power=2,tokens=40",
    "recall:index=means,unit=4,tokens=40,sinks=4,recent=8",
    "store:format=int8,unit=8,recent=16",
    "store:bits=2,outliers=12,outlier_score=token-ids",
    "kivi-between:bits=4,exact=2,residual=64",
    "kivi-between@2=evict:score=value-norm,fraction=0.25",
]


@pytest.fixture(autouse=True)
def _installed():
    with installed("my_score", "my_filter", "my_format", "my_index", "my_recipe"):
        yield


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_less_than_40_lines(name):
    assert len((HERE / f"{name}.py").read_text().splitlines()) < 40


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_documentation_includes_the_example(name):
    root = HERE.parents[3]
    file = (HERE / f"{name}.py").relative_to(root).as_posix()
    page = (root / "docs" / "extending.md").read_text()
    assert f'```python\n--8<-- "{file}"\n```\n' in page


@pytest.mark.parametrize("spelling", SPELLED)
def test_a_recipe_goes_through_a_dict_and_toml(spelling):
    recipe = resolve(spelling)
    assert recipe.name == spelling
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_options_of_a_part_reach_it():
    assert resolve(SPELLED[0]).keep.scorer == SCORERS["value-norm"](2.0)
    assert resolve(SPELLED[1]).recall.index == INDEXES["means"](4)
    int8 = FORMATS["int8"](8)
    assert resolve(SPELLED[2]).store == Store(int8, int8)
    assert resolve("store:format=int8").store.keys.unit == 4
    assert resolve(SPELLED[3]).protect.outliers == kvloom.Outliers(12, SCORERS["token-ids"]())
    between = resolve(SPELLED[4])
    assert [one.where for one in between.layers] == ["first 2", "last 2"]
    assert between.store == resolve("kivi:bits=4,residual=64").store
    assert resolve(SPELLED[5]).layers[-1] == LayerOverride(
        2, resolve("evict:score=value-norm,fraction=0.25").keep, Store(), None, kvloom.Protect()
    )


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("evict:score=value-nrm", "did you mean 'value-norm'?"),
        ("evict:score=value-norm,powr=2", "no option 'powr' (did you mean 'power'?)"),
        ("evict:score=value-norm,power=big", "option 'power' of recipe 'evict' must be a number"),
        ("evict:score=token-ids", "reads token ids, which later steps do not keep; use it as the"),
        ("store:outlier_score=token-ids", "tokens, and outliers=0 of them; give outliers"),
        ("skvq:outliers=4,outlier_score=token-idz", "score='token-idz' is not one of recent, "),
        ("evict:power=2", "recipe 'evict' has no option 'power'"),  # of mass
        ("kivi-betwen", "did you mean 'kivi-between'?"),
        ("kivi-between:exact=x", "option 'exact' of recipe 'kivi-between' must be a whole number"),
    ],
)
def test_a_wrong_option_of_a_part_is_refused(spelling, says):
    with pytest.raises(RecipeError) as refused:
        resolve(spelling)
    assert says in str(refused.value)


def test_a_table_names_a_part_by_its_kind():
    recipe = Recipe.from_toml(
        """
        [keep]
        budget = { tokens = 40 }
        scorer = { kind = "value-norm", power = 3 }
        [[layers]]
        where = "last 1"
        keep = "all"
        store = { keys = { kind = "int8" } }
        """
    )
    assert recipe.keep == Keep(kvloom.Budget(40), SCORERS["value-norm"](3))
    assert recipe.layers[0].store == Store(FORMATS["int8"](4))
    assert '[layers.store.keys]\nkind = "int8"\nunit = 4' in recipe.to_toml()


def test_predicted_bytes_are_those_of_the_parts():
    g = Geometry(2, 4, 2, 64, torch.bfloat16)
    exact = 2 * 2 * 64 * 2  # a token's keys and values of one layer
    assert resolve("store:format=int8,unit=8,recent=16").nbytes(100, g) == 2 * (
        20 * exact + 2 * 2 * (80 * 64 + 10 * 4)  # 84 tokens are due: ten whole units
    )
    index = resolve("recall:index=means,unit=4,tokens=40,sinks=4,recent=8,full_layers=1")
    sinks, pages = 2 * 8, 22  # 101 - 4 sinks - 8 recent: 89 tokens, 22 whole pages
    assert index.nbytes(101, g) == 2 * 101 * exact + sinks + 2 * pages * 64 * 2
    score = resolve("evict:score=value-norm,tokens=40,when=prompt,recent=8")
    assert score.nbytes(100, g) == 2 * 40 * exact
    between = resolve("kivi-between:bits=4,exact=1")
    assert between.nbytes(300, Geometry(3, 4, 2, 64, torch.bfloat16)) == (
        2 * 300 * exact + resolve("kivi:bits=4").nbytes(300, Geometry(1, 4, 2, 64, torch.bfloat16))
    )


def test_problems_of_a_part_name_the_layer():
    (problem,) = resolve("kivi-between:exact=3").problems(Geometry(2, 4, 2, 64, torch.bfloat16))
    assert problem.startswith("layers 'first 3': kvloom does not cache all of these")


def test_the_score_weighs_values():
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    index = torch.arange(9).view(1, 1, -1)
    step = Step(q, k, v, 0.25, index, 9)
    score = SCORERS["value-norm"]
    want = step.mass() * v.square().sum(dim=-1).sqrt()
    torch.testing.assert_close(checked(score(), step), want)
    torch.testing.assert_close(checked(score(0), step), step.mass())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_format_returns_what_it_packed(dtype):
    fmt, x = FORMATS["int8"](4), torch.randn(2, 3, 20, 16).to(dtype)
    tensors = fmt.pack(x)
    assert sum(one.nbytes for one in tensors) == 2 * fmt.nbytes(20, 16, 3)
    again = fmt.unpack(tensors, dtype)
    assert again.dtype == dtype
    error = (again - x).abs().amax() / x.abs().amax()
    assert 0 < error <= (0.5 / 127 if dtype == torch.float32 else 0.01)
    assert [fmt.to_pack(n, 5) for n in (4, 8, 9, 14)] == [0, 0, 4, 8]
    assert fmt.bits_per_value(16) == 8 + 32 / 64


def test_the_index_finds_the_pages_with_the_largest_mean():
    index = INDEXES["means"](4)
    finder, keys = index.finder(), torch.randn(2, 2, 20, 16)
    visible = torch.ones(2, 1, 20, dtype=torch.bool)
    for lo, hi in ((0, 12), (12, 20)):
        finder.extend(keys[:, :, lo:hi], visible[:, :, lo:hi])
    q = torch.randn(2, 4, 16)
    slots = finder.find(q, 8, "mean", lambda: keys)
    for b in range(2):
        for h in range(2):
            rated = (q[b, 2 * h : 2 * h + 2] @ keys[b, h].view(5, 4, 16).mean(1).T).mean(0)
            pages = rated.topk(2).indices
            want = {int(p) * 4 + i for p in pages for i in range(4)}
            assert set(slots[b, h].tolist()) == want
    assert finder.means.nbytes == 2 * 2 * index.nbytes(20, 16, 4)


def test_recipes_and_choices_are_listed():
    run = CliRunner().invoke
    listed = json.loads(run(app, ["recipes", "--json"]).stdout)
    assert listed[-1] == {
        "name": "kivi-between",
        "summary": "KIVI, but for the first and the last layers, which stay exact.",
        "options": {"bits": 2, "exact": 1, "residual": 128},
    }
    assert [one["name"] for one in listed] == list(RECIPES)
    page = run(app, ["recipes", "evict:score=value-norm"]).stdout
    assert "value-norm: power=1.0" in page
    assert 'kind = "value-norm"' in page
    shown = json.loads(run(app, ["recipes", "store", "--json"]).stdout)
    assert shown["choices"]["int8"] == {"unit": 4}
    assert "KIVI between exact first and last layers" in run(app, ["recipes", SPELLED[5]]).stdout


def test_a_distribution_with_entry_points_is_enough(tmp_path):
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    names = ("my_score", "my_format", "my_recipe", "broken")
    lines = "\n".join(f"{name} = {name}" for name in names)
    (info / "entry_points.txt").write_text(f"[kvloom.plugins]\n{lines}\n")
    path = os.pathsep.join([str(tmp_path), str(HERE), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-m", "kvloom_lab", "recipes", SPELLED[5]],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert 'kind = "value-norm"' in found.stdout
    assert "kvloom plugin 'broken' (broken) failed to load: ModuleNotFoundError" in found.stderr


def test_an_option_without_default_is_asked_for():
    @kvloom.register_score
    @dataclass(frozen=True)
    class Powered(Scorer):
        power: float
        kind: ClassVar[str] = "powered"

        def __call__(self, step: Step) -> torch.Tensor:
            return step.v.float().norm(dim=-1)

    with pytest.raises(RecipeError, match="score 'powered' needs a value: power="):
        resolve("evict:score=powered,fraction=0.5")
    assert resolve("evict:score=powered,power=2,fraction=0.5")


def test_an_option_of_the_recipe_and_of_its_part_is_refused():
    @kvloom.register_score
    @dataclass(frozen=True)
    class Newest(Scorer):
        recent: int = 8
        kind: ClassVar[str] = "newest"

        def __call__(self, step: Step) -> torch.Tensor:
            return step.v.float().norm(dim=-1)

    with pytest.raises(RecipeError, match="score 'newest' and recipe 'evict' both have an option"):
        resolve("evict:score=newest,recent=4,tokens=40")
