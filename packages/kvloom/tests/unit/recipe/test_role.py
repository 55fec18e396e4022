"""Roles of chat templates: which token ids are around a system prompt, and what they enclose."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from kvloom import Role
from kvloom.errors import InputError, RecipeError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
)
DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe nice.<|im_end|>\n{% endif %}"
)
DATED = (
    "<|im_start|>system\nToday is May 4, 2026.\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% set messages = messages[1:] %}{% endif %}<|im_end|>{{ messages[0]['content'] }}"
)
IN_WORDS = (
    "<s>[INST] {% if messages[0]['role'] == 'system' %}<<SYS>>\n{{ messages[0]['content'] }}\n"
    "<</SYS>>\n\n{% set messages = messages[1:] %}{% endif %}{{ messages[0]['content'] }}"
)
OF_THE_USER = (
    "<|im_start|>{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n"
    "{% set messages = messages[1:] %}{% endif %}{{ messages[0]['content'] }}<|im_end|>"
)
CHAT = [("system", "Obey 3 rules."), ("user", "Hi."), ("assistant", "7"), ("user", "Bye.")]


def tokenizer(template):
    return prepared(copy.deepcopy(tiny.tokenizer()), template)


def prepared(made, template):
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def naive(role, ids):
    """Which tokens are of a message, read from left to right."""
    inside, marked, begin, n = False, [], 0, len(role.closes)
    for i in range(len(ids)):
        if tuple(ids[i : i + len(role.opens)]) == role.opens:
            inside, begin = True, i + len(role.opens)
        marked.append(inside)
        if inside and i + 1 - n >= begin and tuple(ids[i + 1 - n : i + 1]) == role.closes:
            inside = False
    return marked


parts = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


@given(st.builds(Role, parts, parts), st.lists(st.lists(st.integers(1, 3), min_size=9, max_size=9)))
def test_a_message_is_what_opens_it_and_what_closes_it_next(role, rows):
    found = role.mask(torch.tensor(rows, dtype=torch.long).view(-1, 9))
    assert found.tolist() == [naive(role, row) for row in rows]


@pytest.mark.parametrize(
    ("template", "opens", "closes"),
    [
        (CHATML, "<|im_start|>system\n", "<|im_end|>"),
        (DEFAULT + CHATML, "<|im_start|>system\n", "<|im_end|>"),
        (DATED, "<|im_start|>system\n", "<|im_end|>"),
        (IN_WORDS, "<s>[INST] <<SYS>>\n", "\n<</SYS>>\n\n"),
    ],
)
def test_the_ids_around_a_system_prompt_follow_from_the_template(template, opens, closes):
    made = tokenizer(template)
    role = Role.system(made)
    assert (made.decode(role.opens), made.decode(role.closes)) == (opens, closes)
    chat = [{"role": name, "content": content} for name, content in CHAT]
    text = made.apply_chat_template(chat, tokenize=False)
    enclosed = made.decode(role.enclosed(made.encode(text, add_special_tokens=False)))
    before, _, behind = text.partition("Obey 3 rules.")
    assert enclosed == f"{before}Obey 3 rules.{closes}"
    assert behind.startswith(closes)


@pytest.mark.parametrize("template", [CHATML, IN_WORDS])
@pytest.mark.parametrize("space", ["\n", "\n\n", "\n    ", "  "])
def test_a_message_may_begin_and_end_with_white_space(template, space):
    """Where a tokenizer merges it with the template's own."""
    spaced = ["system\n    Obey", "<<SYS>>\n\n\nObey", "\n  Obey", "Obey.\n    \n\n  \n"]
    made = prepared(tiny.train_tokenizer(spaced * 9, 400), template)
    role = Role.system(made)
    chat = [
        {"role": "system", "content": f"{space}Obey.{space}"},
        {"role": "user", "content": "Hi."},
    ]
    ids = made.apply_chat_template(chat, tokenize=True, return_dict=False)
    enclosed = made.decode(role.enclosed(ids))
    assert "Obey." in enclosed
    assert "Hi." not in enclosed


def test_a_default_system_prompt_is_one_and_others_are_not():
    for template, expected in (
        (CHATML, ""),
        (DEFAULT + CHATML, "<|im_start|>system\nBe nice.<|im_end|>"),
    ):
        made = tokenizer(template)
        text = made.apply_chat_template([{"role": "user", "content": "Hi."}], tokenize=False)
        ids = made.encode(text, add_special_tokens=False)
        assert made.decode(Role.system(made).enclosed(ids)) == expected


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, r"no chat template; give the ids of a role as Role\(opens, closes\)"),
        ("{{ messages[-1]['content'] }}", "leaves out what a system prompt says"),
        ("{{ raise_exception('no such role') }}", "system prompts .no such role.; protect them by"),
        (OF_THE_USER, "is around a user's message, too"),
        ("{{ messages[0]['content'] }}{{ messages[1]['content'] }}", "no tokens of its own"),
    ],
)  # fmt: skip
def test_templates_without_a_system_role_are_refused(template, says):
    with pytest.raises(InputError, match=says):
        Role.system(tokenizer(template))


def test_a_role_has_both_ends():
    for opens, closes in (((), (1,)), ((1,), ())):
        with pytest.raises(RecipeError, match="give both"):
            Role(opens, closes)
