"""The tasks of `kvloom eval`: what is generated, and how answers are scored."""

import numpy as np
import pytest
from task_sources import ruler_source, source

import tiny
from kvloom.errors import InputError
from kvloom_lab.eval.needle_text import hide_near_depths
from kvloom_lab.eval.sample import Question, task_batches
from kvloom_lab.eval.tasks import TASKS, task_named
from kvloom_lab.eval.tasks.text import repetition


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if not task.needs_data])
def test_samples_of_one_context_say_so_by_their_names(name):
    task = task_named("ruler:vt" if name == "ruler" else name)
    settings = {"lengths": [900, 1000], "samples": 2}
    found = task.batches((ruler_source if name == "ruler" else source)(**settings))
    contexts = []
    for batch in found:
        names = [task.context_of(f"code/{sample.name}") for sample in batch.samples]
        assert len(set(names)) == len(batch.ids)
        contexts += dict.fromkeys(names)
    assert len(set(contexts)) == len(contexts)


# perplexity and free


def test_rows_of_text_are_a_context_and_its_continuation():
    found = task_named("perplexity").batches(source(lengths=[40, 60], samples=3, batch=2))
    assert [b.ids.shape[1] for b in found] == [40, 40, 60, 60]
    assert [s.name for b in found for s in b.samples][:3] == ["40/0", "40/1", "40/2"]
    row = found[0].samples[0]
    assert len(row.payload) == 9  # the token after the context, and 8 to predict
    assert (row.context + source().decode(row.payload)).removeprefix("<s>") in tiny.TEXT


def test_short_prompts_have_every_length_up_to_the_context():
    found = task_named("short").batches(source(lengths=[300], samples=2))
    assert [b.ids.shape for b in found] == [(2, 64), (2, 128), (2, 256)]
    assert [len(s.payload) for b in found for s in b.samples] == [9] * 6
    with pytest.raises(InputError, match="prompts have 64 tokens or more, and --context has 60"):
        task_named("short").batches(source(lengths=[60]))


def test_repetition_is_the_share_of_repeated_4_grams():
    assert repetition([1, 2, 3, 4, 5, 6]) == 0
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repetition([7] * 8) == pytest.approx(4 / 5)
    assert repetition([1, 2]) == 0


# niah and multiturn


@pytest.mark.parametrize("variant", ["single", "multikey", "multivalue", "multiquery", "passkey"])
@pytest.mark.parametrize("ask", ["after", "inside"])
def test_niah_contexts_have_the_exact_length(variant, ask):
    task, made_from = task_named(f"niah:{variant}"), source(lengths=[900], ask=ask)
    if (variant, ask) == ("multikey", "inside"):
        with pytest.raises(InputError, match="use it with --ask after"):
            task.batches(made_from)
        return
    found = task.batches(made_from)
    assert {b.ids.shape for b in found} == {(1, 900)}
    for batch in found:
        for sample in batch.samples:
            assert all(value in sample.context for value in sample.payload.expected)
            asked = "What is the pass key?" if variant == "passkey" else "Question:"
            assert (asked in sample.context) == (ask == "inside")
            assert (asked in sample.question) == (ask == "after")
            assert ask == "after" or len(sample.payload.ids) == 1


def test_niah_facts_are_at_their_depth():
    for batch in task_named("niah:single").batches(source(lengths=[900])):
        sample = batch.samples[0]
        before = sample.context[: sample.context.index(f"is {sample.payload.expected[0]}")]
        at = len(tiny.tokenizer().encode(before, add_special_tokens=False)) / 900
        assert at == pytest.approx(sample.fields["depth"], abs=0.06)  # a line, and the fact itself


@pytest.mark.parametrize("name", ["niah:multikey", "multiturn", "ruler:niah_multiquery+vt+cwe+fwe"])
def test_samples_depend_on_the_seed_only(name):
    def texts(seed):
        settings = {"lengths": [1200], "seed": seed}
        made_from = ruler_source(**settings) if "ruler" in name else source(**settings)
        return [(s.name, s.context, s.question) for b in task_named(name).batches(made_from)
                for s in b.samples]  # fmt: skip

    first, again, other = texts(1), texts(1), texts(2)
    assert first == again
    assert [x[0] for x in first] == [x[0] for x in other]
    assert all(a[1:] != b[1:] for a, b in zip(first, other, strict=True))


