"""`generate()` with a prompt store gives the same answers, and reads what is stored only once."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import FunctionType

import pytest
import torch
import zoo

import kvloom
import probe
from backends import by_reference
from kvloom.errors import CacheMisuse, InputError
from kvloom.hf.prompts.identity import BLOCK
from kvloom.recipe.resolve import resolve

pytestmark = by_reference  # none of this depends on kernels

PACKED = "near-lossless:group=16,residual=32"
EVICTED = "snapkv:tokens=40,window=8"
RECIPES = ["full", PACKED, EVICTED, "quest:tokens=48,page=4,sinks=4,recent=8,full_layers=1"]
PROCESSES = multiprocessing.get_context("fork")


def prompt(tokens: int, seed: int = 0, shared: int = 0) -> torch.Tensor:
    """A prompt of random tokens, whose first `shared` ones every seed has."""
    ids = torch.randint(3, 199, (1, tokens), generator=torch.Generator().manual_seed(seed))
    ids[:, :shared] = torch.randint(
        3, 199, (1, shared), generator=torch.Generator().manual_seed(1000)
    )
    return ids


def answer(model, ids, **options):
    """The answer to a prompt, and its logits [T, V]."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
        return_dict_in_generate=True, output_logits=True, eos_token_id=None, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def in_two_calls(model, recipe, ids):
    """What `answer` gives for the recipe alone: whole blocks, then the rest."""
    cache = kvloom.Cache(model, recipe)
    with torch.no_grad():
        model(ids[:, : (ids.shape[1] - 1) // BLOCK * BLOCK], past_key_values=cache)
    return answer(model, ids, past_key_values=cache)


def equal(one, other) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def reused(model, recipe, store, ids) -> int:
    return store.longest(model, recipe, ids)[1]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "gpt2", "qwen3-next", "bloom"])
def test_a_prompt_that_is_loaded_gives_the_answer_of_one_that_is_read(name, recipe, tmp_path):
    if name in ("gpt2", "bloom") and recipe != PACKED:
        pytest.skip("one recipe with positions of each kind")
    model, ids = zoo.build(name), prompt(150)
    store = kvloom.PromptStore(tmp_path)
    expected = in_two_calls(model, recipe, ids)
    with kvloom.attach(model, recipe, store=store):
        cold = answer(model, ids)
        before = store.report()
        assert (before.given, before.reused, before.read) == (150, 0, 150)
        assert equal(cold, expected)
        assert equal(answer(model, ids), expected)
        assert equal(answer(copy.deepcopy(model), ids), expected)
    after = store.report()
    assert (after.given, after.reused, after.read, after.entries) == (300, 128, 172, 1)
    assert (after.prompts, after.bypassed) == (2, 0)
    assert "of 300 tokens 128 reused and 172 read" in str(after)


def test_a_longer_prompt_continues_and_a_short_one_stores_nothing(tmp_path):
    model, store = zoo.build("llama-gqa"), kvloom.PromptStore(tmp_path)
    ids = prompt(260)
    with kvloom.attach(model, PACKED, store=store):
        for tokens, held in ((64, 0), (65, 64), (65, 64), (200, 192), (128, 192), (260, 256)):
            answer(model, ids[:, :tokens])
            assert reused(model, PACKED, store, ids) == held
    report = store.report()
    # 65: 64; 200: 64; 128: 64, as its last token is always read; 260: 192
    assert (report.reused, report.entries) == (64 + 64 + 64 + 192, 3)


def test_a_beginning_that_two_prompts_share_is_an_entry_if_the_recipe_can_be_cut(tmp_path):
    model = zoo.build("llama-gqa")
    for recipe, shared in ((PACKED, 128), (EVICTED, 0)):
        store = kvloom.PromptStore(tmp_path / recipe.partition(":")[0])
        with kvloom.attach(model, recipe, store=store):
            for seed, held in ((1, 0), (2, 0), (3, shared)):
                ids = prompt(250, seed, shared=140)
                assert reused(model, recipe, store, ids) == held
                first = answer(model, ids)
                assert equal(answer(model, ids), first)
                assert reused(model, recipe, store, ids) == 192
    assert [resolve(x).reuse for x in RECIPES] == ["blocks", "blocks", "whole", "whole"]
    assert resolve("kivi:group=16@first 1=h2o").reuse == "whole"


