"""Damaged and hostile files: each is refused by name, or read as what it says.

A reader may neither crash, hang, run code, need much more memory than the file has bytes, nor load
a changed file of numbers without an error. Files of text may still be valid: then the recipe is
written and read again, and the page has no element that the data bring.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from random import Random

import torch
import zoo
from transformers import PreTrainedModel

import kvloom
from html_elements import parse
from kvloom.calibrate import Settings, calibrate
from kvloom.errors import CalibrationError, InputError, RecipeError, SavedCacheError, StoreError
from kvloom.hf.prompts.folder import INDEX
from kvloom.recipe import Recipe
from kvloom.recipe.resolve import resolve
from kvloom.store.calibration import Calibration
from kvloom_lab.eval.kvpress import read_kvpress
from kvloom_lab.eval.results import read_run
from kvloom_lab.show.pages import page_data, results_page
from limits import limited
from mutations import mutated
from results_folder import write_kvpress, write_results

from .tally import Tally

MUTATIONS = 10_000
ROOM = 256 << 20  # bytes that a reader may need, beside 50 times the file
RECIPES = "near-lossless:group=16,residual=32", "clusterkv:tokens=40,size=8,full_layers=1,tier=host"
FORBIDDEN = "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class"
_ran: list[str] = []
_watching = False


def _hook(event: str, arguments: tuple) -> None:
    if _watching and event in FORBIDDEN:
        _ran.append(event)


@contextmanager
def watched(path: Path):
    """Limit the memory of a block, and refuse that it runs code."""
    global _watching
    _ran.clear()
    with limited("AS", ROOM + 50 * path.stat().st_size):
        _watching = True
        try:
            yield
        finally:
            _watching = False
    assert not _ran, f"runs code: {_ran}"


class Kind:
    """A kind of files: intact ones, and how one is read.

    files: those that are mutated in turn. check: reads what has one changed file; raises an error
    of `refusal`, or `AssertionError`. A changed file that is read is a failure unless `text`.
    """

    def __init__(
        self, files: list[Path], check: Callable[[], None], refusal: type[Exception], text: bool
    ) -> None:
        self.files, self.check, self.refusal, self.text = files, check, refusal, text
        self.whole = [path.read_bytes() for path in files]
        check()  # intact, and all that is imported on first use

    def run(self, draw: Random) -> str:
        """Change a file, and read it; return what became of it."""
        number = draw.randrange(len(self.files))
        path, whole = self.files[number], self.whole[number]
        changed = mutated(whole, draw)
        path.write_bytes(changed)
        try:
            with watched(path), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.check()
        except self.refusal as error:
            text = str(error)
            assert "\n" not in text, f"an error of several lines: {text!r}"
            return "refused"
        finally:
            for file, content in zip(self.files, self.whole, strict=True):
                file.write_bytes(content)
        assert self.text or changed == whole, "a changed file was loaded"
        return "read"


def saved_caches(folder: Path, model: PreTrainedModel) -> Kind:
    """Return saved caches."""
    paths = []
    for number, recipe in enumerate(RECIPES):
        cache = kvloom.Cache(model, recipe)
        with torch.no_grad():
            model(**zoo.batch(2, 80, (0, 17)), past_key_values=cache)
        paths.append(folder / f"{number}.kv")
        cache.save(paths[-1])

    def check() -> None:
        for path in paths:
            kvloom.Cache.load(model, path)

    return Kind(paths, check, SavedCacheError, text=False)


def calibrations(folder: Path, model: PreTrainedModel) -> Kind:
    """Return a calibration."""
    path = folder / "c.kvcal"
    ids = torch.randint(3, 199, (4, 64), generator=torch.Generator().manual_seed(0))
    settings = Settings(contexts=4, context=64, sample_contexts=2, sample_tokens=64, recent=8)
    calibrate(model, ids, [resolve("skvq:group=16,window=8,sinks=2")], path, settings)
    return Kind([path], lambda: void(Calibration.load(path)), CalibrationError, text=False)


def recipes(folder: Path, _: PreTrainedModel) -> Kind:
    """Return recipes as TOML."""
    paths = []
    for name in ("small", "skvq", "clusterkv-2bit@first 1=h2o", "snapkv:head_share=0.2"):
        paths.append(folder / f"{len(paths)}.toml")
        paths[-1].write_text(resolve(name).to_toml())

    def check() -> None:
        for path in paths:
            recipe = resolve(path)
            assert Recipe.from_toml(recipe.to_toml()) == recipe, "another recipe is written"

    return Kind(paths, check, RecipeError, text=True)


def store_entries(folder: Path, model: PreTrainedModel) -> Kind:
    """Return the entries and the index of a prompt store; a damaged one is a miss, never a hit."""
    recipe, ids = RECIPES[0], torch.randint(3, 199, (1, 200))
    store = kvloom.PromptStore(folder)
    cache = kvloom.Cache(model, recipe)
    with torch.no_grad():
        model(ids[:, :128], past_key_values=cache)
    store.put(cache, ids[:, :128])
    del store
    with torch.no_grad():
        expected = model(ids[:, 128:], past_key_values=cache).logits

    def check() -> None:
        store = kvloom.PromptStore(folder)
        try:
            found, tokens = store.longest(model, recipe, ids)
            assert all(str(datetime.fromtimestamp(entry.used)) for entry in store.entries())
            store.index.note([bytes(32)], 2**20)
            assert not store.index.evict(2**40, 2.0**40), "an entry is evicted too early"
        finally:
            store.index._db.close()  # else the next case finds a database that is open
        assert tokens in (0, 128)
        assert found.get_seq_length() == tokens
        if tokens:
            with torch.no_grad():
                logits = model(ids[:, 128:], past_key_values=found).logits
            assert torch.equal(logits, expected), "an entry gives other logits"

    files = [*folder.glob("*.safetensors"), folder / INDEX]
    return Kind(files, check, StoreError, text=True)


def result_folders(folder: Path, _: PreTrainedModel) -> Kind:
    """Return a folder of `kvloom eval`, which becomes a page."""
    few = {"methods": ("kivi", "skvq"), "shares": (1 / 4,), "samples": 2, "positions": 8}
    write_results(folder / "run", **few, context_words=30)
    paths = [folder / "run" / name for name in ("run.json", "prompts.jsonl", "niah.jsonl")]
    return Kind(paths, lambda: check_page([read_run(folder / "run")]), InputError, text=True)


def report_inputs(folder: Path, _: PreTrainedModel) -> Kind:
    """Return a folder of kvpress, which becomes a page."""
    write_kvpress(folder, presses=("snapkv",), ratios=(0.5,))
    return Kind(
        sorted(path for path in folder.rglob("*.*") if path.is_file()),
        lambda: check_page(read_kvpress(folder)), InputError, text=True,
    )  # fmt: skip


def check_page(runs: list) -> None:
    """Assert that the page of these results has the elements that every page has."""
    summary, chunks = page_data(runs)
    tags = [tag for tag, _ in parse(results_page(summary, chunks)).tags if tag == "script"]
    assert len(tags) == 2 + len(chunks), "the data bring a script"


def void(_: object) -> None:
    """Return nothing."""


KINDS = [saved_caches, calibrations, recipes, store_entries, result_folders, report_inputs]


def run_all(tally: Tally) -> None:
    """Mutate files of each kind."""
    sys.addaudithook(_hook)
    model = zoo.build("llama-gqa", head_dim=32)
    for number, make in enumerate(KINDS):
        outcomes = {"refused": 0, "read": 0}
        with tempfile.TemporaryDirectory() as place:
            os.mkdir(folder := Path(place) / make.__name__)
            kind = make(folder, model)
            for seed in tally.numbers(MUTATIONS, (number + 1) / len(KINDS)):
                with tally.case(f"{make.__name__} {seed}", limit_s=20):
                    outcomes[kind.run(Random(seed))] += 1
            shutil.rmtree(folder, ignore_errors=True)
        tally.figures[make.__name__] = sum(outcomes.values())
        tally.figures[f"{make.__name__} read"] = outcomes["read"]
