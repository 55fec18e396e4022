"""`kvloom eval`: scores equal those of a plain loop, and one failure does not stop the others."""

import json
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

import tiny
from kvloom import Cache, Recipe, __version__
from kvloom.errors import RecipeError
from kvloom.hf import geometry
from kvloom.recipe.resolve import resolve
from kvloom_lab.cli.app import app
from kvloom_lab.eval import evaluate as evaluate_module
from kvloom_lab.eval.decoding import answers, greedy, read_question
from kvloom_lab.eval.evaluate import at_share, evaluate, units_to_measure
from kvloom_lab.eval.results import ResultFolder
from kvloom_lab.eval.sample import Source, task_batches
from kvloom_lab.eval.tasks import task_named
from kvloom_lab.workload.passes import run_alone

NAMES = ["full", "window:tokens=16", "kivi:group=16,residual=16", "kivi:group=64",
         "quest:page=4,recent=8,full_layers=0,tokens=32"]  # fmt: skip
RUN = {"environment": {"kvloom": __version__}, "model": {}, "settings": {}}


@pytest.fixture(scope="module")
def model():
    return tiny.llama(max_position_embeddings=2048, num_hidden_layers=2)


@pytest.fixture(scope="module")
def source():
    return Source.of(
        tiny.tokenizer(), tiny.TEXT, lengths=[420], samples=1, new_tokens=6, batch=2, seed=0
    )


@pytest.fixture(scope="module")
def plan(source):
    names = ["perplexity", "free", "niah:multikey", "multiturn"]
    return task_batches([task_named(name) for name in names], source, 2048)


@pytest.fixture(scope="module")
def lines(model, source, plan, tmp_path_factory):
    folder = ResultFolder.open(tmp_path_factory.mktemp("results"), RUN)
    reports, again = [], []
    recipes = [resolve(name) for name in NAMES]
    evaluate(model, source, recipes, plan, folder, lambda what, n: reports.append(n))
    assert reports[0] == 0
    assert sum(reports) == units_to_measure(plan, recipes) == 5 * (1 + 1 + 10 + 8)
    evaluate(model, source, recipes, plan, folder, lambda what, n: again.append(n))
    assert again == [sum(reports)]  # all were finished before
    return {
        (task.name, line["sample"], line["recipe"]): line
        for task, _ in plan
        for line in folder.lines(task.name)
    }


def batch_of(plan, name):
    return next(batches[0] for task, batches in plan if task.name == name)


def scored(lines, task):
    """The lines of a task that have scores, with the recipes that they belong to."""
    return [(line, key[2]) for key, line in lines.items() if key[0] == task and "scores" in line]


def read(model, recipe, batch):
    """A cache of its own that has read the context."""
    cache = Cache(model, recipe)
    with torch.inference_mode():
        model(batch.ids, past_key_values=cache, use_cache=True)
    return cache