def test_in_inference_mode(tmp_path):
    model, ids, store = zoo.build("llama-gqa"), prompt(150), kvloom.PromptStore(tmp_path)
    expected = in_two_calls(model, PACKED, ids)
    with kvloom.attach(model, PACKED, store=store), torch.inference_mode():
        for _ in range(2):
            out = model.generate(
                ids, max_new_tokens=6, do_sample=False, eos_token_id=None,
                return_dict_in_generate=True,
            )  # fmt: skip
            assert torch.equal(out.sequences, expected[0])
    with torch.no_grad():
        model(ids[:, :1], past_key_values=out.past_key_values)
    assert store.report().reused == 128


def test_by_hand(tmp_path):
    model, ids = zoo.build("llama-gqa"), prompt(150)[0]
    store = kvloom.PromptStore(tmp_path, max_bytes=1 << 22, max_age=3600)
    cache, held = store.longest(model, PACKED, ids)
    assert held == cache.get_seq_length() == 0
    with torch.no_grad():
        model(ids[None, :128], past_key_values=cache)
    store.put(cache, ids[:128])
    store.put(cache, ids[:128])
    again, held = pickle.loads(pickle.dumps(store)).longest(model, PACKED, ids)
    assert held == again.get_seq_length() == 128
    with torch.no_grad():
        outs = [model(ids[None, 128:], past_key_values=x).logits for x in (cache, again)]
    assert equal(*[[x] for x in outs])
    for wrong in (ids[:64], ids, ids[:0], ids[:128].reshape(2, 64), ids.float(), ids.tolist()):
        with pytest.raises(CacheMisuse):
            store.put(again, wrong)
    two = kvloom.Cache(model, PACKED)
    with torch.no_grad():
        model(ids[:128].reshape(2, 64), past_key_values=two)
    with pytest.raises(CacheMisuse, match="one row"):
        store.put(two, ids[:64])
    for options in ({"max_bytes": "20 apples"}, {"max_age": "old"}, {"max_bytes": 0}):
        with pytest.raises(InputError):
            kvloom.PromptStore(tmp_path, **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model, ids: {"input_ids": ids.flip(1)}, "the cache has read other token ids"),
        (
            lambda model, ids: {"input_ids": ids, "attention_mask": (ids * 0 + 1).index_fill(
                1, torch.arange(3), 0
            )},
            "its prompt had padding",
        ),
        (
            lambda model, ids: {"input_ids": ids, "position_ids": torch.arange(1, 129)[None]},
            "its prompt had positions of its own",
        ),
        (
            lambda model, ids: {"inputs_embeds": model.get_input_embeddings()(ids)},
            r"its prompt had other inputs \(inputs_embeds\)",
        ),
    ],
)  # fmt: skip
def test_put_refuses_a_cache_of_another_prompt(tmp_path, change, says):
    model, ids = zoo.build("llama-gqa"), prompt(150)[:, :128]
    store = kvloom.PromptStore(tmp_path)
    cache = kvloom.Cache(model, PACKED)
    with torch.no_grad():
        model(**change(model, ids), past_key_values=cache)
    with pytest.raises(CacheMisuse, match=says):
        store.put(cache, ids)


def test_put_knows_the_ids_of_all_calls(tmp_path):
    model, ids = zoo.build("llama-gqa"), prompt(150)[:, :128]
    for cuts in ([127, 1], [1, 1, 126], [64, 64]):
        store = kvloom.PromptStore(tmp_path / str(cuts))
        cache, other = kvloom.Cache(model, PACKED), kvloom.Cache(model, PACKED)
        with torch.no_grad():
            for part in ids.split(cuts, dim=1):
                model(part, past_key_values=cache)
            for part in ids.flip(1).split(cuts, dim=1):
                model(part, past_key_values=other)
        with pytest.raises(CacheMisuse, match="other token ids"):
            store.put(other, ids)
        store.put(copy.deepcopy(cache), ids)
        again, _ = store.longest(model, PACKED, torch.cat([ids, ids], dim=1))
        with pytest.raises(CacheMisuse, match="other token ids"):
            store.put(again, ids.flip(1))


def test_put_takes_tokens_whose_positions_kvloom_closes_up():
    model, ids = zoo.build("gpt2"), prompt(150)[:, :128]
    cache = kvloom.Cache(model, "streaming:tokens=48,positions=renumbered")
    with torch.no_grad():
        for part in ids.split([64] + [1] * 64, dim=1):
            model(part, past_key_values=cache)
    assert cache.token_hash.problem(ids) == ""


