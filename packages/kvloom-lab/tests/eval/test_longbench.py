"""LongBench and summaries: prompts, metrics, and files of tasks."""

import json
import sys
from types import SimpleNamespace

import pytest
from task_sources import only, source

from kvloom.errors import InputError
from kvloom_lab.eval.sample import task_batches
from kvloom_lab.eval.tasks import task_named, user_data
from kvloom_lab.eval.tasks.user_data import DATA_SETS, LongBench, middle_cut


@pytest.mark.parametrize(("name", "answer", "expected", "classes", "score"), [
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
def test_longbench(name, answer, expected, classes, score):
    metric = getattr(user_data, name)
    assert metric(answer, expected, classes) == pytest.approx(score)


def test_chinese_metrics_count_words(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "jieba", None)
        with pytest.raises(InputError, match="jieba, which is not installed; run: pip install jie"):
            user_data.qa_f1_zh("一", "二", [])
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(lcut=list))
    assert user_data.qa_f1_zh("红色。", "红", []) == pytest.approx(2 / 3)
    assert user_data.rouge_l_zh("红黑色", "红色", []) == pytest.approx(0.8)


@pytest.mark.parametrize("name", ["longbench", "summarize"])
def test_a_missing_package_is_named_with_its_command(name, monkeypatch, tmp_path, chat):
    if name == "longbench":
        file = write(tmp_path, record(dataset="samsum"))
    else:
        file = write(tmp_path, {"text": "a", "summary": "b"})
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.delitem(sys.modules, "rouge_score.rouge_scorer", raising=False)
    with pytest.raises(InputError, match=r"rouge-score, .* run: pip install 'kvloom-lab'"):
        task_named(name).batches(source(tokenizer=chat, data_path=str(file)))


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
    write(
        tmp_path,
        record(dataset="trec_e", all_classes=["x", *record()["answers"]]),
        name="trec_e.jsonl",
    )
    made_from = source(tokenizer=chat, data_path=str(tmp_path))
    hotpot, trec = (b.samples[0] for b in task_named("longbench").batches(made_from))
    assert hotpot.context == (
        "<user>Answer the question based on the given passages. Only give me the answer and do "
        "not output any other words.\n\nThe following are given passages.\n" + "It was Ann. " * 3
    )
    assert hotpot.question.endswith("other words.\n\nQuestion: Who?\nAnswer:</user><bot>")
    assert (trec.name, trec.fields["variant"]) == ("trec_e/300/a1", "trec")
    assert trec.fields["classes"] == ["x", "Ann"]
    assert trec.question == "\nWho?"
    assert "<user>" not in trec.context
    plain = source(data_path=str(tmp_path))
    with pytest.raises(InputError, match="has no chat template"):
        task_named("longbench").batches(plain)
    assert len(task_named("longbench:trec").batches(plain)) == 1
    with pytest.raises(InputError, match="has no samples of lcc"):
        task_named("longbench:lcc").batches(plain)


@pytest.mark.parametrize("ask", ["after", "inside"])
def test_longbench_cuts_the_middle(tmp_path, ask, chat):
    text = " ".join(map(str, range(500)))
    made_from = source(
        tokenizer=chat, data_path=str(write(tmp_path, record(context=text))), ask=ask
    )
    batch, sample = only(task_named("longbench").batches(made_from))
    assert batch.ids.shape[1] in (299, 300)
    assert sample.fields == {"length": 300, "tokens": batch.ids.shape[1], "variant": "hotpotqa"}
    assert sample.context.startswith("<user>Answer the question")
    if ask == "after":
        assert sample.context.endswith(" 497 498 499")
    else:
        assert sample.context.count("Question: Who?") == 1
        assert len(sample.payload.ids) == 1
    assert middle_cut([1, 2, 3, 4, 5], 5) == [1, 2, 3, 4, 5]
    assert middle_cut([1, 2, 3, 4, 5, 6], 5) == [1, 2, 5, 6]  # as int(max_length / 2)


def test_longbench_takes_the_best_answer_and_the_first_line(tmp_path, chat):
    file = write(
        tmp_path,
        record(answers=["Bob", "Ann"]),
        record(dataset="triviaqa", _id="b", answers=["Ann"]),
    )
    made_from = source(tokenizer=chat, data_path=str(file), samples=2)
    with pytest.raises(InputError, match="sample all/300/a1 of longbench occurs twice"):
        task_batches([task_named("longbench:hotpotqa")] * 2, made_from, None)
    qa, trivia = (b.samples[0] for b in task_named("longbench").batches(made_from))
    assert LongBench().score("Ann\nand more", qa) == {"score": pytest.approx(1 / 2)}
    assert LongBench().score("\nAnn\nand more", trivia) == {"score": 1}


@pytest.mark.parametrize(("line", "reason"), [
    (b'{"input": ', r"is not JSON \(Expecting value"),
    (b"[1]", "is not a JSON object"),
    (b'"\xff"', "is not UTF-8 text"),
    (b'{"input": "\\ud800"}', "is not UTF-8 text"),
    (b'{"input": 3}', "needs the field 'input' with text"),
    (json.dumps(record(answers="Ann")).encode(), "needs the field 'answers' with a list"),
    (json.dumps(record(answers=[])).encode(), "needs the field 'answers' with a list of texts"),
    (json.dumps(record(dataset="nq")).encode(), "has the unknown data set 'nq'"),
    (json.dumps(record(all_classes="x")).encode(), "needs the field 'all_classes' with a list"),
    (json.dumps(record(dataset="trec")).encode(), "needs the field 'all_classes' with its answers"),
    (json.dumps(record(dataset="lcc")).encode(), "has the _id 'a1' of an earlier line"),
    (json.dumps(record(dataset="passage_retrieval_en")).encode(), "needs answers such as 'Para"),
])  # fmt: skip
def test_an_error_in_a_task_file_names_file_and_line(tmp_path, line, reason, chat):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(json.dumps(record()).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(InputError, match=f"line 3 of '.*bad.jsonl' {reason}.*; correct the line"):
        task_named("longbench").batches(source(tokenizer=chat, data_path=str(file)))


def test_data_that_is_missing_or_empty(tmp_path):
    with pytest.raises(InputError, match="there is no file or folder 'nowhere'"):
        task_named("summarize").batches(source(data_path="nowhere"))
    with pytest.raises(InputError, match="has no JSON lines"):
        task_named("summarize").batches(source(data_path=str(tmp_path)))


def test_summaries_by_keyformers_protocol(tmp_path, chat):
    long = {"text": "The cat sat. " * 200, "summary": "A cat."}
    file = write(tmp_path, {"text": "The cat sat.", "summary": "A cat."}, long)
    made_from = source(tokenizer=chat, data_path=str(file), samples=2, lengths=[320])
    task = task_named("summarize")
    short, cut = task.batches(made_from)
    assert short.samples[0].context == (
        "<user>Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSummarize the following news article:\n\n### Input:\nThe cat sat."
    )
    assert short.samples[0].question == "\n\n### Response:</user><bot>"
    assert (cut.ids.shape[1], cut.samples[0].fields["tokens"]) == (320, 320)
    assert task.positions(cut) == len(cut.samples[0].payload.ids) + 8 - 1
    with pytest.raises(InputError, match="has no room for a text"):
        task.batches(source(tokenizer=chat, data_path=str(file), lengths=[20]))
