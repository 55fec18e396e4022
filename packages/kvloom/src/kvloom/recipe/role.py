"""A role of a chat template, as the token ids around its messages.

Decides how these ids follow from a tokenizer's template, and which tokens of a prompt they enclose.
A recipe has the ids, so a cache needs no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, RecipeError
from ..registry.fields import check_fields

_CONTENTS = ("Be brief.", "7 words", "(in Latin)")  # their first and last characters differ
_SPACED = ("\n    Be brief.\n", "\n\nBe brief.\n\n", "  Be brief.  ")  # merge with what is around


@dataclass(frozen=True)
class Role:
    """A role of a chat, such as that of the system prompt, by the token ids around its messages.

    A message begins with `opens` and ends with the next `closes`, or else with the prompt. Both are
    part of it. `Role.system` finds them for a tokenizer.

    Attributes:
        opens: Consecutive token ids before the content of a message.
        closes: Consecutive token ids after it.
    """

    opens: tuple[int, ...]
    closes: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, "opens", "closes")
        if not (self.opens and self.closes):
            raise RecipeError(
                "a role has token ids that open a message and that close it; give both"
            )

    @classmethod
    def system(cls, tokenizer: Any) -> Role:
        """Return the role of the system prompt in a tokenizer's chat template.

        `opens` ends before a line with a digit, as a template may write the date there. `closes`
        ends with the first special token after the content, if there is one.

        Args:
            tokenizer: A tokenizer of transformers.

        Raises:
            InputError: There is no chat template, or it has no role for system prompts alone.
        """
        before, after, merged = [], [], 0
        for content, user in zip((*_CONTENTS, *_SPACED), 2 * _CONTENTS[::-1], strict=True):
            text = _applied(tokenizer, ("system", content), ("user", f"{user}?"))
            head, found, rest = text.partition(content)
            middle, found_user, _ = rest.partition(f"{user}?")
            if not (found and found_user):
                if content in _SPACED:  # a template may remove it
                    continue
                raise _no_role("it leaves out what a system prompt says")
            before += [_encoded(tokenizer, x) for x in (text, _before_digits(head))]
            message = _encoded(tokenizer, head + content + middle)
            after.append(message[::-1])
            stays = len(_common([message, _encoded(tokenizer, text)]))
            merged = max(merged, len(message) - stays)  # tokens, with what follows
        opens, closes = _common(before), _common([ids[merged:] for ids in after])[::-1]
        special = [i for i, id in enumerate(closes) if id in _special_ids(tokenizer)]
        closes = closes[: special[0] + 1] if special else closes
        if not (opens and closes):
            raise _no_role("no tokens of its own are around a system prompt")
        role = cls(tuple(opens), tuple(closes))
        without = (_applied(tokenizer, ("user", user)) for user in _CONTENTS)
        enclosed = {tuple(role.enclosed(_encoded(tokenizer, text))) for text in without}
        if len(enclosed) > 1:  # else: nothing, or the system prompt that is there by default
            raise _no_role("what is around a system prompt is around a user's message, too")
        return role

    def mask(self, ids: Tensor) -> Tensor:
        """Return which tokens are of a message of this role: bool [B, N], for ids int64 [B, N]."""
        place = torch.arange(ids.shape[1], device=ids.device)
        opened = torch.where(_starts(ids, self.opens), place, -1).cummax(dim=1).values
        # 0 for a message that ends with the prompt
        ended = _starts(ids, self.closes).roll(len(self.closes), dims=1)
        closed = torch.where(ended, place, -1).cummax(dim=1).values
        return (opened >= 0) & (closed < opened + len(self.opens) + len(self.closes))

    def enclosed(self, ids: list[int]) -> list[int]:
        """Return those of a prompt's ids that are of a message of this role."""
        row = torch.tensor([ids])
        found: list[int] = row[self.mask(row)].tolist()
        return found


def _starts(ids: Tensor, part: tuple[int, ...]) -> Tensor:
    """Return where consecutive ids [B, N] are those of a part: bool [B, N], at its first one."""
    starts = torch.zeros_like(ids, dtype=torch.bool)
    last = ids.shape[1] - len(part) + 1
    if last > 0:
        starts[:, :last] = (ids.unfold(1, len(part), 1) == ids.new_tensor(part)).all(dim=-1)
    return starts


def _applied(tokenizer: Any, *messages: tuple[str, str]) -> str:
    """Return the text of messages, (role, content) each, in the chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            "the tokenizer has no chat template; give the ids of a role as Role(opens, closes)"
        )
    chat = [{"role": role, "content": content} for role, content in messages]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception as error:  # whatever a template raises
        raise _no_role(str(error)) from error
    return text


def _before_digits(text: str) -> str:
    """Return the lines before the first one with a digit."""
    lines = text.splitlines(keepends=True)
    return "".join(takewhile(lambda line: not any(map(str.isdigit, line)), lines))


def _no_role(why: str) -> InputError:
    return InputError(
        f"the chat template has no role for system prompts ({why}); protect them by "
        "Protect.spans, or give the ids of a role as Role(opens, closes)"
    )


def _encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _special_ids(tokenizer: Any) -> set[int]:
    return {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}


def _common(rows: list[list[int]]) -> list[int]:
    """Return the ids with which all rows begin."""
    return [ids[0] for ids in takewhile(lambda ids: len({*ids}) == 1, zip(*rows, strict=False))]
