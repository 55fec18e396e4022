"""The tasks of `kvloom eval`: what is generated, and how answers are scored."""

import copy
import json
import re
import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import tiny
from for_each import for_each
from kvloom.errors import InputError
from kvloom.eval.sample import Source
from kvloom.eval.task_batches import task_batches
from kvloom.eval.tasks import TASKS, longbench_metrics, ruler, task_named
from kvloom.eval.tasks.asking import share_found
from kvloom.eval.tasks.free import repetition
from kvloom.eval.tasks.haystack import hide
from kvloom.eval.tasks.longbench import LongBench, middle_cut
from kvloom.eval.tasks.longbench_data import DATA_SETS
from kvloom.eval.tasks.ruler import PARTS, Material, Needles, largest
from kvloom.reference import reference_tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
CHAT = "<user>{{ messages[0]['content'] }}</user>{% if add_generation_prompt %}<bot>{% endif %}"
PROSE = " ".join(f"Line {i} is about a {w}." for i, w in enumerate(("cat", "dog", "bird") * 400))


def source(text=tiny.TEXT, tokenizer=None, **settings):
    usual = {"lengths": [300], "samples": 1, "new_tokens": 8, "batch": 4, "seed": 0}
    return Source.of(tokenizer or tiny.tokenizer(), text, **usual | settings)


@pytest.fixture(scope="module")
def chat():
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = CHAT
    return tokenizer


def only(batches):
    assert len(batches) == 1
    return batches[0], batches[0].samples[0]


# perplexity and free


def test_rows_of_text_are_a_context_and_its_continuation():
    found = task_named("perplexity").batches(source(lengths=[40, 60], samples=3, batch=2))
    assert [b.ids.shape[1] for b in found] == [40, 40, 60, 60]
    assert [s.name for b in found for s in b.samples][:3] == ["40/0", "40/1", "40/2"]
    row = found[0].samples[0]
    assert len(row.data) == 9  # the token after the context, and 8 to predict
    assert (row.context + source().decode(row.data)).removeprefix("<s>") in tiny.TEXT


def test_repetition_is_the_share_of_repeated_4_grams():
    assert repetition([1, 2, 3, 4, 5, 6]) == 0
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repetition([7] * 8) == pytest.approx(4 / 5)
    assert repetition([1, 2]) == 0


# niah and multiturn


@for_each("variant", ["single", "multikey", "multivalue", "multiquery", "passkey"])
@for_each("ask", ["after", "inside"])
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
            assert all(value in sample.context for value in sample.data.expected)
            asked = "What is the pass key?" if variant == "passkey" else "Question:"
            assert (asked in sample.context) == (ask == "inside")
            assert (asked in sample.question) == (ask == "after")
            assert ask == "after" or len(sample.data.ids) == 1


def test_niah_facts_are_at_their_depth():
    for batch in task_named("niah:single").batches(source(lengths=[900])):
        sample = batch.samples[0]
        before = sample.context[: sample.context.index(f"is {sample.data.expected[0]}")]
        at = len(tiny.tokenizer().encode(before, add_special_tokens=False)) / 900
        assert at == pytest.approx(sample.fields["depth"], abs=0.06)  # a line, and the fact itself


@for_each("name", ["niah:multikey", "multiturn", "ruler:niah_multiquery+vt+cwe+fwe"])
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
    ids = hide(made_from, np.random.default_rng(0), [fact, fact], [0.25, 0.75], 406)
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
    assert [len(s.data[0]) for s in batch.samples] == [0, 0, 0, 0, 300, 0, 0, 0]
    places = [s.context.index(s.reference) for s in batch.samples]
    assert places[:4] == sorted(places[:4])
    assert places[4:] == sorted(places[4:])
    asked = sum(len(s.data[1].ids) + s.data[1].tokens for s in batch.samples)
    assert task_named("multiturn").positions(batch) == 300 + asked - 1
    with pytest.raises(InputError, match="eight questions"):
        task_named("multiturn").batches(source(ask="inside"))


# RULER: the strings are those of NVIDIA/RULER, scripts/data/synthetic/constants.py


def ruler_source(**settings):
    return source(PROSE, reference_tokenizer(), **settings)


