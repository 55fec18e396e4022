"""lm-evaluation-harness on compressed caches: the model `kvloom`.

    python -m kvloom_lab.eval.lm_eval --model kvloom \\
        --model_args pretrained=smollm2,recipe=kivi-4 --tasks lambada_openai

The arguments are those of `lm_eval`; this module registers the model and calls it. Needs `lm_eval`
(`pip install 'kvloom-lab[lm-eval]'`).

The log-likelihoods of one forward pass do not depend on the recipe, because a prompt attends
exactly. Here the context is compressed first; then its last token and the continuation are fed one
by one, so that every scored token is predicted from the compressed cache.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    missing = f"there is no module {error.name!r}; pip install 'kvloom-lab[lm-eval]'"
    raise (SystemExit if __name__ == "__main__" else ImportError)(missing) from error

from kvloom import Cache, attach
from kvloom.hf import read_tokens

from ..models import located

Request = tuple[tuple[str, str], list[int], list[int]]


@register_model("kvloom")
class KvloomLM(HFLM):
    """A Hugging Face model whose caches follow a recipe.

    pretrained: as for `kvloom --model`. recipe: a name with at most one option, or a recipe file:
    lm_eval divides model_args at commas. The other arguments are those of lm_eval's model `hf`.
    """

    def __init__(self, pretrained: str = "smollm2", recipe: str = "kivi-4", **options: Any) -> None:
        super().__init__(pretrained=located(pretrained), **options)
        self.recipe: str | Path = recipe
        attach(self.model, recipe)  # for tasks that generate

    def _loglikelihood_tokens(
        self,
        requests: list[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of its continuation, and whether it is greedy.

        Continuations of the same context share its compression. Too long a context loses its first
        tokens, as in lm_eval.
        """
        scored: dict[int, tuple[float, bool]] = {}
        by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)
            by_context[tuple(context[max(0, len(context) - room) :])].append(i)
        with torch.inference_mode():
            for ids_of_context, numbers in by_context.items():
                cache = Cache(self.model, self.recipe)
                ids = torch.tensor([ids_of_context], device=self.device)
                if ids.shape[1] > 1:
                    read_tokens(self.model, ids[:, :-1], cache)
                for i in numbers:
                    copied = cache if i == numbers[-1] else copy.deepcopy(cache)
                    scored[i] = self._scored(copied, ids[:, -1:], requests[i][2])
                    if requests[i][0] is not None:  # None: a window of a rolling task
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], scored[i])
        return [scored[i] for i in range(len(requests))]

    def _scored(self, cache: Cache, new: torch.Tensor, ids: list[int]) -> tuple[float, bool]:
        """Feed `new` [1, 1] and ids one by one; return their log-likelihood, and if all are greedy.

        The last id is not fed: nothing is predicted from it.
        """
        total, is_greedy = 0.0, True
        for token in ids:
            logp = torch.log_softmax(read_tokens(self.model, new, cache).float(), dim=-1)[0]
            total += logp[token].item()
            is_greedy &= int(logp.argmax()) == token
            new = torch.tensor([[token]], device=self.device)
        return total, is_greedy


if __name__ == "__main__":
    cli_evaluate()
