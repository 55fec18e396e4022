"""The ids around a text and a question about it, for chat models and for others."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvloom.errors import InputError

_MARK = "<<kvloom>>"


class Frame(NamedTuple):
    """Ids before the text; text between the user's words and the answer's prefix."""

    before: list[int]
    after: str


def frame(tokenizer: Any, first: list[int], *, chat: bool | None = None) -> Frame:
    """Return the chat template's parts around a user's message, or plain ones without a template.

    first: special ids before a plain text. chat: True requires a template and raises `InputError`
    without one; None uses one if there is one.
    """
    has = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has:
        raise InputError(
            "the tokenizer has no chat template, and this task is for instruction-tuned models; "
            "use such a model, or the tasks perplexity, free, niah, ruler and multiturn"
        )
    if not has or chat is False:
        return Frame(list(first), "")
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, after = whole.split(_MARK)
    return Frame(encode(tokenizer, before), after)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text without special tokens."""
    return tokenizer.encode(text, add_special_tokens=False) if text else []
