"""LongBench's metrics, each 0 to 1, as the official code computes them.

ROUGE-L comes from the package rouge-score, on the words of both texts; the official code uses the
package rouge, which counts repeated words once, so that its figures differ slightly. Metrics of
Chinese answers need the package jieba.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from kvloom.errors import InputError

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
        found = ("".join(w.lower().translate(remove).split()) for w in _chinese_words(text))
        return [word for word in found if word]

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
    found = [name for name in classes if name in answer]
    for name in found:  # the list shrinks meanwhile, see above
        if name in expected and name != expected:
            found.remove(name)
    return 1 / len(found) if expected in found else 0.0


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
