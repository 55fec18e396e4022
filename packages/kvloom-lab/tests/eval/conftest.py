"""Fixtures of the tests of tasks."""

import copy

import pytest
from task_sources import CHAT

import tiny


@pytest.fixture(scope="module")
def chat():
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = CHAT
    return tokenizer