def made(name, units, length=2000, seed=0):
    made_from = ruler_source()
    material = Material(made_from, made_from.text.split(), [], length)
    return PARTS[name].make(np.random.default_rng(seed), units, material)


def test_rulers_single_needle_is_the_official_prompt():
    found = made("niah_single_1", 6)
    needle = re.search(r"One of the special magic numbers for (\S+) is: (\d{7})\.", found.text)
    key, value = needle.groups()
    assert sorted(found.text.split("\n")[1:]) == sorted([NOISE] * 6 + [needle[0]])
    assert found.text.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the number afterwards.\n{NOISE[:9]}"
    )
    assert found.question == (
        f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    )
    assert found.prefix == (
        f" The special magic number for {key} mentioned in the provided text is"
    )
    assert found.expected == [value]


def test_rulers_many_needles_are_the_official_prompt():
    found = made("niah_multiquery", 300)
    needles = dict(re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.",
                              found.text))  # fmt: skip
    assert len(needles) == 4
    assert found.text.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the numbers afterwards.\n"
    )
    query = re.fullmatch(
        r"\nWhat are all the special magic numbers for (.*) mentioned in the provided text\?",
        found.question,
    )[1]
    keys = re.fullmatch(r"(\S+), (\S+), (\S+), and (\S+)", query).groups()
    assert found.expected == [needles[key] for key in keys]
    assert found.prefix == (
        f" The special magic numbers for {query} mentioned in the provided text are"
    )


def test_rulers_variable_tracking_is_the_official_prompt():
    found = made("vt", 8)
    example, text = found.text.split("\n\nMemorize")
    start = " and track the chain(s) of variable assignment hidden in the following text.\n\n"
    assert text.startswith(start)
    assert example.startswith(f"Memorize{start}")
    value = re.search(r"value (\d{5}) in", found.question)[1]
    assert found.question == (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    )
    assert found.prefix == (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables "
        f"are assigned the value {value}, they are: "
    )
    lines = [line for line in text.split("\n") if line.startswith("VAR")]
    names = found.expected
    assert lines == [f"VAR {names[0]} = {value}",
                     *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]  # fmt: skip
    assert text.count(NOISE) == 8
    answer = example.rpartition("they are:  ")[2]  # two spaces, as in the official example
    assert re.fullmatch(r"[A-Z]{3}( [A-Z]{3}){4}", answer)
    assert 400 < len(reference_tokenizer().encode(example + "\n", add_special_tokens=False)) <= 500


@pytest.mark.parametrize(("length", "often", "seldom"), [(2000, 6, 1), (4096, 30, 3)])
def test_rulers_common_words_are_the_official_prompt(length, often, seldom):
    found = made("cwe", 25, length)
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    question = "\nQuestion: What are the 10 most common words in the above list?"
    assert (found.question, found.prefix) == (question, prefix)
    assert found.text.startswith(head)
    example, listed = found.text.removeprefix(head).split(f"\n{head}")
    assert f"{question}{prefix} 1. " in example
    assert example.endswith(example.rpartition(" 10. ")[2])
    words = re.findall(r"\d+\. (\S+)", listed)
    assert [int(n) for n in re.findall(r"(\d+)\. ", listed)] == list(range(1, len(words) + 1))
    counts = Counter(words)
    assert Counter(counts.values()) == {often: 10, seldom: 15}
    assert {w for w, n in counts.items() if n == often} == set(found.expected)


def test_rulers_frequent_words_are_the_official_prompt():
    found = made("fwe", 400)
    head = (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words. "
    )
    assert found.text.startswith(head)
    assert found.question == (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text?"
    )
    assert found.prefix == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    counts = Counter(found.text.removeprefix(head).split(" "))
    first = [word for word, _ in counts.most_common(4)]
    assert first == ["...", *found.expected]
    assert [counts[word] for word in first] == [243, 60, 27, 15]  # 400 / k^2 / zeta(2)


def test_rulers_tasks_are_the_official_ones():
    assert {name: part.tokens for name, part in PARTS.items()} == {
        **dict.fromkeys([f"niah_single_{i}" for i in (1, 2, 3)], 128),
        **dict.fromkeys([f"niah_multikey_{i}" for i in (1, 2, 3)], 128),
        "niah_multivalue": 128, "niah_multiquery": 128, "vt": 30, "cwe": 120, "fwe": 50,
    }  # fmt: skip
    settings = {name: PARTS[name].make.args[0] for name in PARTS if name.startswith("niah")}
    assert settings["niah_multikey_1"] == Needles("essay", num_keys=4)
    assert settings["niah_multikey_3"] == Needles("needle", "uuids", "uuids")
    uuid = made("niah_single_3", 60).expected[0]
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuid
    )


