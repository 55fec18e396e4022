"""RULER: prompts as its authors' code makes them, of the right length.

The strings are those of NVIDIA/RULER, scripts/data/synthetic/constants.py.
"""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from task_sources import CHAT, PROSE, only, ruler_source, source

from kvloom.errors import InputError
from kvloom_lab.eval.tasks import ruler, task_named
from kvloom_lab.eval.tasks.ruler import PARTS, NeedleSettings, PromptInputs, largest_fitting
from kvloom_lab.models import reference_tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def made(name, units, length=2000, seed=0):
    made_from = ruler_source()
    material = PromptInputs(made_from, made_from.text.split(), [], length)
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


def test_no_other_sentence_has_the_asked_key(monkeypatch):
    monkeypatch.setattr(ruler, "WORDS", ruler.WORDS[:6])  # 30 keys
    settings = NeedleSettings("needle", num_keys=1, num_queries=1)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        found = ruler.niah(settings, rng, 40, None)
        key = found.question.partition(" for ")[2].partition(" mentioned")[0]
        assert found.text.count(f"for {key} is") == 1


def test_rulers_tasks_are_the_official_ones():
    assert {name: part.tokens for name, part in PARTS.items()} == {
        **dict.fromkeys([f"niah_single_{i}" for i in (1, 2, 3)], 128),
        **dict.fromkeys([f"niah_multikey_{i}" for i in (1, 2, 3)], 128),
        "niah_multivalue": 128, "niah_multiquery": 128, "vt": 30, "cwe": 120, "fwe": 50,
    }  # fmt: skip
    settings = {name: PARTS[name].make.args[0] for name in PARTS if name.startswith("niah")}
    assert settings["niah_multikey_1"] == NeedleSettings("essay", num_keys=4)
    assert settings["niah_multikey_3"] == NeedleSettings("needle", "uuids", "uuids")
    uuid = made("niah_single_3", 60).expected[0]
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuid
    )


@pytest.mark.sample
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("ask", ["after", "inside"])
def test_ruler_fills_the_context(name, ask):
    tokenizer = reference_tokenizer()
    tokenizer.chat_template = CHAT
    made_from = source(PROSE, tokenizer, lengths=[1800], ask=ask)
    batch, sample = only(task_named(f"ruler:{name}").batches(made_from))
    assert 1800 - 100 < batch.ids.shape[1] <= 1800  # the longest unit states two uuids
    assert sample.context.startswith("<user>")
    assert all(word in sample.context for word in sample.payload.expected)
    assert ("</user><bot> " in sample.question) == (ask == "after")
    assert ("</user><bot> " in sample.context) == (ask == "inside")
    assert task_named("ruler").positions(batch) == len(sample.payload.ids) + PARTS[name].tokens - 1
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
        assert largest_fitting(lambda n, most=boundary: n <= most, 4) == boundary
