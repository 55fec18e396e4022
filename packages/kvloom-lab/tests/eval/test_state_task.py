"""`state`: statements that change a value, in order, and the value after them."""

import json
import re

import numpy as np
import pytest
from task_sources import CHAT, ruler_source
from typer.testing import CliRunner

from kvloom.errors import InputError
from kvloom_lab.cli.app import app
from kvloom_lab.eval.sample import Question, Sample
from kvloom_lab.eval.tasks import task_named
from kvloom_lab.eval.tasks.state import MAKERS, STEPS


def value_of(statements, asked):
    """What Python says of the statements."""
    names = {}
    for statement in statements:
        left, right = statement.removeprefix("VAR ").split(" = ")
        function = re.fullmatch(r"(\w+)\((\w+)\)", left)
        if function is None:
            names[left] = eval(right, {}, names)
        elif function[2] == "n":
            first, step, name = names[function[1]], right, function[1]

            def call(n, first=first, step=step, name=name):
                return first if n == 0 else eval(step, {name: call, "n": n})

            names[name] = call
        else:
            names[function[1]] = int(right)
    return eval(asked, {}, names)


@pytest.mark.parametrize("variant", MAKERS)
@pytest.mark.parametrize("steps", STEPS)
def test_the_value_is_that_of_the_statements(variant, steps):
    for seed in range(30):
        content = MAKERS[variant](np.random.default_rng(seed), steps)
        assert content.value == value_of(content.statements, content.asked)
        assert content.value > 0
        count = 2 if variant == "recursion" else steps + 1
        assert len(set(content.statements)) == count


def test_statements_of_each_kind():
    rng = np.random.default_rng(0)
    assert all(re.fullmatch(r"VAR \w+ = \d\d", x) for x in MAKERS["update"](rng, 4).statements)
    first, *others = MAKERS["chain"](rng, 3).statements
    assert re.fullmatch(r"VAR \w+ = \d", first)
    assert all(re.fullmatch(r"VAR \w+ = \w+ [+-] \d", x) for x in others)
    base, step = MAKERS["recursion"](rng, 4).statements
    name = re.fullmatch(r"VAR (\w+)\(0\) = \d", base)[1]
    assert re.fullmatch(rf"VAR {name}\(n\) = {name}\(n - 1\) \+ \d", step)


@pytest.mark.parametrize("ask", ["after", "inside"])
def test_statements_are_in_order_in_a_context_of_the_exact_length(ask):
    made_from = ruler_source(lengths=[500], samples=2, ask=ask)
    made_from.tokenizer.chat_template = CHAT
    batches = task_named("state").batches(made_from)
    assert len(batches) == len(MAKERS) * len(STEPS) * 2
    for batch in batches:
        (sample,) = batch.samples
        assert batch.ids.shape == (1, 500)
        variant, steps = sample.fields["variant"], sample.fields["steps"]
        text = sample.context.partition("the value of y is 5.")[2]
        found = re.findall(r"^(VAR .*)\.$", text, re.MULTILINE)
        prompt = sample.context + sample.question
        asked = re.search(r"What is the value of (\S+) in the text above\?</user><bot>", prompt)[1]
        assert prompt.endswith(f" Answer: The value of {asked} is") or prompt.endswith(" is ")
        assert str(value_of(found, asked)) == sample.reference
        assert sample.name.startswith(f"{variant}/500/{steps}/")
        assert ("What is the value" in sample.question) == (ask == "after")


def test_only_the_first_number_of_an_answer_counts():
    sample = Sample("", "", fields={"steps": 4}, payload=Question([], ["12"], 1))
    answers = {" 12.": 1, "12 or 13": 1, "3, so 12": 0, "123": 0, "-12": 0, "": 0}
    for answer, correct in answers.items():
        assert task_named("state").score(answer, sample) == {
            "correct": correct, "correct_4": correct,
        }  # fmt: skip


def test_what_state_refuses():
    with pytest.raises(InputError, match="state: a context of 90 tokens is too short for"):
        task_named("state").batches(ruler_source(lengths=[90]))
    with pytest.raises(InputError, match="state has no variant 'loop'; there are update, chain"):
        task_named("state:loop")


def test_every_number_of_steps_has_a_score(here, tmp_path):
    args = ["state:update+recursion", "--context", "400", "--samples", "1", "--model",
            here / "model", "--text", here / "text.txt", "--recipes", "window:tokens=64",
            "--out", tmp_path / "out"]  # fmt: skip
    found = CliRunner().invoke(app, ["eval", *map(str, args)])
    assert found.exit_code == 0, found.output
    lines = [json.loads(x) for x in (tmp_path / "out" / "state.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * len(STEPS) * 2
    names = {name for line in lines for name in line["scores"]}
    assert names == {"correct", *(f"correct_{steps}" for steps in STEPS)}
