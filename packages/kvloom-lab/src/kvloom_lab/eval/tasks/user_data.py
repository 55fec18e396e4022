"""Tasks on the user's JSON lines: LongBench, and summaries.

LongBench (arXiv:2308.14508) reads the official JSON lines that the user downloads. Prompts, answer
lengths, metrics and the truncation in the middle are the official ones. Few-shot and code data sets
are prompted without a chat template, all others need one. The official code compresses the whole
prompt, as ask="inside" does; otherwise the question follows what is compressed. Parts are names of
data sets; LongBench-E's files count as the data set that they are from. Metrics are 0 to 1, as the
official code computes them. ROUGE-L comes from the package rouge-score, on the words of both texts;
the official code uses the package rouge, which counts repeated words once, so that its figures
differ slightly. Metrics of Chinese answers need the package jieba.

Summaries follow the protocol of Keyformer (arXiv:2403.09054, section 4). The prompt is that of
MLPerf's summarization benchmark, which the paper uses; a chat template goes around it if there is
one. Scores are the F measures of ROUGE-1, ROUGE-2 and ROUGE-L on stemmed words. Texts that are too
long are cut at their end. Generation is greedy.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from kvloom.errors import InputError

from ...workload.files import Fields, Record, read_toml
from ..sample import Batch, Question, Sample, Source
from .questions import QuestionTask, chat_parts, data_records, drawn, prompt, question_batch

Metric = Callable[[str, str, Sequence[str]], float]
"""Takes an answer, an expected answer and all classes."""

PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［"
    "＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔"
    "〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…"
    "‧﹏."
)


def package(name: str, install: str = "pip install 'kvloom-lab'") -> Any:
    """Return an optional package; raises `InputError` with the command that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(
            f"this task needs the package {name.partition('.')[0].replace('_', '-')}, which is not "
            f"installed; run: {install}"
        ) from error


def qa_f1(answer: str, expected: str, classes: Sequence[str]) -> float:
    """Return the F1 score of the words, without articles, punctuation and case."""
    return _f1(_normal(answer).split(), _normal(expected).split())


def qa_f1_zh(answer: str, expected: str, classes: Sequence[str]) -> float:
    """Return the F1 score of Chinese words, without punctuation and case."""
    remove = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)

    def words(text: str) -> list[str]:
        bare_words = ("".join(w.lower().translate(remove).split()) for w in _chinese_words(text))
        return [word for word in bare_words if word]

    return _f1(words(answer), words(expected))


def rouge_l(answer: str, expected: str, classes: Sequence[str]) -> float:
    """Return the F measure of ROUGE-L on words; a full stop separates words too."""
    scorer = package("rouge_score.rouge_scorer").RougeScorer(["rougeL"], tokenizer=_Words())
    return scorer.score(expected, answer)["rougeL"].fmeasure


def rouge_l_zh(answer: str, expected: str, classes: Sequence[str]) -> float:
    """Return ROUGE-L of Chinese words."""
    return rouge_l(" ".join(_chinese_words(answer)), " ".join(_chinese_words(expected)), classes)


def classification(answer: str, expected: str, classes: Sequence[str]) -> float:
    """Return 1 / the number of classes in the answer if the expected one is among them.

    A class that is part of the expected one does not count. As in the official code, the class
    after one that was removed is not examined.
    """
    named = [name for name in classes if name in answer]
    for name in named:  # the loop shortens the list, see above
        if name in expected and name != expected:
            named.remove(name)
    return 1 / len(named) if expected in named else 0.0


def count(answer: str, expected: str, classes: Sequence[str]) -> float:
    """Return which share of the numbers in the answer is the expected one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(expected) / len(numbers) if numbers else 0.0


def retrieval(answer: str, expected: str, classes: Sequence[str]) -> float:
    """Return which share of the numbers in the answer is that of the expected paragraph."""
    return count(answer, PARAGRAPH.findall(expected)[0], classes)


def code_similarity(answer: str, expected: str, classes: Sequence[str]) -> float:
    """Return the edit similarity of the answer's first line without comments, in percent steps."""
    lines = answer.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return round(package("rapidfuzz").fuzz.ratio(next(code, ""), expected)) / 100