@pytest.mark.sample("values")
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("ask", ["after", "inside"])
def test_ruler_fills_the_context(name, ask):
    tokenizer = reference_tokenizer()
    tokenizer.chat_template = CHAT
    made_from = source(PROSE, tokenizer, lengths=[1800], ask=ask)
    batch, sample = only(task_named(f"ruler:{name}").batches(made_from))
    assert 1800 - 100 < batch.ids.shape[1] <= 1800  # the longest unit states two uuids
    assert sample.context.startswith("<user>")
    assert all(word in sample.context for word in sample.data.expected)
    assert ("</user><bot> " in sample.question) == (ask == "after")
    assert ("</user><bot> " in sample.context) == (ask == "inside")
    assert task_named("ruler").positions(batch) == len(sample.data.ids) + PARTS[name].tokens - 1
    if name not in ("cwe", "vt"):  # their worked examples have questions too
        asked = sample.question.partition("</user>")[0]
        assert ask == "inside" or asked not in sample.context


def test_ruler_refuses_a_context_that_is_too_short():
    with pytest.raises(InputError, match="a context of 200 tokens is too short for vt"):
        task_named("ruler:vt").batches(ruler_source(lengths=[200]))
    with pytest.raises(InputError, match="ruler has no part 'qa'; there are niah_single_1, "):
        task_named("ruler:vt+qa")


def test_needles_stand_between_sentences():
    words = ["One", "two.", "Three", "four.", "Five", "six."]
    text = ruler.hidden_in_essay(np.random.default_rng(3), ["A", "B"], 600, words)
    assert text.replace("A ", "").replace("B ", "").split().count("two.") in (99, 100, 101)
    assert re.search(r"(\.|^) A ", text) or text.startswith("A ")
    long = ruler.hidden_in_essay(np.random.default_rng(0), ["A"], 400, ["word"])
    assert long.split().index("A") % ruler.SENTENCE == 0  # without full stops


def test_largest_finds_the_boundary():
    for boundary in (4, 5, 7, 8, 9, 100, 1023):
        assert largest(lambda n, most=boundary: n <= most, 4) == boundary


# metrics


def test_expected_strings_count_whatever_their_case():
    assert share_found("It is ALPHA and beta.", ["alpha", "Beta", "gamma", "delta"]) == 0.5


@for_each(("name", "answer", "expected", "classes", "score"), [
    ("qa_f1", "The cat, a black one!", "black cat", [], 2 * (2 / 3) * 1 / (2 / 3 + 1)),
    ("qa_f1", "dog", "cat", [], 0),
    ("qa_f1", "", "cat", [], 0),
    ("rouge_l", "a b c d", "a x b d", [], 3 / 4),
    ("rouge_l", "a.b", "a b", [], 1),
    ("rouge_l", "A", "a", [], 0),
    ("rouge_l", "", "a", [], 0),
    ("count", "There are 3, no: 4 or 3", "3", [], 2 / 3),
    ("count", "none", "3", [], 0),
    ("retrieval", "Paragraph 12", "Paragraph 12", [], 1),
    ("retrieval", "12 or 13", "段落13", [], 1 / 2),
    ("code_similarity", "\n# first\nx = 1\ny = 2", "x = 2", [], 0.8),
    ("code_similarity", "# only\n// comments", "x", [], 0),
    ("classification", "a Human or a Place", "Human", ["Human", "Place", "Time"], 1 / 2),
    ("classification", "Food type", "Food type", ["Food", "Food type"], 1),
    ("classification", "Place", "Human", ["Human", "Place"], 0),
    # of three parts of the expected class, the official code removes the first and the third
    ("classification", "abc", "abc", ["a", "b", "c", "abc"], 1 / 2),
])  # fmt: skip
def test_longbench_metrics(name, answer, expected, classes, score):
    metric = getattr(longbench_metrics, name)
    assert metric(answer, expected, classes) == pytest.approx(score)