def step(model, cache, ids):
    """The greedy token after ids, and the log-probabilities."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
    return int(logits.argmax()), torch.log_softmax(logits.float(), -1)


def test_every_sample_has_a_line_for_each_recipe(lines):
    assert len(lines) == 5 * 20
    assert {key[2] for key in lines} == set(NAMES)


def test_full_has_no_divergence(lines):
    full = lines["perplexity", "420/0", "full"]["scores"]
    assert (full["kl_mean"], full["kl_p999"], full["agreement"]) == (0, 0, 1)
    free = lines["free", "420/0", "full"]["scores"]
    assert (free["diverged_at"], free["kl_mean"]) == (6, 0)


def test_bytes_are_those_of_the_cache(lines, model, plan):
    for name in NAMES[:3]:
        line = lines["niah", "multikey/420/0/0", name]
        assert line["kv_bytes"] == read(model, name, batch_of(plan, "niah")).nbytes
        assert line["exact_bytes"] == 420 * 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, dim, fp32


def test_bits_and_tokens_read_are_those_of_the_cache(lines, model, plan):
    batch = batch_of(plan, "perplexity")
    found = {recipe: line for line, recipe in scored(lines, "perplexity")}
    for name in ("full", NAMES[1], NAMES[4]):
        cache = read(model, name, batch)
        for i in batch.samples[0].payload[:-1]:
            step(model, cache, [int(i)])
        want = {"bits_per_value": cache.bits_per_value}
        if name == NAMES[4]:
            want["tokens_read"] = cache.tokens_read
            assert 32 <= cache.tokens_read < 60, "of 420"
        line = {key: found[name].get(key) for key in ("bits_per_value", "tokens_read")}
        assert line == pytest.approx({"tokens_read": None, **want})


def test_perplexity_equals_a_plain_loop(lines, model, plan):
    batch = batch_of(plan, "perplexity")
    ids = batch.samples[0].payload.tolist()
    exact = read(model, "full", batch)
    p = [step(model, exact, [i])[1] for i in ids[:-1]]
    for line, recipe in scored(lines, "perplexity"):
        cache = read(model, recipe, batch)
        q = [step(model, cache, [i])[1] for i in ids[:-1]]
        nll = -torch.stack([x[i] for x, i in zip(q, ids[1:], strict=True)]).mean()
        kl = torch.stack([(a.exp() * (a - b)).sum() for a, b in zip(p, q, strict=True)])
        assert line["scores"]["nll"] == pytest.approx(float(nll), abs=1e-4)
        assert line["scores"]["kl_mean"] == pytest.approx(float(kl.mean()), abs=1e-4)
        same = [float(a.argmax() == b.argmax()) for a, b in zip(p, q, strict=True)]
        assert line["scores"]["agreement"] == pytest.approx(sum(same) / 6)
        assert len(line["curves"]["kl"]) == len(line["tokens"]) == 6
    assert len(scored(lines, "perplexity")) == 4


def test_free_running_text_equals_a_plain_loop(lines, model, plan, source):
    batch = batch_of(plan, "free")
    texts = {}
    for line, recipe in scored(lines, "free"):
        cache, exact = read(model, recipe, batch), read(model, "full", batch)
        token, found, kl = int(batch.samples[0].payload[0]), [], []
        for _ in range(6):
            p = step(model, exact, [token])[1]
            token, q = step(model, cache, [token])
            found.append(token)
            kl.append(float((p.exp() * (p - q)).sum()))
        texts[recipe] = found
        assert line["answer"] == source.decode(found)
        assert line["scores"]["kl_mean"] == pytest.approx(sum(kl) / 6, abs=1e-4)
        same = [a == b for a, b in zip(found, texts["full"], strict=True)]
        assert line["scores"]["diverged_at"] == (same.index(False) if False in same else 6)


@pytest.mark.parametrize("task", ["niah", "multiturn"])
def test_answers_equal_a_plain_loop(lines, model, plan, source, task):
    batch = batch_of(plan, task)
    for recipe in (NAMES[1], NAMES[4]):
        cache, last = read(model, recipe, batch), []
        for sample in batch.samples[: 6 if task == "multiturn" else 2]:
            document, asked = sample.payload if task == "multiturn" else ([], sample.payload)
            if task == "niah":
                cache = read(model, recipe, batch)
            if document:
                step(model, cache, [*last, *document])
                last = []
            ids = [*last, *asked.ids]
            if recipe.startswith("quest"):
                for i in ids[:-1]:
                    step(model, cache, [i])
                ids = ids[-1:]
            found = []
            for _ in range(asked.tokens):
                token, _ = step(model, cache, ids)
                found.append(token)
                ids = [token]
            last = found[-1:] if task == "multiturn" else []
            line = lines[task, sample.name, recipe]
            assert line["answer"] == source.decode(found)
            assert line["tokens"] == source.pieces(found)


def test_a_recipe_that_fails_says_why_and_the_others_continue(lines):
    problems = {key[2]: line["problem"] for key, line in lines.items() if "problem" in line}
    assert set(problems) == {"kivi:group=64"}
    assert "group" in problems["kivi:group=64"]
    assert "scores" not in lines["niah", "multikey/420/0/0", "kivi:group=64"]


def test_a_recipe_whose_step_cannot_be_timed_says_why_too(
    model, plan, source, tmp_path, monkeypatch
):
    whole = evaluate_module.decode_seconds

    def fails(model, cache, rows):
        if cache.recipe.name == NAMES[1]:
            raise MemoryError
        return whole(model, cache, rows)

    monkeypatch.setattr(evaluate_module, "decode_seconds", fails)
    folder = ResultFolder.open(tmp_path, {"environment": {}, "model": {}, "settings": {}})
    recipes = [resolve(name) for name in NAMES[:3]]
    evaluate(model, source, recipes, [plan[0]], folder)
    found = {line["recipe"]: line.get("problem", "") for line in folder.lines(plan[0][0].name)}
    assert list(map(bool, found.values())) == [False, True, False]
    assert "not enough memory" in found[NAMES[1]]


def test_a_sample_with_nan_among_its_scores_has_failed(model, plan, source, tmp_path, monkeypatch):
    task = plan[0][0]
    whole = type(task).measure

    def broken(self, run):
        outcomes, baseline = yield from whole(self, run)
        if run.cache.recipe.name != "full":
            outcomes[0].scores["nll"] = float("nan")
        return outcomes, baseline

    monkeypatch.setattr(type(task), "measure", broken)
    folder = ResultFolder.open(tmp_path, RUN)
    evaluate(model, source, [resolve(name) for name in NAMES[:2]], [plan[0]], folder)
    full, other = (x for x in folder.lines(task.name))
    assert "problem" not in full
    assert (other["problem"], other["failed"]) == (
        "the model predicts NaN or infinity: no nll",
        True,
    )


def test_a_failure_is_measured_again_and_a_refusal_is_final(
    model, plan, source, tmp_path, monkeypatch
):
    task = plan[0][0]
    whole, measured = type(task).measure, []

    def fails(self, run):
        measured.append(run.cache.recipe.name)
        if run.cache.recipe.name == NAMES[1]:
            raise RuntimeError("a defect")
        return (yield from whole(self, run))

    folder = ResultFolder.open(tmp_path, RUN)
    recipes = [resolve(name) for name in (*NAMES[:2], NAMES[3])]

    def problems():
        evaluate(model, source, recipes, [plan[0]], folder)
        lines = folder.outcomes(task.name).values()
        return {x["recipe"]: x.get("failed") for x in lines if "problem" in x}

    with monkeypatch.context() as patch:
        patch.setattr(type(task), "measure", fails)
        for _ in range(2):  # it fails again
            assert problems() == {NAMES[1]: True, NAMES[3]: None}
        assert measured == [*NAMES[:2], *NAMES[:2]]  # `full` is what others are compared with
    assert problems() == {NAMES[3]: None}
    assert [x["recipe"] for x in folder.lines(task.name)].count(NAMES[1]) == 3


def test_an_answer_ends_before_the_end_of_text(model, plan, source, monkeypatch):
    batch = batch_of(plan, "niah")
    cache, asked = read(model, "full", batch), [s.payload for s in batch.samples]
    ids, tokens = [a.ids for a in asked], [a.tokens for a in asked]
    with torch.inference_mode():
        before = run_alone(model, answers(model, cache, ids, tokens, source.batch))
        end = before[0][3]
        monkeypatch.setattr(model.generation_config, "eos_token_id", [end, 10**6])
        after = run_alone(model, answers(model, cache, ids, tokens, source.batch))
        logits = run_alone(model, read_question(cache, torch.tensor([ids[0]])))
        rows = run_alone(model, greedy(cache, logits, tokens[0], [end]))
    for a, b in zip(before, after, strict=True):
        assert b == a[: a.index(end) if end in a else len(a)]
    assert rows[0].tolist() == before[0][: before[0].index(end) + 1]


# the command


def run(here, *args):
    usual = ["--model", here / "model", "--text", here / "text.txt", "--samples", "1",
             "--max-new-tokens", "4", "--recipes", "window:tokens=64"]  # fmt: skip
    return CliRunner().invoke(app, ["eval", *map(str, [*usual, *args])])


def test_the_command_writes_a_folder_and_goes_on_in_it(here, tmp_path):
    args = ["perplexity", "niah:multikey", "--context", "420", "--out", tmp_path / "out"]
    found = run(here, *args)
    assert found.exit_code == 0, found.output
    assert f"results: {tmp_path / 'out'}" in found.output
    files = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    assert set(files) == {"run.json", "prompts.jsonl", "perplexity.jsonl", "niah.jsonl"}
    settings = json.loads(files["run.json"])["settings"]
    assert (settings["tasks"], settings["data"]) == (["perplexity", "niah:multikey"], None)
    assert run(here, *args).exit_code == 0
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == files
    other = run(here, *args, "--seed", "3")
    assert other.exit_code == 2
    assert "settings seed 0, and this run has 3" in other.stderr


def test_a_failure_gives_an_exit_status_until_a_later_run_has_figures(here, tmp_path, monkeypatch):
    whole = evaluate_module.decode_seconds

    def fails(model, cache, rows):
        if cache.recipe.name != "full":
            raise MemoryError
        return whole(model, cache, rows)

    args = ["perplexity", "--context", "420", "--out", tmp_path]
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_module, "decode_seconds", fails)
        found = run(here, *args)
    assert found.exit_code == 1
    assert "kvloom: window:tokens=64 failed on some samples; run the same" in found.stderr
    found = run(here, *args)
    assert (found.exit_code, "failed" in found.stderr) == (0, False)
    assert "memory" not in found.stdout


@pytest.mark.parametrize("task", ["niah:multikey", "trace", "instructions", "state:update"])
def test_ctrl_c_says_how_to_resume(here, tmp_path, monkeypatch, task):
    name = task.partition(":")[0]
    args = [task, "--context", "700"]
    assert run(here, *args, "--out", tmp_path / "whole").exit_code == 0
    args += ["--out", tmp_path / "out"]
    append = ResultFolder.append

    def interrupted(folder, file, lines):
        append(folder, file, lines)
        if file == name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResultFolder, "append", interrupted)
        found = run(here, *args)
    assert (found.exit_code, found.stdout) == (130, "")
    assert "Run the same command again to resume.\n" in found.stderr
    file = tmp_path / "out" / f"{name}.jsonl"
    first = file.read_text()
    assert run(here, *args).exit_code == 0
    assert file.read_text().startswith(first)
    names = [
        [(x["sample"], x["recipe"]) for x in map(json.loads, path.read_text().splitlines())]
        for path in (file, tmp_path / "whole" / file.name)
    ]
    assert sorted(names[0]) == sorted(names[1])


def test_bytes_give_a_budget(here, tmp_path):
    found = run(here, "perplexity", "--context", "420", "--share", "0.5,0.25", "--out", tmp_path)
    assert found.exit_code == 0, found.output
    lines = [json.loads(x) for x in (tmp_path / "perplexity.jsonl").read_text().splitlines()]
    names = ["full", "window:tokens=64 at 0.5", "window:tokens=64 at 0.25"]
    assert [x["recipe"] for x in lines] == names
    assert lines[2]["kv_bytes"] < lines[1]["kv_bytes"] < lines[0]["kv_bytes"]


def test_a_share_counts_windows_and_the_layers_that_evict():
    shape = geometry(tiny.gemma(window=100))
    for name in ("h2o", "full@first 1=h2o"):
        sized = at_share(resolve(name), 0.6, 200, shape)
        sizes = [x.nbytes(200, shape) + x.sliding_nbytes(200, shape) for x in (sized, Recipe())]
        assert 0.55 < sizes[0] / sizes[1] <= 0.6
    with pytest.raises(RecipeError, match=r"h2o has no budget that takes 0\.05 of the exact cache"):
        at_share(resolve("h2o"), 0.05, 200, shape, states=10**6)
    assert at_share(resolve("kivi"), 0.6, 200, shape) == resolve("kivi")
    with pytest.raises(RecipeError, match="some layers evict and others recall"):
        at_share(resolve("quest:full_layers=0@0=h2o"), 0.6, 200, geometry(tiny.llama()))


@pytest.mark.parametrize(
    ("task", "context", "lengths"),
    [("perplexity", "128,64", [128, 64]), ("short", "130", [64, 128])],
)
def test_each_length_has_a_table(here, tmp_path, task, context, lengths):
    found = run(here, task, "--context", context, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    found = re.findall(rf"^({task}.*?) *$|^ window:tokens=64 +([\d.]+)%", found.stdout, re.M)
    titles, shares = [title for title, _ in found if title], [float(x) for _, x in found if x]
    assert titles == [f"{task}, context {length}" for length in lengths]
    assert shares[lengths.index(128)] < shares[lengths.index(64)]


def test_summaries_of_a_file(here, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "A cat sat.", "summary": "A cat."}\n')
    args = ["summarize", "--data", tmp_path / "a.jsonl", "--context", "700"]
    found = run(here, *args, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    line = json.loads((tmp_path / "out" / "summarize.jsonl").read_text().splitlines()[0])
    assert set(line["scores"]) == {"rouge1", "rouge2", "rougeL"}
    assert json.loads((tmp_path / "out" / "run.json").read_text())["settings"]["data"] == "a.jsonl"


@pytest.mark.parametrize(("args", "message"), [
    (["reading"], "there is no task 'reading'"),
    (["niah", "--ask", "before"], "ask='before' is unknown; use one of after, inside"),
    (["niah", "--context", "0"], "--context '0' is not a list of whole numbers above 0"),
    (["niah", "--share", "2"], "--share '2' is not a list of shares between 0 and 1"),
    (["niah", "--share", "nan"], "--share 'nan' is not a list of shares between 0 and 1"),
    (["perplexity", "--context", "900", "--samples", "20"], "20 separate contexts with the tokens"),
    (["niah", "--share", "0.5", "--budget", "9"], "--share and --budget both set the budget"),
    (["niah", "--share", "0.5", "--context", "64,128"], "--share needs one --context"),
    (["niah", "--recipes", "quest", "--budget", "0.5", "--context", "256,512"],
     "--budget 0.5 is another number of tokens for quest"),
    (["niah", "--context", "1020"], "niah: a context of 1020 tokens and the "),
    (["perplexity", "--context", "1021"], "need 1025 positions, and the model has 1024"),
    (["multiturn", "--context", "700"], "multiturn: a context of 700 tokens and the "),
    (["ruler", "--context", "4096"], "ruler: a context of 4096 tokens"),
    (["niah", "--data", "x"], "--data is given, and niah takes none"),
    (["longbench"], "the task longbench needs --data: a file or folder of LongBench's JSON lines"),
    (["summarize", "--data", "x"], "there is no file or folder 'x'"),
])  # fmt: skip
def test_mistakes_are_refused_before_the_model_is_loaded(
    here, tmp_path, args, message, monkeypatch
):
    monkeypatch.setattr("kvloom_lab.models.load_model", None)  # a call would fail
    found = run(here, *args, "--out", tmp_path / "out")
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith("kvloom: ")
    assert message in found.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("args", "message"), [
    (["--share", "0.001", "--recipes", "h2o"], "h2o has no budget that takes 0.001 of the exact"),
    (["--share", "0.2496,0.2504"], "two different recipes have the name 'window:tokens=64 at"),
    (["--out", "text.txt"], "cannot write to 'text.txt': 'text.txt' is a file"),
    (["--out", "text.txt/out"], "cannot write to 'text.txt/out': "),
    (["--seed", "2"], "holds results with settings seed 0, and this run has 2"),
])  # fmt: skip
def test_a_run_that_cannot_begin_is_refused_before_the_model_is_loaded(
    here, tmp_path, args, message, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("")
    usual = ["perplexity", "--context", "128"]
    assert run(here, *usual, "--out", "out").exit_code == 0
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("kvloom_lab.models.load_model", None)  # a call would fail
    out = [] if "--out" in args else ["--out", "out" if "--seed" in args else "new"]
    found = run(here, *usual, *args, *out)
    assert (found.exit_code, found.stdout) == (2, "")
    assert message in found.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_config_without_a_dtype_leaves_the_checks_to_the_weights(here, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(here / "model", model)
    config = json.loads((model / "config.json").read_text())
    del config["dtype"]
    (model / "config.json").write_text(json.dumps(config))
    args = ["--recipes", "h2o", "--share", "0.001", "--out", tmp_path / "out", "--model", model]
    found = run(here, "perplexity", "--context", "128", *args)
    assert "h2o has no budget that takes 0.001" in found.stderr
    assert found.exit_code == 2


def test_longbench_needs_a_chat_template(here, tmp_path):
    line = {"input": "", "context": "", "answers": ["1"], "dataset": "qmsum", "_id": "a"}
    (tmp_path / "qmsum.jsonl").write_text(json.dumps(line))
    args = ["longbench", "--data", tmp_path, "--context", "400", "--out", tmp_path / "out"]
    found = run(here, *args)
    assert found.exit_code == 2
    assert "the tokenizer has no chat template" in found.stderr
