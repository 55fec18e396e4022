"""`kvloom papers`: the papers' claims, tested on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.errors import InputError

from .options import ChosenModel, ChosenText, Dtype, Json, Model, Text, conditions
from .outputs import EarlyEnd, check_outputs, finish, print_rich, show_results, user_errors
from .progress import show_progress

if TYPE_CHECKING:
    from kvloom.progress import Progress

    from ..papers import Claim, Lab, Verdict


def command(
    paper: Annotated[
        str, typer.Argument(metavar="PAPER", help="kivi, skvq, keyformer, minikv or clusterkv.")
    ],
    text: Text = None,
    model: Model = "reference",
    quick: Annotated[
        bool, typer.Option("--quick", help="Shorter contexts and fewer samples.")
    ] = False,
    dtype: Dtype = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed for texts and needles.")] = 0,
    json: Json = None,
) -> None:
    """Test a paper's claims: its figures beside ours, and a verdict for each.

    A claim is reproduced, not reproduced (with the cause), or not testable here (with the reason).
    """
    with user_errors():
        from ..analyse import error
        from ..analyse.attention import measure
        from ..papers import DEFAULT, PAPERS, QUICK, Lab
        from ..show.tables import verdict_block, verdict_data, verdict_line, verdict_summary

        if paper not in PAPERS:
            raise InputError(f"there is no paper {paper!r}; choose from {', '.join(PAPERS)}")
        title, claims = PAPERS[paper]
        check_outputs(json)
        size, chosen_text = QUICK if quick else DEFAULT, ChosenText(None, text)
        chosen = ChosenModel(model, dtype)
        verdicts: list[Verdict] = []
        early_end: EarlyEnd = None
        with show_progress() as progress:
            loaded = chosen.load(progress)
            lab = Lab(
                loaded, chosen.tokenizer, chosen_text.content, size=size, seed=seed,
                is_reference=model == "reference",
                format_errors=error.measure, attention=measure,
            )  # fmt: skip
            if json != "-":
                with progress.hidden():
                    typer.echo(f"{title}\n")
            count = progress.counter(sum(claim.test is not None for claim in claims))
            try:
                for claim in claims:
                    verdicts.append(_check(claim, lab, count))
                    with progress.hidden():
                        if json == "-":
                            typer.echo(verdict_line(verdicts[-1]), err=True)
                        else:
                            print_rich(verdict_block(verdicts[-1], chosen.name))
            except KeyboardInterrupt as interrupt:
                early_end = interrupt
            finally:
                lab.close()
        environment = conditions(
            loaded, chosen, chosen_text.name, quick=quick, seed=seed, **vars(size)
        )
        missing = [claim.name for claim in claims[len(verdicts) :]]
        if missing:
            environment["missing"] = missing
        show_results(verdict_data(paper, verdicts, environment), json, verdict_summary(verdicts))
        finish(early_end, missing, [v.claim.name for v in verdicts if v.status == "failed"])


def _check(claim: Claim, lab: Lab, count: Callable[[str, float], None]) -> Verdict:
    """Test a claim; report one unit of work in parts, as its measurements go on.

    A claim that is not testable is no work.
    """
    from ..papers import check

    left = 0.0 if claim.test is None else 1.0

    def counter(total: int) -> Progress:
        def report(what: str, units: int) -> None:
            nonlocal left
            part = min(left, units / total)
            left -= part
            count(what, part)

        return report

    count(claim.name, 0)
    lab.counter = counter
    verdict = check(claim, lab)
    count("", left)
    return verdict