def test_chinese_metrics_count_words(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "jieba", None)
        with pytest.raises(InputError, match="jieba, which is not installed; run: pip install jie"):
            longbench_metrics.qa_f1_zh("一", "二", [])
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(lcut=list))
    assert longbench_metrics.qa_f1_zh("红色。", "红", []) == pytest.approx(2 / 3)
    assert longbench_metrics.rouge_l_zh("红黑色", "红色", []) == pytest.approx(0.8)


@pytest.mark.parametrize("name", ["longbench", "summarize"])
def test_a_missing_package_is_named_with_its_command(name, monkeypatch, tmp_path, chat):
    if name == "longbench":
        file = write(tmp_path, record(dataset="samsum"))
    else:
        file = write(tmp_path, {"text": "a", "summary": "b"})
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.delitem(sys.modules, "rouge_score.rouge_scorer", raising=False)
    with pytest.raises(InputError, match=r"rouge-score, .* run: pip install 'kvloom\[eval\]'"):
        task_named(name).batches(source(tokenizer=chat, data=str(file)))


# LongBench and summaries


def record(**fields):
    usual = {"input": "Who?", "context": "It was Ann. " * 3, "answers": ["Ann"], "length": 3,
             "all_classes": None, "dataset": "hotpotqa", "_id": "a1"}  # fmt: skip
    return usual | fields