def test_a_fact_in_a_text_without_line_ends_is_at_its_depth():
    made_from = source("word " * 2000)
    fact = [1, 2, 3]
    ids = hide_near_depths(
        made_from.tokenizer,
        made_from.text_ids,
        np.random.default_rng(0),
        [fact, fact],
        [0.25, 0.75],
        406,
    )
    assert len(ids) == 406
    assert [i for i in range(404) if ids[i : i + 3] == fact] == [100, 303]


def test_a_chat_template_goes_around_the_pass_key(chat):
    batch = task_named("niah:passkey").batches(source(tokenizer=chat, lengths=[400]))[0]
    sample = batch.samples[0]
    assert sample.context.startswith("<user>There is an important info hidden")
    assert sample.question == "\nWhat is the pass key?</user><bot>The pass key is "
    assert batch.ids.shape == (1, 400)


def test_turns_ask_about_the_facts_of_each_document_in_order():
    batch = task_named("multiturn").batches(source(lengths=[600]))[0]
    assert batch.ids.shape == (1, 600)
    assert [s.fields["turn"] for s in batch.samples] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [s.fields["document"] for s in batch.samples] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [len(s.payload[0]) for s in batch.samples] == [0, 0, 0, 0, 300, 0, 0, 0]
    places = [s.context.index(s.reference) for s in batch.samples]
    assert places[:4] == sorted(places[:4])
    assert places[4:] == sorted(places[4:])
    asked = sum(len(s.payload[1].ids) + s.payload[1].tokens for s in batch.samples)
    assert task_named("multiturn").positions(batch) == 300 + asked - 1
    with pytest.raises(InputError, match="eight questions"):
        task_named("multiturn").batches(source(ask="inside"))


# metrics


def test_expected_strings_count_whatever_their_case():
    assert (
        Question([], ["alpha", "Beta", "gamma", "delta"], 1).share_in("It is ALPHA and beta.")
        == 0.5
    )


# plans


def test_names_of_tasks_and_parts():
    assert set(TASKS) == {
        "perplexity", "short", "free", "trace", "niah", "ruler", "longbench", "summarize",
        "multiturn", "instructions", "state",
    }  # fmt: skip
    for name, message in {
        "nihah": "there is no task 'nihah'; there are perplexity, short, free, trace, ",
        "free:fast": "the task 'free' has no variants",
        "niah:double": "niah has no variant 'double'",
        "longbench:nq": "longbench has no data set 'nq'",
    }.items():
        with pytest.raises(InputError, match=message):
            task_named(name)


def test_every_task_states_the_positions_after_its_context():
    made_from = source(lengths=[800])
    for name in (
        "perplexity",
        "free",
        "trace",
        "niah:single",
        "multiturn",
        "instructions",
        "state",
    ):
        task = task_named(name)
        need = max(b.ids.shape[1] + task.positions(b) for b in task.batches(made_from))
        assert task_batches([task], made_from, need)
        with pytest.raises(
            InputError, match=f"need {need} positions, and the model has {need - 1}"
        ):
            task_batches([task], made_from, need - 1)


def test_a_context_beyond_the_positions_is_refused_before_samples_are_made():
    with pytest.raises(InputError, match="ruler: a context of 9000000 tokens"):
        task_batches([task_named("ruler")], source(lengths=[9_000_000]), 2048)


def test_a_task_twice_and_data_for_no_task():
    with pytest.raises(InputError, match="sample single/300/0/0 of niah occurs twice"):
        task_batches([task_named("niah:single"), task_named("niah:single")], source(), None)
    with pytest.raises(InputError, match="--data is given, and niah, free takes none"):
        task_batches([task_named("niah"), task_named("free")], source(data_path="x"), None)
    with pytest.raises(InputError, match="the task summarize needs --data: a file of JSON lines"):
        task_batches([task_named("niah"), task_named("summarize")], source(), None)
