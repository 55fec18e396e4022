"""The folder of results: what is finished is not lost, and other runs are not mixed in."""

import errno
import json
from pathlib import Path

import pytest

import tiny
from kvloom import __version__
from kvloom.errors import InputError
from kvloom.recipe.resolve import resolve
from kvloom_lab.eval.evaluate import evaluate
from kvloom_lab.eval.results import FORMAT, ResultFolder, read_head
from kvloom_lab.eval.sample import Source, task_batches
from kvloom_lab.eval.tasks import task_named

RUN = {
    "environment": {"kvloom": __version__, "threads": 1},
    "model": {"name": "tiny", "weights": "ab"},
    "settings": {"tasks": ["perplexity"], "seed": 0},
}
RECIPES = [resolve(name) for name in ("full", "window:tokens=16", "rtn:group=16")]


def run_tasks(model, folder, text=tiny.TEXT, progress=None):
    source = Source.of(
        tiny.tokenizer(), text, lengths=[40], samples=3, new_tokens=4, batch=2, seed=0
    )
    plan = task_batches([task_named("perplexity"), task_named("free")], source, None)
    evaluate(model, source, RECIPES, plan, ResultFolder.open(folder, RUN), progress)


def content(folder):
    """All lines, without times."""
    found = {}
    for name in ("prompts", "perplexity", "free"):
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        found[name] = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    return found


def assert_same(found, want):
    """Equal but for rounding: recipes that are measured alone, not together, round differently."""
    assert type(found) is type(want)
    if isinstance(want, float):
        assert found == pytest.approx(want, rel=1e-4, abs=1e-5)
    elif isinstance(want, dict):
        assert found.keys() == want.keys()
        for name in want:
            assert_same(found[name], want[name])
    elif isinstance(want, list):
        for one, other in zip(found, want, strict=True):
            assert_same(one, other)
    else:
        assert found == want


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_tasks(model, folder)
    return content(folder)


def test_a_whole_run_has_a_line_for_each_sample_and_recipe(whole):
    assert [line["sample"] for line in whole["prompts"]] == ["40/0", "40/1", "40/2"] * 2
    for name in ("perplexity", "free"):
        assert len({(x["sample"], x["recipe"]) for x in whole[name]}) == len(whole[name]) == 9


@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_interrupted_run_goes_on(model, tmp_path, whole, after):
    calls = iter(range(after))

    def interrupt(what, units):
        if units and next(calls, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks(model, tmp_path, progress=interrupt)
    assert (tmp_path / "free.jsonl").exists() is (after == 9)
    run_tasks(model, tmp_path)
    assert_same(content(tmp_path), whole)


@pytest.mark.parametrize(("name", "keep"), [("prompts", -20), ("perplexity", -20), ("free", 5)])
def test_a_damaged_last_line_is_removed_and_measured_again(model, tmp_path, whole, name, keep):
    run_tasks(model, tmp_path)
    file = tmp_path / f"{name}.jsonl"
    file.write_bytes(file.read_bytes()[:keep])
    run_tasks(model, tmp_path)
    assert_same(content(tmp_path), whole)


def test_a_finished_run_measures_nothing(model, tmp_path, monkeypatch):
    run_tasks(model, tmp_path)
    monkeypatch.setattr(model, "forward", None)  # a call would fail
    done = []
    run_tasks(model, tmp_path, progress=lambda what, units: done.append(units))
    assert sum(done) == 18


def test_another_text_is_refused(model, tmp_path):
    run_tasks(model, tmp_path)
    with pytest.raises(InputError, match="another text for the sample 40/0 of perplexity"):
        run_tasks(model, tmp_path, text=tiny.TEXT.replace("magic", "other"))


@pytest.mark.parametrize(("part", "name"), [
    ("model", "weights"), ("model", "name"), ("settings", "seed"), ("environment", "kvloom"),
    ("environment", "threads"),
])  # fmt: skip
def test_another_run_is_refused_by_name(tmp_path, part, name):
    ResultFolder.open(tmp_path, RUN)
    ResultFolder.open(tmp_path, RUN)
    other = RUN | {part: RUN[part] | {name: "other"}}
    before = RUN[part][name]
    with pytest.raises(
        InputError, match=f"with {part} {name} {before!r}, and this run has 'other'"
    ):
        ResultFolder.open(tmp_path, other)


def test_results_of_an_unknown_run_are_refused(tmp_path):
    folder = ResultFolder.open(tmp_path, RUN)
    folder.append("perplexity", [{"sample": "40/0", "recipe": "full", "scores": {"nll": 1.0}}])
    (tmp_path / "run.json").unlink()
    with pytest.raises(InputError, match=r"has results and no run\.json"):
        ResultFolder.open(tmp_path, RUN)


def test_another_format_and_other_folders_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"has no run.json, .* give a folder that 'kvloom eval --out' wrote"
    ):
        read_head(tmp_path)
    (tmp_path / "run.json").write_text('{"format": 2}')
    with pytest.raises(InputError, match="has format 2, and this kvloom reads 1"):
        ResultFolder.open(tmp_path, RUN)
    (tmp_path / "run.json").write_text('{"form')
    with pytest.raises(InputError, match=r"run.json' cannot be read"):
        ResultFolder.open(tmp_path, RUN)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .*file'"):
        ResultFolder.open(tmp_path / "file", RUN)


class FullDisk:
    """A file that accepts half of what is written."""

    def __init__(self, opened):
        self.opened = opened

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.opened.close()

    def write(self, data):
        self.opened.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("first", [True, False])
def test_a_full_disk_loses_nothing(model, tmp_path, monkeypatch, whole, first):
    folder = ResultFolder.open(tmp_path, RUN)
    if not first:
        folder.append("perplexity", whole["perplexity"][:2])
    opened = Path.open

    def full_disk(self, mode="r", **options):
        file = opened(self, mode, **options)
        return FullDisk(file) if self.name == "perplexity.jsonl" and mode == "ab" else file

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full_disk)
        with pytest.raises(InputError, match=r"No space left on device; the finished samples are"):
            run_tasks(model, tmp_path)
    assert folder.lines("perplexity") == ([] if first else whole["perplexity"][:2])
    run_tasks(model, tmp_path)
    assert_same(content(tmp_path), whole)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    folder = ResultFolder.open(tmp_path, RUN)

    def refused(self, mode="r", **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InputError, match=r"cannot write to .*free.jsonl': Permission denied"):
        folder.append("free", [{}])
    assert not (tmp_path / "free.jsonl").exists()


def test_line_separators_in_a_text_do_not_end_a_line(tmp_path):
    folder = ResultFolder.open(tmp_path, RUN)
    lines = [{"context": "a\u2028b\x85c\nd"}, {"context": ""}]
    folder.append("prompts", lines)
    assert folder.lines("prompts") == lines
    assert folder.lines("nothing") == []


def test_a_damaged_line_is_named(tmp_path):
    file = tmp_path / "free.jsonl"
    file.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(InputError, match=r"line 2 of '.*free.jsonl' is not JSON"):
        ResultFolder(tmp_path).lines("free")
    file.write_text("")
    assert ResultFolder(tmp_path).lines("free") == []
    assert FORMAT == 1