def write(folder, *records, name="all.jsonl"):
    (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder / name


def test_longbench_prompts_are_the_official_ones():
    assert len(DATA_SETS) == 21
    assert DATA_SETS["musique"].prompt == (
        "Answer the question based on the given passages. Only give me the answer and do not "
        "output any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the "
        "question based on the given passages. Only give me the answer and do not output any "
        "other words.\n\nQuestion: {input}\nAnswer:"
    )
    assert DATA_SETS["lcc"].prompt == (
        "Please complete the code given below. \n{context}Next line of code:\n"
    )
    tokens = {name: data.tokens for name, data in DATA_SETS.items()}
    assert [tokens[n] for n in ("musique", "lcc", "samsum", "qmsum")] == [32, 64, 128, 512]
    assert all(d.prompt.count("{context}") == 1 for d in DATA_SETS.values())


def test_longbench_asks_in_a_chat_and_few_shot_without_one(tmp_path, chat):
    write(tmp_path, record(), name="hotpotqa.jsonl")
    write(tmp_path, record(dataset="trec_e", all_classes=["x"]), name="trec_e.jsonl")
    made_from = source(tokenizer=chat, data=str(tmp_path))
    hotpot, trec = (b.samples[0] for b in task_named("longbench").batches(made_from))
    assert hotpot.context == (
        "<user>Answer the question based on the given passages. Only give me the answer and do "
        "not output any other words.\n\nThe following are given passages.\n" + "It was Ann. " * 3
    )
    assert hotpot.question.endswith("other words.\n\nQuestion: Who?\nAnswer:</user><bot>")
    assert (trec.name, trec.fields["variant"]) == ("trec_e/300/a1", "trec")
    assert trec.question == "\nWho?"
    assert "<user>" not in trec.context
    plain = source(data=str(tmp_path))
    with pytest.raises(InputError, match="has no chat template"):
        task_named("longbench").batches(plain)
    assert len(task_named("longbench:trec").batches(plain)) == 1
    with pytest.raises(InputError, match="has no samples of lcc"):
        task_named("longbench:lcc").batches(plain)


@pytest.mark.parametrize("ask", ["after", "inside"])
def test_longbench_cuts_the_middle(tmp_path, ask, chat):
    text = " ".join(map(str, range(500)))
    made_from = source(tokenizer=chat, data=str(write(tmp_path, record(context=text))), ask=ask)
    batch, sample = only(task_named("longbench").batches(made_from))
    assert batch.ids.shape[1] in (299, 300)
    assert sample.fields == {"length": 300, "tokens": batch.ids.shape[1], "variant": "hotpotqa"}
    assert sample.context.startswith("<user>Answer the question")
    if ask == "after":
        assert sample.context.endswith(" 497 498 499")
    else:
        assert sample.context.count("Question: Who?") == 1
        assert len(sample.data.ids) == 1
    assert middle_cut([1, 2, 3, 4, 5], 5) == [1, 2, 3, 4, 5]
    assert middle_cut([1, 2, 3, 4, 5, 6], 5) == [1, 2, 5, 6]  # as int(max_length / 2)


def test_longbench_takes_the_best_answer_and_the_first_line(tmp_path, chat):
    file = write(
        tmp_path, record(answers=["Bob", "Ann"]), record(dataset="triviaqa", answers=["Ann"])
    )
    made_from = source(tokenizer=chat, data=str(file), samples=2)
    with pytest.raises(InputError, match="sample all/300/a1 of longbench occurs twice"):
        task_batches([task_named("longbench:hotpotqa")] * 2, made_from, None)
    qa, trivia = (b.samples[0] for b in task_named("longbench").batches(made_from))
    assert LongBench().score("Ann\nand more", qa) == {"score": pytest.approx(1 / 2)}
    assert LongBench().score("\nAnn\nand more", trivia) == {"score": 1}


@for_each(("line", "reason"), [
    (b'{"input": ', r"is not JSON \(Expecting value"),
    (b"[1]", "is not a JSON object"),
    (b'"\xff"', "is not UTF-8 text"),
    (b'{"input": "\\ud800"}', "is not UTF-8 text"),
    (b'{"input": 3}', "needs the field 'input' with text"),
    (json.dumps(record(answers="Ann")).encode(), "needs the field 'answers' with a list"),
    (json.dumps(record(answers=[])).encode(), "needs the field 'answers' with a list of texts"),
    (json.dumps(record(dataset="nq")).encode(), "has the unknown data set 'nq'"),
    (json.dumps(record(all_classes="x")).encode(), "needs the field 'all_classes' with a list"),
    (json.dumps(record(dataset="passage_retrieval_en")).encode(), "needs answers such as 'Para"),
])  # fmt: skip
def test_an_error_in_a_task_file_names_file_and_line(tmp_path, line, reason, chat):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(json.dumps(record()).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(InputError, match=f"line 3 of '.*bad.jsonl' {reason}.*; correct the line"):
        task_named("longbench").batches(source(tokenizer=chat, data=str(file)))


def test_data_that_is_missing_or_empty(tmp_path):
    with pytest.raises(InputError, match="there is no file or folder 'nowhere'"):
        task_named("summarize").batches(source(data="nowhere"))
    with pytest.raises(InputError, match="has no JSON lines"):
        task_named("summarize").batches(source(data=str(tmp_path)))


def test_summaries_by_keyformers_protocol(tmp_path, chat):
    long = {"text": "The cat sat. " * 200, "summary": "A cat."}
    file = write(tmp_path, {"text": "The cat sat.", "summary": "A cat."}, long)
    made_from = source(tokenizer=chat, data=str(file), samples=2, lengths=[320])
    task = task_named("summarize")
    short, cut = task.batches(made_from)
    assert short.samples[0].context == (
        "<user>Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSummarize the following news article:\n\n### Input:\nThe cat sat."
    )
    assert short.samples[0].question == "\n\n### Response:</user><bot>"
    assert (cut.ids.shape[1], cut.samples[0].fields["tokens"]) == (320, 320)
    assert task.positions(cut) == len(cut.samples[0].data.ids) + 8 - 1
    with pytest.raises(InputError, match="has no room for a text"):
        task.batches(source(tokenizer=chat, data=str(file), lengths=[20]))


# plans


def test_names_of_tasks_and_parts():
    assert set(TASKS) == {
        "perplexity", "free", "niah", "ruler", "longbench", "summarize", "multiturn",
    }  # fmt: skip
    for name, message in {
        "nihah": "there is no task 'nihah'; there are perplexity, free, niah, ",
        "free:fast": "the task 'free' has no variants",
        "niah:double": "niah has no variant 'double'",
        "longbench:nq": "longbench has no data set 'nq'",
    }.items():
        with pytest.raises(InputError, match=message):
            task_named(name)


def test_every_task_states_the_positions_after_its_context():
    made_from = source(lengths=[400])
    for name in ("perplexity", "free", "niah:single", "multiturn"):
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
        task_batches([task_named("niah"), task_named("free")], source(data="x"), None)
    with pytest.raises(InputError, match="the task summarize needs --data: a file of JSON lines"):
        task_batches([task_named("niah"), task_named("summarize")], source(), None)
