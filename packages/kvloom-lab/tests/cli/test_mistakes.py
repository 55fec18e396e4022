"""Mistakes on the command line: one sentence on stderr, exit code 2, and nothing was measured."""

from __future__ import annotations

import io
import shlex

import pytest
from typer.testing import CliRunner

from kvloom.errors import InputError
from kvloom.kernels import dispatch
from kvloom_lab import models
from kvloom_lab.bench import ModelShape
from kvloom_lab.bench import candidates as candidates_module
from kvloom_lab.bench import timing as timing_module
from kvloom_lab.cli.app import app
from kvloom_lab.cli.options import read_stdin
from kvloom_lab.cli.outputs import user_errors, write_file
from kvloom_lab.workload import clock

# What verbs have in common: they read files, take one recipe or several, write JSON, a picture.
READ = ["compare", "compare --text", "analyse attention", "analyse attention --text",
        "analyse error", "analyse error --text", "analyse distribution",
        "analyse distribution --text", "inspect", "inspect --text",
        "calibrate model --out c.kvcal --text"]  # fmt: skip
ONE = ["analyse attention --recipe", "analyse distribution --recipe", "generate hi --recipe",
       "inspect hi --recipe", "recipes"]  # fmt: skip
SEVERAL = ["compare --recipes", "analyse error --recipes",
           "calibrate model --out c.kvcal --recipes", "bench decode --recipes",
           "bench generate --recipes", "bench throughput --memory 1MiB --recipes"]  # fmt: skip
JSON = ["compare", "analyse attention", "analyse error", "analyse distribution", "inspect hi",
        "bench decode", "bench generate", "bench throughput --memory 1MiB"]  # fmt: skip
PLOT = ["compare", "analyse attention", "analyse distribution", "bench prefill"]
RECIPE_FILES = [
    ("none.toml", "recipe file 'none.toml' cannot be read (No such file or directory); give"),
    ("no-recipe.toml", "recipe file 'no-recipe.toml' is not a recipe: Recipe has no field 'stor'"),
]
LOAD = ["compare text.txt", "analyse error text.txt --context 64", "generate hi", "inspect hi"]
MODELS = [
    ("nobody/nothing", "there is no model 'nobody/nothing': it is not a local folder"),
    ("no-model", "'no-model' is a folder without config.json"),
    ("untyped", "model 'untyped' cannot be loaded: "),
    ("cut", "model 'cut' cannot be loaded: "),
]


def grid(verbs, *mistakes):
    """Every verb with every mistake: the command's words, and the error."""
    return [(f"{verb} {words}", said) for verb in verbs for words, said in mistakes]


