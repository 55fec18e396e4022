"""`trace`: the exact model's text is read token by token, and scored by position."""

import math
from itertools import pairwise

import pytest
import torch
from task_sources import source

import tiny
from kvloom import Cache
from kvloom.errors import InputError
from kvloom.recipe.resolve import resolve
from kvloom_lab.eval.evaluate import evaluate
from kvloom_lab.eval.results import ResultFolder, read_run
from kvloom_lab.eval.sample import task_batches
from kvloom_lab.eval.tasks import task_named, trace
from kvloom_lab.eval.tasks.trace import block_edges, by_block, scores
from kvloom_lab.show.pages import page_data

TOKENS = 20
RECIPES = ("full", "window:tokens=16", "kivi:group=16,residual=16",
           "quest:page=4,recent=8,full_layers=0,tokens=32")  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny.llama(max_position_embeddings=256, num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """Two contexts of 60 tokens, read in pieces of at most 3 tokens and 8 blocks."""
    made_from = source(lengths=[60], samples=2, new_tokens=TOKENS)
    plan = task_batches([task_named("trace")], made_from, 256)
    head = {"environment": {"kvloom": "0"}, "model": {}, "settings": {}}
    folder = ResultFolder.open(tmp_path_factory.mktemp("results"), head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "CHUNK", 3)
        evaluate(model, made_from, [resolve(name) for name in RECIPES], plan, folder)
    return folder


@pytest.fixture(scope="module")
def lines(folder):
    return {(line["sample"], line["recipe"]): line for line in folder.lines("trace")}


def logp(model, cache, token):
    with torch.inference_mode():
        ids = torch.tensor([[token]])
        logits = model(ids, past_key_values=cache, use_cache=True).logits[0, -1]
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trace_equals_a_plain_loop(model, lines, recipe):
    batch = task_named("trace").batches(source(lengths=[60], samples=2, new_tokens=TOKENS))[0]
    for row, sample in zip(batch.ids, batch.samples, strict=True):
        exact, cache = Cache(model, "full"), Cache(model, recipe)
        for each in (exact, cache):
            with torch.inference_mode():
                model(row[None], past_key_values=each, use_cache=True)
        token, kl, same, sizes = int(sample.payload[0]), [], [], []
        for _ in range(TOKENS):
            p, q = logp(model, exact, token), logp(model, cache, token)
            kl.append((p.exp() * (p - q)).sum().clamp(min=0).item())
            same.append(float(p.argmax() == q.argmax()))
            token = int(p.argmax())
            sizes.append(cache.nbytes)
        line = lines[sample.name, recipe]
        assert line["curves"]["kl"] == pytest.approx(kl, abs=1e-4)
        assert line["scores"]["kl_mean"] == pytest.approx(sum(kl) / TOKENS, abs=1e-4)
        assert line["scores"]["agreement"] == pytest.approx(sum(same) / TOKENS)
        ends = block_edges(TOKENS)
        assert line["curves"]["kv_mib"] == pytest.approx(
            [sizes[end - 1] / 2**20 for end in ends[1:]], rel=1e-4
        )
        assert line["kv_bytes"] == sizes[-1]
        assert line["curves"]["agreement"] == pytest.approx(
            [sum(same[a:b]) / (b - a) for a, b in pairwise(ends)], rel=1e-4
        )


def test_full_has_no_divergence_and_says_what_it_wrote(lines):
    full = lines["60/0", "full"]
    repeated = full["scores"]["repetition"]
    assert full["scores"] == {
        "kl_mean": 0, "agreement": 1, "kl_p999": 0, "kl_slope": 0, "repetition": repeated,
    }  # fmt: skip
    assert {line["scores"]["repetition"] for (s, _), line in lines.items() if s == "60/0"} == {
        repeated
    }
    assert full["answer"] == "".join(full["tokens"])
    window = lines["60/0", RECIPES[1]]
    assert window["answer"] == ""
    assert window["scores"]["kl_mean"] > 0
    assert window["curves"]["kv_mib"][-1] == window["curves"]["kv_mib"][0]
    assert full["curves"]["kv_mib"][-1] > full["curves"]["kv_mib"][0]


def test_scores_of_a_text():
    kl = torch.tensor([0.0, 0.002, 0.004, 0.006])
    found = scores(kl, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert found["kl_mean"] == pytest.approx(0.003)
    assert found["agreement"] == 0.75
    assert found["kl_p999"] == pytest.approx(0.005994)
    assert found["kl_slope"] == pytest.approx(2.0)  # nats per 1,000 tokens
    assert math.isnan(scores(kl[:1], kl[:1])["kl_slope"])


def test_blocks_are_equal_and_have_a_position_each():
    assert block_edges(512) == list(range(0, 513, 64))
    assert block_edges(20) == [0, 3, 5, 8, 10, 13, 15, 18, 20]
    assert block_edges(3) == [0, 1, 2, 3]
    kl = torch.arange(16.0)
    found = by_block(kl, (kl < 8).float())
    assert found["kl_mean"] == [0.5 + 2 * i for i in range(8)]
    assert found["agreement"] == [1] * 4 + [0] * 4
    assert found["kl_p999"] == pytest.approx([2 * i + 0.999 for i in range(8)])


def test_the_report_shows_blocks_at_their_positions(folder, lines):
    task = page_data([read_run(folder.path)])[0]["runs"][0]["tasks"][0]
    (row,) = [row for row in task["rows"] if row["recipe"] == "full"]
    at, mib = row["curves"]["kv_mib"]
    assert at == list(range(TOKENS))
    assert mib[:4] == pytest.approx([mib[0]] * 3 + [mib[3]])  # the first block has 3 positions
    assert mib[-1] == pytest.approx(lines["60/0", "full"]["kv_bytes"] / 2**20, rel=1e-4)
    assert task["scores"]["kl_slope"] == "lower"


def test_a_trace_beyond_the_positions_is_refused():
    made_from = source(lengths=[60], new_tokens=200)
    with pytest.raises(InputError, match="trace: a context of 60 tokens and the 200 or more after"):
        task_batches([task_named("trace")], made_from, 256)
