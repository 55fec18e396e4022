"""lm-evaluation-harness scores from the compressed cache. Needs lm_eval, which is not in `dev`."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("default")  # lm_eval's own

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import kvloom  # noqa: E402
from kvloom_lab.eval.lm_eval import KvloomLM  # noqa: E402
from kvloom_lab.models import WEIGHTS, reference_tokenizer  # noqa: E402
from kvloom_lab.workload.text import library_text  # noqa: E402

TEXT = library_text()[:1500]


def requests(kind="loglikelihood"):
    options = [" value", " the value of the argument", " None"]
    pairs = [(TEXT, options[0]), (TEXT[:300], options[0]), *((TEXT, x) for x in options[1:])]
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(pairs)]


def model(cls, **options):
    return cls(
        pretrained=str(WEIGHTS), tokenizer=reference_tokenizer(), device="cpu", batch_size=1,
        dtype="float32", **options,
    )  # fmt: skip


def test_full_scores_as_the_model_alone_and_a_recipe_does_not():
    plain = model(HFLM).loglikelihood(requests(), disable_tqdm=True)
    full = model(KvloomLM, recipe="full").loglikelihood(requests(), disable_tqdm=True)
    window = model(KvloomLM, recipe="window:tokens=32").loglikelihood(requests(), disable_tqdm=True)
    assert [greedy for _, greedy in full] == [greedy for _, greedy in plain]
    torch.testing.assert_close(
        torch.tensor([x for x, _ in full]), torch.tensor([x for x, _ in plain]), atol=1e-3, rtol=0
    )
    moved = [abs(a - b) for (a, _), (b, _) in zip(window, plain, strict=True)]
    assert min(moved) > 0.01


def test_the_answer_to_one_request_does_not_depend_on_the_others():
    lm = model(KvloomLM, recipe="kivi")
    together = lm.loglikelihood(requests(), disable_tqdm=True)
    apart = [lm.loglikelihood([one], disable_tqdm=True)[0] for one in requests()]
    assert together == apart


def test_generation_uses_the_recipe():
    lm = model(KvloomLM, recipe="kivi")
    asked = [Instance("generate_until", {}, (TEXT, {"until": [], "max_gen_toks": 8}), 0)]
    text = lm.generate_until(asked, disable_tqdm=True)[0]
    ids = lm.tokenizer(TEXT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    kvloom.detach(lm.model)
    cache = kvloom.Cache(lm.model, "kivi")
    out = lm.model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert text == lm.tokenizer.decode(out[0, ids.shape[1] :])


EXAMPLES = Path(__file__).parents[4] / "examples" / "lm-eval"
PROBLEM = {"problem": "1 + 1?", "solution": "", "subject": "", "level": 1, "unique_id": ""}
CHOICES = {f"choice_{letter}": f"a {letter}" for letter in "ABCD"}
DATA = {  # a line of each official file, an answer, and its scores
    "aime": ({"problem": "1 + 1?", "answer": "2"}, r"so $\boxed{2}$", {"exact_match": 1}),
    "math500": ({**PROBLEM, "answer": "2"}, r"so $\boxed{3}$", {"exact_match": 0}),
    "ifeval": (
        {
            "key": 1, "prompt": "Use no commas.", "kwargs": [{}],
            "instruction_id_list": ["punctuation:no_comma"],
        },
        "none here",
        {"prompt_level_strict_acc": True, "inst_level_strict_acc": [True]},
    ),
    "longbench2": (
        {
            "_id": "1", "domain": "", "sub_domain": "", "difficulty": "", "length": "",
            "question": "Which?", **CHOICES, "answer": "B", "context": "A text.",
        },
        None,
        {"acc": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_example_tasks_read_the_official_files(name, tmp_path, monkeypatch):
    record, answer, scores = DATA[name]
    file = "longbench2.json" if name == "longbench2" else f"{name}.jsonl"
    (tmp_path / file).write_text(json.dumps([record] if answer is None else record))
    monkeypatch.chdir(tmp_path)
    if name == "ifeval":
        pytest.importorskip("nltk")
    task = TaskManager(include_path=str(EXAMPLES)).load([name])["tasks"][name]
    (doc,) = task.eval_docs
    asked = task.doc_to_text(doc)
    assert record.get("prompt", record.get("problem", record.get("context"))) in asked
    if answer is None:
        assert asked.endswith("(")
        found = task.process_results(
            doc, [(-1.0, False), (-0.5, True), (-2.0, False), (-3.0, False)]
        )
    else:
        found = task.process_results(doc, [answer])
    assert scores.items() <= found.items()


def test_windows_of_rolling_tasks_are_no_answers_to_remember(tmp_path):
    lm = model(KvloomLM, recipe="kivi")
    cached = CachingLM(lm, str(tmp_path / "answers.db"))
    one = [Instance("loglikelihood_rolling", {}, (TEXT[:300],), 0)]
    assert cached.loglikelihood_rolling(one) == lm.loglikelihood_rolling(one, disable_tqdm=True)
