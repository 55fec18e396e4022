"""A saved cache goes on as the one that was saved, in every form; not every one can be saved."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import dataclass

import pytest
import torch
import zoo
from safetensors.torch import load_file

import kvloom
import probe
from backends import by_reference
from kvloom.calibrate import Settings, calibrate
from kvloom.errors import CacheMisuse, SavedCacheError
from kvloom.keep import Budget, Keep, Mass
from kvloom.recipe.resolve import RECIPES, resolve
from kvloom.recipe.spec import Recipe
from kvloom.store.buffer import Allocation
from kvloom.store.calibration import Calibration
from sampling import slow_except

# Every recipe, so small that after 180 tokens it has dropped, packed and is within a block.
SMALL = {
    "full": "",
    "near-lossless": "group=16,residual=32",
    "balanced": "group=16,residual=32",
    "small": "group=16,residual=32,recent=8,chunk=50",
    "tiny": "group=16,residual=32,recent=8,chunk=50",
    "micro": "group=16,residual=32,recent=8,chunk=50",
    "clusterkv": "tokens=40,size=8,sinks=4,full_layers=1",
    "clusterkv-2bit": "tokens=140,size=8,sinks=4,full_layers=1",
    "dilated": "tokens=40",
    "expected": "tokens=40,recent=8",
    "h2o": "",
    "infinigen": "tokens=40,sinks=4,recent=8,full_layers=1",
    "keyformer": "",
    "kivi": "group=16,residual=32",
    "kivi-4": "group=16,residual=32,meta=fp8",
    "knorm": "tokens=40,recent=8",
    "kvzip": "tokens=40,recent=8,chunk=50",
    "minikv": "residual=32",
    "minikv-pyramid": "residual=32",
    "minikv-snap": "window=8,residual=32",
    "minikv-snap-pyramid": "window=8,residual=32",
    "pyramidkv": "tokens=40,window=8",
    "quest": "tokens=48,page=4,sinks=4,recent=8,full_layers=1",
    "random": "",
    "rptq": "group=16",
    "rtn": "group=16",
    "rotated": "tokens=40,recent=8",
    "skvq": "group=16,window=8,sinks=2",
    "skvq-k2v1.5": "group=16",
    "smoothquant": "group=16",
    "snapkv": "tokens=40,window=8",
    "streaming": "tokens=40",
    "topk": "tokens=40,sinks=4,recent=8,full_layers=1",
    "triattention": "tokens=40,recent=8",
    "turbo": "window=8,sinks=3",
    "vatp": "",
    "window": "tokens=40",
    "evict": "score=observation,window=8,tokens=40,recent=8,when=prompt",
    "recall": "index=clusters,tokens=40,size=8,sinks=4,recent=8,full_layers=1",
    "store": "group=16,bits=3",
}
SPECIAL = [
    "clusterkv:tokens=40,size=8,sinks=4,full_layers=1,tier=host,steps=2,query_heads=each",
    "clusterkv-2bit:tokens=140,size=8,sinks=4,full_layers=1,tier=file",
    "h2o:shared=true,layers=variance",
    "h2o:tokens=40,limit=120,positions=renumbered",
    "keyformer:tokens=40,positions=renumbered",
    "kivi:group=16,residual=32,rotate=true",
    "skvq:group=16,window=8,sinks=2,outliers=4",
    "small:fraction=0.8,group=16,residual=16,recent=8,chunk=50",
    "snapkv:tokens=40,window=8,head_share=0.2",
    "snapkv:tokens=40,window=8,positions=renumbered",
    "window:tokens=40,limit=200",
]
FORMS = [*(f"{name}:{options}" for name, options in SMALL.items()), *SPECIAL]
core_forms = pytest.mark.parametrize(
    "form",
    slow_except(
        FORMS,
        *(form for form in SPECIAL if not form.startswith(("keyformer", "window"))),
        *(f"{name}:{SMALL[name]}" for name in ("kivi", "quest", "streaming", "turbo")),
    ),
)
"""Every form with `-m slow`; by default, forms with every part of a cache between them."""
CALIBRATED = [form for form in FORMS if resolve(form).store.calibrated]
KIVI = "kivi:group=32,residual=32"  # other tests compile its kernel, too
IDS = zoo.batch(3, 220, (0, 17, 60))
PROMPT, SAVED = 170, 180


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = zoo.build("llama-gqa", head_dim=32)
    path = tmp_path_factory.mktemp("llama") / "c.kvcal"
    ids = torch.randint(3, 199, (4, 64), generator=torch.Generator().manual_seed(0))
    settings = Settings(contexts=4, context=64, sample_contexts=2, sample_tokens=64, recent=8)
    calibrate(model, ids, [resolve(form) for form in CALIBRATED], path, settings)
    return model, path


@pytest.fixture
def kivi(llama):
    """A model and a cache of a short prompt."""
    cache = kvloom.Cache(llama[0], KIVI)
    step(llama[0], cache, 0, 70)
    return llama[0], cache


def step(model, cache, lo: int, hi: int, rows=slice(None)) -> torch.Tensor:
    """Logits of tokens lo to hi behind those that the cache holds."""
    ids, mask = IDS["input_ids"][rows, lo:hi], IDS["attention_mask"][rows, :hi]
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits


def go_on(model, cache) -> list:
    """What a cache of 180 tokens answers from there on, and how much it holds."""
    found = []
    for lo, hi in ((180, 181), (181, 182), (182, 200), (200, 201), (201, 202)):
        found += [step(model, cache, lo, hi), cache.nbytes, cache.tokens_read, cache.traffic]
    cache.reorder_cache(torch.tensor([0, 0, 2]))
    rows = torch.tensor([0, 0, 2])
    found += [step(model, cache, lo, lo + 1, rows) for lo in range(202, 220)]
    return [*found, cache.nbytes]


def same(a: list, b: list) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def held(path) -> int:
    """Bytes of the tensors in a file, without checksum, masks and lists of rows, as in `nbytes`."""
    uncounted = ("retriever.visible", ".extents", ".source", "checksum")
    return sum(x.nbytes for name, x in load_file(path).items() if not name.endswith(uncounted))


def written(cache, folder) -> bytes:
    """What a file of the cache says."""
    path = folder / "again.kv"
    cache.save(path)
    said = path.read_bytes()
    path.unlink()
    return said


@by_reference
def test_every_recipe_is_here():
    assert SMALL.keys() == RECIPES.keys()


@core_forms
def test_a_loaded_cache_goes_on_as_the_one_that_was_saved(llama, form, tmp_path):
    model, calibration = llama
    if form in CALIBRATED:
        form = f"{form},calibration={calibration}"
    cache, path = kvloom.Cache(model, form), tmp_path / "prefix.kv"
    step(model, cache, 0, PROMPT)
    cache.save(path)
    assert held(path) == cache.nbytes  # where nothing is spare
    for lo, hi in ((PROMPT, 171), (171, 179), (179, SAVED)):
        step(model, cache, lo, hi)
    cache.save(path)
    assert held(path) <= cache.nbytes
    loaded = kvloom.Cache.load(model, path)
    assert (loaded.recipe, loaded.nbytes) == (cache.recipe, cache.nbytes)
    assert (loaded.get_seq_length(), loaded.tokens_read) == (SAVED, cache.tokens_read)
    assert written(loaded, tmp_path) == path.read_bytes()  # nothing was lost
    assert same(go_on(model, loaded), go_on(model, cache))
    assert written(loaded, tmp_path) == written(cache, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["prefix.kv"]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("gemma3", "kivi:group=16,residual=32"),
        ("gpt-oss", "near-lossless:group=16,residual=16"),
        ("gemma4-shared", "snapkv:tokens=20,window=8"),
        ("mistral-sliding", "full"),
        ("gpt2", "streaming:tokens=40,positions=renumbered"),
        ("gptj", "h2o:tokens=40,positions=renumbered"),
        ("falcon-alibi", "quest:tokens=48,page=4,sinks=4,recent=8,full_layers=1"),
        ("mpt", "snapkv:tokens=40,window=8,positions=renumbered"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("prompt", [9, 60])
def test_other_models_and_their_sliding_layers_go_on_too(name, recipe, prompt, tmp_path):
    model = zoo.build(name)
    cache = kvloom.Cache(model, recipe)
    step(model, cache, 0, prompt)
    step(model, cache, prompt, prompt + 1)
    cache.save(tmp_path / "prefix.kv")
    model = zoo.build(name)  # as tomorrow, in another process
    loaded = kvloom.Cache.load(model, tmp_path / "prefix.kv")
    for lo in range(prompt + 1, prompt + 30):
        assert torch.equal(step(model, loaded, lo, lo + 1), step(model, cache, lo, lo + 1))
        assert loaded.nbytes == cache.nbytes


@by_reference
def test_generate_goes_on_behind_a_prefix_in_half_precision(tmp_path):
    model = zoo.build("llama-gqa").bfloat16()
    ids = zoo.batch(1, 90, (0,))["input_ids"]
    cache = kvloom.Cache(model, "skvq:group=16,window=8,reorder=false,clip=0.9")
    with torch.no_grad():
        model(input_ids=ids[:, :80], past_key_values=cache)
    cache.save(tmp_path / "prefix.kv")
    loaded = kvloom.Cache.load(model, tmp_path / "prefix.kv")
    answers = [
        model.generate(ids, past_key_values=each, max_new_tokens=12, do_sample=False)
        for each in (cache, loaded)
    ]
    assert torch.equal(*answers)
    assert loaded.nbytes == cache.nbytes


def test_what_was_chosen_with_a_trace_can_be_told(llama, tmp_path):
    model, _ = llama
    cache = kvloom.Cache(model, "snapkv:tokens=40,window=8")
    probe.observe(cache)
    step(model, cache, 0, 70)
    cache.save(tmp_path / "prefix.kv")
    loaded = kvloom.Cache.load(model, tmp_path / "prefix.kv")
    for one, other in zip(probe.layers(cache), probe.layers(loaded), strict=True):
        assert torch.equal(one.logical(), other.logical())


def test_a_crop_goes_back_as_far(llama, tmp_path):
    model, _ = llama
    cache = kvloom.Cache(model, "quest:tokens=48,page=4,sinks=4,recent=8,full_layers=1,tier=host")
    step(model, cache, 0, 90)
    cache.save(tmp_path / "prefix.kv")
    loaded = kvloom.Cache.load(model, tmp_path / "prefix.kv")
    for each in (cache, loaded):
        each.crop(-20)
    assert torch.equal(step(model, loaded, 70, 71), step(model, cache, 70, 71))


def test_an_empty_cache_comes_back_empty(llama, tmp_path):
    model, _ = llama
    kvloom.Cache(model, KIVI).save(tmp_path / "none.kv")
    loaded = kvloom.Cache.load(model, tmp_path / "none.kv")
    assert (loaded.nbytes, loaded.get_seq_length()) == (0, 0)
    assert torch.equal(step(model, loaded, 0, 70), step(model, kvloom.Cache(model, KIVI), 0, 70))


@by_reference
def test_a_file_may_be_read_by_whom_the_user_lets_read_files(kivi, tmp_path):
    kivi[1].save(tmp_path / "prefix.kv")
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_nothing_of_the_file_is_needed_once_it_is_loaded(kivi, tmp_path):
    model, cache = kivi
    path = tmp_path / "prefix.kv"
    cache.save(path)
    loaded = kvloom.Cache.load(model, path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(step(model, loaded, 70, 71), step(model, cache, 70, 71))


@by_reference
def test_a_calibration_that_is_gone_or_says_other_things_is_refused(llama, tmp_path):
    model, calibration = llama
    path, own = tmp_path / "prefix.kv", tmp_path / "c.kvcal"
    own.write_bytes(calibration.read_bytes())
    cache = kvloom.Cache(model, f"skvq:group=16,window=8,calibration={own}")
    step(model, cache, 0, 70)
    cache.save(path)
    kvloom.Cache.load(model, path)
    found = Calibration.load(own)
    for name, x in found.tensors.items():
        if name.startswith("clip."):
            x *= 0.5
    found.save(own)
    with pytest.raises(SavedCacheError, match=r"prefix\.kv' was packed with another calibration"):
        kvloom.Cache.load(model, path)
    own.unlink()
    with pytest.raises(SavedCacheError, match=r"prefix\.kv' .* no calibration .*c\.kvcal"):
        kvloom.Cache.load(model, path)


def test_a_cache_in_the_middle_of_something_is_not_saved(kivi, tmp_path):
    model, cache = kivi
    path = tmp_path / "prefix.kv"
    for layer in cache.full_layers:
        layer.cache.recording = True
    step(model, cache, 70, 73)
    with pytest.raises(CacheMisuse, match=r"newest 3 tokens may still be removed; call crop"):
        cache.save(path)
    cache.crop(-1)
    cache.save(path)
    loaded = kvloom.Cache.load(model, path)
    assert loaded.get_seq_length() == 72


def test_copies_know_their_model_and_pickles_do_not(tmp_path):
    model = zoo.build("llama-gqa", head_dim=32)
    cache = kvloom.Cache(model, KIVI)
    copy.deepcopy(cache).save(tmp_path / "copy.kv")
    for lost in (pickle.loads(pickle.dumps(cache)), cache):
        if lost is cache:
            del model
            gc.collect()
        with pytest.raises(CacheMisuse, match="this one's model no longer exists, or was lost"):
            lost.save(tmp_path / "none.kv")


TRANSIENT = ("undo", "_undone", "_traits", "_like", "dtype")


@core_forms
def test_every_attribute_of_a_layers_parts_comes_back(llama, form, tmp_path):
    """A part that gets a new attribute and forgets it in `state` fails here."""
    model, calibration = llama
    if form in CALIBRATED:
        form = f"{form},calibration={calibration}"
    cache, path = kvloom.Cache(model, form), tmp_path / "prefix.kv"
    for lo, hi in ((0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, SAVED)):
        step(model, cache, lo, hi)
    cache.save(path)
    loaded = kvloom.Cache.load(model, path)
    for one, other in zip(probe.layers(cache), probe.layers(loaded), strict=True):
        pairs = zip(one.step_parts().parts, other.step_parts().parts, strict=True)
        for part, copied in pairs:
            assert type(part) is type(copied)
            for name, value in vars(part).items():
                found = vars(copied)[name]
                if isinstance(value, Allocation):  # what lies in the spare room is arbitrary
                    assert found.start == value.start, (type(part), name)
                    assert found.data.shape == value.data.shape, (type(part), name)
                if name in TRANSIENT or not isinstance(value, int | float | str | torch.Tensor):
                    continue
                if isinstance(value, torch.Tensor):
                    assert torch.equal(found, value), (type(part), name)
                else:
                    assert found == value, (type(part), name)


@by_reference
def test_a_part_that_is_not_registered_is_refused(kivi, tmp_path):
    model, path = kivi[0], tmp_path / "none.kv"

    @dataclass(frozen=True)
    class Mine(Mass):
        """A score of somebody's own."""

    mine = kvloom.Cache(model, Recipe(keep=Keep(Budget(20), Mine())))
    with pytest.raises(SavedCacheError, match="'custom' has a part of your own"):
        mine.save(path)
    assert not path.exists()
