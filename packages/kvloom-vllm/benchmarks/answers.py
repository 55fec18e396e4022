"""Answers of an OpenAI-compatible server, and whether one under load is the one given alone.

Rounding depends on what else is in a step, so two tokens that are almost equally likely may swap.
An answer is a `tie` if it differs first at such a token, and `wrong` if it differs first elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import aiohttp

TIE = 0.01
"""Tokens whose log probabilities differ by less than this are almost equally likely."""


class Answer(NamedTuple):
    """Tokens, and of each the two most likely ones with log probabilities, if they were wanted."""

    tokens: list[int]
    likely: list[dict[int, float]]


class Server:
    """A server's completions."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def ask(
        self, prompt: list[int], new: int, *, likely: bool = False, patience: float | None = None
    ) -> Answer:
        """Return `new` greedy tokens.

        likely: whether to ask for likely tokens too. patience: seconds until the client leaves;
        raises `TimeoutError` then.
        """
        body = {
            "model": "soak", "prompt": prompt, "max_tokens": new, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        if likely:
            body["logprobs"] = 2
        async with self._session.post(
            f"{self._url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=patience)
        ) as answer:
            answer.raise_for_status()
            choice = (await answer.json())["choices"][0]
        return Answer(choice["token_ids"], _likely(choice) if likely else [])

    async def metrics(self) -> dict[str, float]:
        """Return vLLM's counters by name, without labels."""
        async with self._session.get(f"{self._url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm:"))
        return {name.split("{")[0]: float(value) for name, value in rows}

    async def healthy(self) -> bool:
        """Return whether the server answers."""
        try:
            async with self._session.get(f"{self._url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


def _likely(choice: dict[str, Any]) -> list[dict[int, float]]:
    return [
        {int(name.removeprefix("token_id:")): logprob for name, logprob in one.items()}
        for one in choice["logprobs"]["top_logprobs"]
    ]


def judged(found: list[int], alone: Answer, new: int) -> str:
    """Return what an answer of `new` tokens is: "equal", "tie", "wrong" or "short".

    alone: the answer to the same prompt alone, with likely tokens; at least `new` tokens.
    """
    if len(found) != new:
        return "short"
    for mine, token, likely in zip(found, alone.tokens, alone.likely, strict=False):
        if mine != token:
            gap = likely[token] - likely[mine] if mine in likely else float("inf")
            return "tie" if gap < TIE else "wrong"
    return "equal"