COMMON = [
    *grid(
        READ,
        ("none.txt", "there is no file 'none.txt'"),
        ("empty.txt", "'empty.txt' is empty; give a file with text"),
        ("bytes.bin", "'bytes.bin' is not UTF-8 text; convert it first"),
        ("no-model", "'no-model' is a folder; give text files"),
    ),
    *grid(ONE, ("kivy", "mean 'kivi'?"), *RECIPE_FILES),
    *grid(
        SEVERAL,
        ("full,kivy", "did you mean 'kivi'?"),
        (",", "--recipes names no recipe; choose from full, "),
        *((f"full,{file}", said) for file, said in RECIPE_FILES),
    ),
    *grid(
        JSON,
        ("--json nowhere/a.json", "give a file in a folder that exists"),
        ("--json no-model", "give a file in a folder that exists"),
    ),
    *grid(
        PLOT,
        ("--plot nowhere/a.png", "give a file in a folder that exists"),
        ("--plot a.xyz", "must end in one of .png"),
    ),
    *grid(
        LOAD,
        *((f"--model {name}", said) for name, said in MODELS),
        ("--dtype fp8", "dtype='fp8' is unknown; use one of auto"),
    ),
    *grid(
        ("bench decode --context 64", "bench generate --context 64"),
        ("--context 0", "--context '0' is not a list of whole numbers above 0"),
        ("--context=-5", "--context '-5' is not a list"),
        ("--context 8k", "--context '8k' is not a list"),
        ("--context ,", "--context ',' is not a list"),
        ("--batch 0", "batch=0 must be 1 or more"),
        ("--heads 8/3", "8 query heads cannot share 3 key/value heads"),
        ("--heads 8/x", "--heads '8/x' is not query heads/key-value heads"),
        ("--heads 8/0", "kv_heads=0 must be 1 or more"),
        ("--head-dim 0", "head_dim=0 must be 1 or more"),
        ("--head-dim 7", "head_dim=7 is odd, and RoPE rotates pairs of channels; use 8"),
        ("--dtype int8", "--dtype 'int8' is unknown; use one of bfloat16, float16, float32"),
    ),
]
OWN = [
    ("compare short.txt --model model", "tokens, and the context and the new tokens need"),
    ("compare --recipes kivi,bits=4", "no recipe named 'bits=4'"),
    ("recipes --toml", "--toml writes one recipe file; give a NAME"),
    ("recipes kivi --toml --json", "give a NAME, and leave out --json"),
    ("compare --recipes kivi:bts=4", "no option 'bts' (did you mean 'bits'?)"),
    ("compare --recipes kivi:residual=100", "residual=100 is not a multiple of group=32"),
    ("compare --budget half", "--budget 'half' is neither whole tokens (512) nor a fraction"),
    ("compare --budget 0", "budget tokens=0 must be a whole number, 1 or more"),
    ("compare --budget 1.5", "budget fraction=1.5 must lie in (0, 1]"),
    ("compare --budget 16 --recipes snapkv", "window of 32 tokens does not fit a budget"),
    ("compare --budget 0.04 --recipes quest",
     "--budget 0.04 with quest: a budget of 81 tokens leaves nothing to find beside 80"),
    ("compare --ask before", "ask='before' is unknown; use one of after, inside"),
    ("compare text.txt --model model --context 1000", "use a context of 863 or less"),
    ("analyse attention text.txt --model model", "the model has 1024; give less text"),
    ("analyse error short.txt --model model", "give more text, a shorter context or fewer new"),
    ("analyse distribution --layers first", "--layers 'first' must be numbers, such as 0,3,5"),
    ("analyse distribution text.txt --model model --context 64 --layers 9 --recipe full",
     "kvloom does not compress layers [9]; choose from [0, 1]"),
    ("generate ''", "the prompt is empty; give some text to continue"),
    ("generate", "the prompt is empty; give some text to continue"),
    ("generate ab\udcff", "the prompt is not UTF-8 text; convert it first"),
    ("inspect ab\udcff", "the text is not UTF-8 text; convert it first"),
    ("generate hi --recipe clusterkv:seed=99999999999999999999", "seed is larger than 18,446,744,"),
    ("generate hi --model model --recipe kivi:group=64", "does not divide head_dim=32"),
    ("generate hi --model model --max-new-tokens 2000", "the model has 1024"),
    ("inspect '' --model model", "the text is empty"),
    ("inspect hi --text text.txt", "give the text either as TEXT or with --text, not both"),
    ("inspect text.txt --model model --max-new-tokens 1000", "the model has 1024; give less text"),
    ("generate hi --chat --model model", "the tokenizer of model 'model' has no chat template;"),
    ("inspect none.txt", "there is no file 'none.txt'; give a file that exists, or the text"),
    ("inspect hi --out nowhere/a.html", "give a file in a folder that exists"),
    ("calibrate model --out c.kvcal --recipes kivi", "'kivi' needs no calibration"),
    ("calibrate model --out nowhere/c.kvcal", "cannot write 'nowhere/c.kvcal'"),
    ("calibrate model --out c.kvcal --text text.txt --context 9000",
     "calibration needs 4 contexts of 9000; give more text"),
    ("calibrate model --out c.kvcal --text text.txt --recipes skvq",
     "group=128 does not divide the layer's channels=32"),
    ("calibrate model --out model/c.safetensors --text text.txt",
     "would read 'model/c.safetensors' as weights, since it ends in .safetensors next to "
     "a config.json; write 'model/c.kvcal' instead"),
    ("calibrate no-model --out c.kvcal --text text.txt", "a folder without config.json"),
    ("recipes kivi:bits=x", "option 'bits' of recipe 'kivi' must be a number, not 'x'"),
    ("bench generate --hidden 63", "hidden=63 is not a multiple of 32 query heads"),
    ("bench generate --layers 0", "layers=0 must be 1 or more"),
    ("bench throughput --memory lots", "memory 'lots' is not a size"),
    ("bench throughput --memory 1MiB --prompt 0", "--prompt '0' is not a list of whole numbers"),
    ("bench throughput --memory 1MiB --prompt 8+9+1", "--prompt '8+9+1' is not a list"),
    ("bench throughput --memory 1MiB --prompt 8+1", "--prompt '8+1' has answers of 1 token"),
    ("bench throughput --memory 1MiB --baselines sdpa",
     "is not all, none or some of dynamic, quanto, hqq, fp8, kvpress, continuous; choose"),
    ("bench throughput --memory 1MiB --prompt 1000 --model model", "the model has 1024"),
    ("bench throughput --memory 8KiB --prompt 400 --max-new-tokens 50 --model model "
     "--recipes full,kivi",
     "hold not even one request of 400 and 50 new tokens; give --memory 1MiB or more"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr(
        timing_module, "time_candidates", lambda *_, **__: pytest.fail("measured all the same")
    )
    monkeypatch.setattr(clock, "read_bandwidth_gb_s", lambda: 1.0)


def refused(command, **kwargs):
    """The one sentence of a run that must end with exit code 2."""
    found = CliRunner().invoke(app, shlex.split(command), **kwargs)
    assert found.exit_code == 2, found.output
    assert found.stdout == ""
    (line,) = found.stderr.strip().splitlines()
    assert line.startswith("kvloom: ")
    return line


@pytest.mark.parametrize(
    "command",
    [
        "compare short.txt", "compare text.txt --context 1000", "compare text.txt --context 40",
        "analyse attention short.txt", "analyse attention text.txt", "analyse error short.txt",
        "analyse distribution short.txt", "inspect ''", "inspect text.txt --max-new-tokens 1000",
        "generate hi --max-new-tokens 2000", "generate hi --chat",
    ],
)  # fmt: skip
def test_what_the_tokenizer_can_refuse_is_refused_before_the_model_is_loaded(command, monkeypatch):
    monkeypatch.setattr(models, "load_model", lambda *_: pytest.fail("loaded all the same"))
    refused(f"{command} --model model")


@pytest.mark.parametrize(("command", "said"), COMMON + OWN)
def test_a_mistake_is_reported_in_one_sentence(here, command, said):
    before = sorted(path.name for path in here.iterdir())
    assert said in refused(command)
    assert sorted(path.name for path in here.iterdir()) == before


@pytest.mark.parametrize("option", ["threads", "repeats"])
def test_a_number_below_one_is_refused(option):
    found = CliRunner().invoke(app, ["bench", "decode", f"--{option}=0"])
    assert found.exit_code == 2
    assert f"Invalid value for '--{option}'" in found.stderr


def test_a_model_that_is_no_decoder():
    assert "model 't5' cannot be loaded: " in refused("compare text.txt --model t5")


@pytest.mark.parametrize(
    "command",
    [
        "analyse attention --context=-5", "analyse error --context 1", "analyse error --seed=-1",
        "analyse distribution --context abc", "generate hi --max-new-tokens 0",
        "generate hi --temperature=-1", "generate hi --temperature inf", "generate hi --seed=-1",
        "generate hi --seed 18446744073709551616", "inspect hi --context 0",
        "inspect hi --max-new-tokens=-1", "compare --max-new-tokens 31", "compare --context=-5",
        "compare --seed=-1", "compare --batch 0", "compare --questions=-1", "calibrate model",
        "compare --recepes kivi", "recipe",
    ],
)  # fmt: skip
def test_a_number_out_of_range_and_a_word_there_is_not(command):
    found = CliRunner().invoke(app, shlex.split(command))
    assert (found.exit_code, found.stdout) == (2, "")
    assert isinstance(found.exception, SystemExit)  # Typer's own sentence
    assert "Usage: " in found.stderr


def test_a_temperature_near_0_is_refused():
    for temperature in ("0.001", "1e-320"):
        assert "give 0, or 0.01 to 100" in refused(f"generate hi --temperature {temperature}")


@pytest.mark.parametrize("verb", ["generate", "inspect"])
def test_stdin_that_is_no_text(verb):
    assert "stdin is not UTF-8 text; convert it first" in refused(verb, input=b"\xff\xfe")


def test_a_terminal_gets_a_hint_that_text_is_read_from_stdin(monkeypatch, capsys):
    typed = io.TextIOWrapper(io.BytesIO(b"one\r\ntwo\n"))
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    assert read_stdin() == "one\ntwo\n"
    assert capsys.readouterr().err == "reading text from stdin; press Ctrl-D to end it\n"


def test_kernels_there_are_not(monkeypatch):
    monkeypatch.setenv("KVLOOM_KERNELS", "fast")
    dispatch.environment.cache_clear()
    assert "unknown kernel backend 'fast'; choose one of auto, ref" in refused(
        "generate hi --model model"
    )


def test_memory_that_does_not_suffice(monkeypatch):
    tokens = 10**13  # beyond what a process can address
    assert "there is not enough memory for " in refused(
        f"bench decode --heads 4/2 --head-dim 32 --context {tokens}"
    )

    def none(*_):
        raise MemoryError

    monkeypatch.setattr(candidates_module, "random_qkv", none)
    assert "not enough memory for the tensors of this run; use fewer tokens" in refused(
        "bench pack"
    )


def test_an_error_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a bug"), user_errors():
        raise RuntimeError("a bug")


def test_a_file_without_permission(monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    line = refused("compare --json a.json")
    assert line == "kvloom: cannot write 'a.json': no permission; give another file"


def test_a_file_that_cannot_be_written_after_all(tmp_path):
    with pytest.raises(InputError, match=r"cannot write '.*gone/a.json': No such file"):
        write_file(tmp_path / "gone" / "a.json", "{}")


def test_a_model_shape_of_nothing():
    with pytest.raises(InputError, match="vocabulary=0 must be 1 or more"):
        ModelShape(vocabulary=0)
