"""`kvloom papers`: the papers' claims, tested on a model."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import InputError
from .inputs import ChosenModel, ChosenText, conditions
from .options import Dtype, Json, Model, Text
from .outputs import check_outputs, print_rich, show_results
from .partial_results import EarlyEnd, finish
from .progress import show_progress
from .user_errors import user_errors


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
        from ..analyse import attention, error
        from ..eval.papers import DEFAULT, PAPERS, QUICK, Lab, Verdict, check, table

        if paper not in PAPERS:
            raise InputError(f"there is no paper {paper!r}; choose from {', '.join(PAPERS)}")
        title, claims = PAPERS[paper]
        check_outputs(json)
        size, chosen_text = QUICK if quick else DEFAULT, ChosenText(None, text)
        chosen = ChosenModel(model, dtype)
        with show_progress() as progress:
            loaded = chosen.load(progress)
        lab = Lab(
            loaded, chosen.tokenizer, chosen_text.content, size=size, seed=seed,
            is_reference=model == "reference",
            format_errors=error.measure, attention=attention.measure,
        )  # fmt: skip
        verdicts: list[Verdict] = []
        early_end: EarlyEnd = None
        if json != "-":
            typer.echo(f"{title}\n")
        try:
            for claim in claims:
                with show_progress() as progress:
                    progress(claim.name)
                    lab.counter = progress.counter
                    verdicts.append(check(claim, lab))
                if json == "-":
                    typer.echo(table.line(verdicts[-1]), err=True)
                else:
                    print_rich(table.block(verdicts[-1], chosen.name))
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
        show_results(table.to_data(paper, verdicts, environment), json, table.summary(verdicts))
        finish(early_end, missing, [v.claim.name for v in verdicts if v.status == "failed"])