def test_put_refuses_tokens_at_positions_of_their_own(tmp_path):
    model, ids = zoo.build("llama-gqa"), prompt(150)[:, :64]
    store, cache = kvloom.PromptStore(tmp_path), kvloom.Cache(model, PACKED)
    with torch.no_grad():
        for i in range(64):
            place = torch.tensor([[i + 100]])
            model(ids[:, i : i + 1], position_ids=place, past_key_values=cache)
    with pytest.raises(CacheMisuse, match="at other positions"):
        store.put(cache, ids)


def test_what_the_store_does_not_identify_is_read_without_it(tmp_path):
    model, ids = zoo.build("llama-gqa"), prompt(100)
    store = kvloom.PromptStore(tmp_path)
    padded = torch.ones_like(ids)
    padded[:, :5] = 0
    embeds = model.get_input_embeddings()(ids).detach()
    cases = {
        "2 rows": {"input_ids": ids.repeat(2, 1)},
        "beams": {"input_ids": ids, "num_beams": 3},
        "padding": {"input_ids": ids, "attention_mask": padded},
        "inputs_embeds": {"inputs_embeds": embeds},
        "drafts": {"input_ids": ids, "prompt_lookup_num_tokens": 2},
        "output_hidden_states": {
            "input_ids": ids, "output_hidden_states": True, "return_dict_in_generate": True,
        },
    }  # fmt: skip

    def run(options):
        torch.manual_seed(0)
        options = {"attention_mask": None, **options}
        out = model.generate(**options, max_new_tokens=4, do_sample=False, eos_token_id=-1)
        return out if isinstance(out, torch.Tensor) else out.sequences

    with kvloom.attach(model, PACKED):
        expected = {reason: run(options) for reason, options in cases.items()}
    with kvloom.attach(model, PACKED, store=store):
        for reason, options in cases.items():
            with pytest.warns(UserWarning, match=reason):
                assert torch.equal(run(options), expected[reason])
        hook = model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match="forward hook"):
            run({"input_ids": ids})
        hook.remove()
        chooses = FunctionType((lambda *_, name: None).__code__, {"__name__": "peft.tuners.lora"})
        chooses.__kwdefaults__ = {"name": None}
        hook = model.model.layers[0].register_forward_pre_hook(partial(chooses, name="b"))
        with pytest.warns(UserWarning, match="the call chooses an adapter of model.layers.0 "):
            run({"input_ids": ids})
        hook.remove()
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match="global forward hook"):
            run({"input_ids": ids})
        hook.remove()
        mlp = model.model.layers[0].mlp
        mlp.own = lambda x: x
        with pytest.warns(UserWarning, match=r"layers.0.mlp has 'own', a function that code of"):
            run({"input_ids": ids})
        del mlp.own
        norm = model.model.norm
        norm.forward = lambda x: type(norm).forward(norm, x)
        with pytest.warns(UserWarning, match="norm has a forward that other code has replaced"):
            run({"input_ids": ids})
        del norm.forward
    decoder = model.model
    own = type(decoder).forward
    decoder.forward = wraps(own)(lambda *args, **kwargs: own(decoder, *args, **kwargs))
    replaced = pytest.warns(UserWarning, match="model has a forward that other code has replaced")
    with kvloom.attach(model, PACKED, store=store), replaced:  # kvloom's forward is around it
        run({"input_ids": ids})
    del decoder.forward
    with kvloom.attach(model, PACKED, store=store), torch.no_grad():
        model(ids)  # no generate(): no store
    report = store.report()
    assert report.prompts == report.bypassed == len(cases) + 6
    assert report.entries == 0


@pytest.mark.parametrize(
    ("recipe", "span"), [("h2o:tokens=70,recent=0.1", (2, 90)), ("snapkv:tokens=70", (-20, -12))]
)
def test_a_recipe_that_protects_tokens_of_the_whole_prompt_is_read_without_it(
    tmp_path, recipe, span
):
    model, store, ids = zoo.build("llama-gqa"), kvloom.PromptStore(tmp_path), prompt(120)
    found = resolve(recipe)
    found = replace(found, protect=replace(found.protect, spans=(span,)))
    warned = pytest.warns(UserWarning, match="protects tokens of a whole prompt")
    with kvloom.attach(model, found, store=store), warned:
        out = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True)
    assert store.report().entries == 0
    first, end = (x if x >= 0 else x + 120 for x in span)
    for layer in probe.layers(out.past_key_values) if recipe.startswith("h2o") else ():
        held = layer.logical()
        kept = ((held >= first) & (held < end)).sum(dim=-1)
        assert (kept >= min(end - first, 63)).all()  # 7 of its tokens are recent


