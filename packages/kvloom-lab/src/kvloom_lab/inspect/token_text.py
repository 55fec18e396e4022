"""The text of a run: which ids are read, and the text that each token adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from kvloom.errors import InputError

from ..models import check_positions
from ..workload.text import leading_ids, tokenize


def prompt_ids(
    model: PreTrainedModel | PreTrainedConfig,
    tokenizer: Any,
    text: str,
    context: int | None,
    new_tokens: int,
) -> tuple[list[int], int]:
    """Return the prompt's ids, and how many ids the whole text has.

    model: the model or its config. context: use only the first `context` ids; None for all. Raises
    `InputError` for a text that is empty or too long.
    """
    if not text.strip():
        raise InputError("the text is empty; give some text to inspect")
    if new_tokens < 0 or (context is not None and context < 1):
        raise InputError(
            f"context={context} must be 1 or more and new_tokens={new_tokens} 0 or more"
        )
    whole = [*leading_ids(tokenizer), *tokenize(tokenizer, text).tolist()]
    ids = whole[:context]
    check_positions(model, len(ids), new_tokens)
    return ids, len(whole)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds.

    Of several tokens that form one character, only the last adds text.
    """

    def decode(lo: int, hi: int) -> str:
        return tokenizer.decode(list(ids[lo:hi]), clean_up_tokenization_spaces=False)

    texts: list[str] = []
    # Decoding starts one token earlier, because the first token may lose its leading space.
    begin = finished = 0
    for i in range(len(ids)):
        whole = decode(begin, i + 1)
        if whole.endswith("\ufffd") and i - finished < 3:  # a character has at most four bytes
            texts.append("")
            continue
        texts.append(whole[len(decode(begin, finished)) :])
        begin, finished = i, i + 1
    return texts