class _Words:
    """Splits at spaces and full stops, as the package rouge does."""

    def tokenize(self, text: str) -> list[str]:
        return text.replace(".", " ").split()


def _chinese_words(text: str) -> list[str]:
    return package("jieba", "pip install jieba").lcut(text)


def _normal(text: str) -> str:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def _f1(answer: Sequence[str], expected: Sequence[str]) -> float:
    same = sum((Counter(answer) & Counter(expected)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(answer), same / len(expected)
    return 2 * precision * recall / (precision + recall)


METRICS: dict[str, Metric] = {
    metric.__name__: metric
    for metric in (
        qa_f1,
        qa_f1_zh,
        rouge_l,
        rouge_l_zh,
        classification,
        count,
        retrieval,
        code_similarity,
    )
}
FIELDS: Fields = {"input": str, "context": str, "answers": list, "dataset": str, "_id": str}


PLAIN = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
"""Few-shot and code data sets: no chat template goes around their prompts."""
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Data sets of which only the first line of an answer counts."""


class DataSet(NamedTuple):
    """A prompt with {context} and {input}, the most tokens of an answer, and its metric."""

    prompt: str
    tokens: int
    metric: Metric


DATA_SETS = {
    name: DataSet(data["prompt"], data["tokens"], METRICS[data["metric"]])
    for name, data in read_toml(Path(__file__).with_name("longbench.toml")).items()
}


@dataclass(frozen=True)
class LongBenchQuestion(Question):
    """A question whose answer is scored by the metric of a data set. classes: may be empty."""

    dataset: str
    classes: list[str]


class LongBench(QuestionTask):
    """The official metric of each data set, 0 to 1."""

    name = "longbench"
    about = (
        "Questions and tasks on long documents, each scored with the official metric of its "
        "data set."
    )
    needs_data = "a file or folder of LongBench's JSON lines, such as trec.jsonl"
    variants = tuple(DATA_SETS)
    variant_word = "data set"
    main_score = "score"

    def batches(self, source: Source) -> list[Batch]:
        """Return one context for each sample, of at most the lengths of the source."""
        assert source.data_path is not None
        groups: dict[tuple[str, str], list[Record]] = {}
        names: set[tuple[str, str]] = set()
        for record in data_records(source.data_path, FIELDS):
            dataset, name = _checked(record), (record.file.stem, record.value["_id"])
            if dataset in self.chosen:
                if name in names:
                    raise record.problem(f"has the _id {name[1]!r} of an earlier line")
                names.add(name)
                groups.setdefault((record.file.stem, dataset), []).append(record)
        if not groups:
            raise InputError(
                f"{source.data_path!r} has no samples of {', '.join(self.chosen)}; give another "
                "--data"
            )
        for (_, dataset), records in groups.items():
            DATA_SETS[dataset].metric("1", records[0].value["answers"][0], [])  # imports packages
        return [
            _batch(source, length, f"{stem}/{length}/{record.value['_id']}", dataset, record)
            for length in source.lengths
            for (stem, dataset), records in groups.items()
            for record in drawn(records, source.samples, source.seed)
        ]

    def score(self, text: str, sample: Sample) -> dict[str, float]:
        """Return the best score over the expected answers."""
        question: LongBenchQuestion = sample.payload
        if question.dataset in FIRST_LINE:
            text = text.lstrip("\n").split("\n")[0]
        metric = DATA_SETS[question.dataset].metric
        return {
            "score": max(metric(text, answer, question.classes) for answer in question.expected)
        }


def _checked(record: Record) -> str:
    """Return the data set of a record; raises `InputError` that names a wrong line."""
    dataset = record.value["dataset"].removesuffix("_e")
    if dataset not in DATA_SETS:
        raise record.problem(f"has the unknown data set {dataset!r}")
    answers, classes = record.value["answers"], record.value.get("all_classes") or []
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise record.problem("needs the field 'answers' with a list of texts")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise record.problem("needs the field 'all_classes' with a list of texts, or null")
    if DATA_SETS[dataset].metric is classification and not {*answers} <= {*classes}:
        raise record.problem("needs the field 'all_classes' with its answers among the classes")
    if DATA_SETS[dataset].metric is retrieval and not all(map(PARAGRAPH.search, answers)):
        raise record.problem("needs answers such as 'Paragraph 1'")
    return dataset


def _batch(source: Source, length: int, name: str, dataset: str, record: Record) -> Batch:
    template, tokens, metric = DATA_SETS[dataset]
    chat = chat_parts(source.tokenizer, source.first, chat=dataset not in PLAIN)
    head, tail = template.split("{context}")
    text = head + record.value["context"]
    tail = tail.replace("{input}", record.value["input"])
    end = source.encode(chat.after)
    if source.ask == "inside":
        room = length + 1 - len(chat.before) - len(end)
        whole = [*chat.before, *middle_cut(source.encode(text + tail), room), *end]
        ids, question_ids = whole[:-1], whole[-1:]
    else:
        room = length - len(chat.before)
        ids = [*chat.before, *middle_cut(source.encode(text), room)]
        question_ids = source.encode(tail + chat.after)
    answers, classes = record.value["answers"], record.value.get("all_classes") or []
    question = LongBenchQuestion(question_ids, answers, tokens, dataset, classes)
    reference = " / ".join(answers)
    scored = {"classes": classes} if metric is classification else {}
    return question_batch(source, name, ids, question, length, reference, variant=dataset, **scored)


def middle_cut(ids: list[int], room: int) -> list[int]:
    """Return ids of at most `room`: half of them from the start, half from the end."""
    if room < 2:
        raise InputError(
            "longbench: the chat template takes the whole context; use a longer --context"
        )
    return ids if len(ids) <= room else [*ids[: room // 2], *ids[-(room // 2) :]]


HEAD = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "Summarize the following news article:\n\n### Input:\n"
)
TAIL = "\n\n### Response:"
ROUGE = ("rouge1", "rouge2", "rougeL")


class Summarize(QuestionTask):
    """ROUGE of greedy summaries of at most `new_tokens` tokens."""

    name = "summarize"
    about = "The model summarizes a document; the score is the overlap with a reference summary."
    needs_data = 'a file of JSON lines {"text": ..., "summary": ...}'
    main_score = "rouge1"

    def batches(self, source: Source) -> list[Batch]:
        """Return one context for each text, of at most the lengths of the source."""
        assert source.data_path is not None
        package("rouge_score.rouge_scorer")
        records = data_records(source.data_path, {"text": str, "summary": str})
        chat = chat_parts(source.tokenizer, source.first)
        parts = prompt(source, chat.before, source.encode(TAIL + chat.after))
        batches = []
        for length in source.lengths:
            room = parts.room(length)
            if room <= len(source.encode(HEAD)):
                raise InputError(
                    f"summarize: a context of {length} tokens has no room for a text; use a longer "
                    "--context"
                )
            for record in drawn(records, source.samples, source.seed):
                text, summary = record.value["text"], record.value["summary"]
                ids = parts.context(source.encode(HEAD + text)[:room])
                question = Question(parts.question, [summary], source.new_tokens)
                name = f"{length}/{record.file.stem}/line {record.line}"
                batches.append(question_batch(source, name, ids, question, length))
        return batches

    def score(self, text: str, sample: Sample) -> dict[str, float]:
        """Return the F measures of a summary."""
        scorer = package("rouge_score.rouge_scorer").RougeScorer(ROUGE, use_stemmer=True)
        scores = scorer.score(sample.reference, text)
        return {name: scores[name].fmeasure for name in ROUGE}