def test_a_prompt_with_arguments_of_its_own_is_read_without_the_store(tmp_path):
    model, store = zoo.build_with_images("gemma3"), kvloom.PromptStore(tmp_path)
    inputs = zoo.image_prompt(model, 70, 20)
    with kvloom.attach(model, PACKED, store=store), pytest.warns(UserWarning, match="the call has"):
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert store.report().entries == 0


SCRIPT = """
import sys, torch, kvloom, zoo
from test_prompt_store import answer, prompt
recipe, folder, tokens = sys.argv[1:]
torch.set_num_threads(1)
model, store = zoo.build("llama-gqa"), kvloom.PromptStore(folder)
kvloom.attach(model, recipe, store=store)
answers = [answer(model, prompt(150, seed, 70)) for seed in range(3)]
assert store.report().reused == int(tokens), store.report()
torch.save(answers, folder + ".pt")
"""


def test_the_ladder(tmp_path):
    """Off, cold, warm, new process, after kill -9, other tenant: all answers are equal."""
    model, folder = zoo.build("llama-gqa"), tmp_path / "store"
    prompts = [prompt(150, seed, shared=70) for seed in range(3)]

    def answers(store):
        with kvloom.attach(model, EVICTED, store=store):
            return [answer(model, ids) for ids in prompts]

    def check(answers_now, store=None, tokens=0):
        assert all(map(equal, answers_now, off))
        assert store is None or store.report().reused == tokens

    off = [in_two_calls(model, EVICTED, ids) for ids in prompts]
    store = kvloom.PromptStore(folder)
    check(answers(store), store, 0)
    store = kvloom.PromptStore(folder)
    check(answers(store), store, 3 * 128)
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "KVLOOM_KERNELS": "ref"}
    command = [sys.executable, "-c", SCRIPT, EVICTED, str(folder), str(3 * 128)]
    subprocess.run(command, check=True, env=environment)
    check(torch.load(f"{folder}.pt", weights_only=True))
    killed = PROCESSES.Process(target=put_forever, args=(model, folder))
    killed.start()
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*.safetensors"))) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    store = kvloom.PromptStore(folder)
    assert store.verify() == {}
    assert not list(folder.glob(".*"))
    assert len(store.entries()) == len(list(folder.glob("*.safetensors"))) >= 6
    check(answers(store), store, 3 * 128)
    other = kvloom.PromptStore(folder, tenant="other")
    check(answers(other), other, 0)


def put_forever(model, folder):
    """Store one prompt after the other until this process is killed."""
    kvloom.attach(model, EVICTED, store=kvloom.PromptStore(folder))
    for seed in range(100, 10_000):
        answer(model, prompt(150, seed))


def test_several_processes_share_a_folder(tmp_path):
    """No wrong answer, no deadlock, no file without a row, and no row without a file."""
    model = zoo.build("llama-gqa")
    prompts = [prompt(150, seed) for seed in range(4)]
    expected = [in_two_calls(model, EVICTED, ids) for ids in prompts]
    store = kvloom.PromptStore(tmp_path)
    workers = [
        PROCESSES.Process(target=work, args=(model, store, prompts, expected, number))
        for number in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert store.verify() == {}
    names = {path.stem for path in tmp_path.glob("*.safetensors")}
    assert names == {entry.key for entry in store.entries()}
    assert not list(tmp_path.glob(".*")) + list(tmp_path.glob("*.damaged"))


def work(model, store, prompts, expected, number):
    """Answer prompts in another order in each process, where the store has room for two."""
    warnings.simplefilter("error")
    folder = store.folder
    assert len(store.entries()) < 3  # by the connection of another process
    size = max_bytes_of_two(model, folder.with_name(f"size-{number}"), prompts[0])
    kvloom.attach(model, EVICTED, store=kvloom.PromptStore(folder, max_bytes=size))
    order = torch.Generator().manual_seed(number)
    for i in torch.randint(4, (12,), generator=order).tolist():
        assert equal(answer(model, prompts[i]), expected[i])


def max_bytes_of_two(model, folder, ids):
    """The size of a folder with two and a half entries of such a prompt."""
    store = kvloom.PromptStore(folder)
    with kvloom.attach(model, EVICTED, store=store):
        answer(model, ids)
    return store.report().nbytes + store.entries()[0].nbytes * 3 // 2
