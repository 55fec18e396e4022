"""What a comparison prints, draws and writes."""

import json
import math

import pytest
from rich.console import Console

from kvloom.errors import InputError
from kvloom_lab import eval as work
from kvloom_lab.eval import Row
from kvloom_lab.eval.tables import comparison_table
from kvloom_lab.show.plots import check_plot, comparison_plot, line_style


def test_json_has_the_promised_fields(model, task, rows):
    environment = work.environment(model, "tiny", task, seed=5, text="lines")
    found = json.loads(json.dumps(work.to_data(rows, environment)))
    assert set(found) == {"environment", "rows"}
    assert {"python", "kvloom", "torch", "transformers", "cpu", "gpu", "threads", "dtype", "model",
            "context", "batch", "seed", "date"} <= set(found["environment"])  # fmt: skip
    assert found["environment"]["context"] == 200
    assert found["environment"]["dtype"] == "float32"
    want = {"recipe", "bits_per_value", "kv_bytes", "times_smaller", "prefill_s",
            "decode_tokens_s", "perplexity", "agreement", "needle", "tokens_read",
            "moved_bytes", "ready", "problem", "failed"}  # fmt: skip
    assert all(set(row) == want for row in found["rows"])
    assert found["rows"][3]["perplexity"] is None


def test_tokens_read_per_step_are_shown_for_recipes_with_recall(model, tokenizer, task, rows):
    assert all(row.tokens_read is None for row in rows)
    spec = "quest:tokens=48,page=4,sinks=4,recent=8,full_layers=1"
    recalled = work.compare(model, [spec], task)
    layers, seen = model.config.num_hidden_layers, 240
    found = recalled[1].tokens_read * layers - seen  # all layers but the first recall
    assert 48 <= found / (layers - 1) <= 48 + 3 + 1  # an unfinished page, and the step's token
    environment = work.environment(model, "tiny", task, seed=5, text="lines")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(comparison_table(recalled, environment))
    shown = " ".join(captured.get().split())
    assert f"tokens read per step and layer: {spec} {recalled[1].tokens_read:,.0f}" in shown
    assert recalled[1].moved_bytes is None
    assert "copied from a tier" not in shown


def test_bytes_copied_per_step_are_shown_for_recipes_with_a_tier(model, tokenizer, task):
    spec = "quest:tokens=48,page=4,sinks=4,recent=8,full_layers=1,tier=host"
    row = work.compare(model, [spec], task)[1]
    config, rows = model.config, task.text.shape[0]
    chosen = 48 - 4 - 8  # tokens a step, of each row and head of the layers after the first
    heads = rows * config.num_key_value_heads * (config.num_hidden_layers - 1)
    token = 2 * config.head_dim * 4  # keys and values in fp32
    assert 0 < row.ready < 1
    assert row.moved_bytes == pytest.approx(chosen * heads * token * (1 - row.ready))
    environment = work.environment(model, "tiny", task, seed=5, text="lines")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(comparison_table([row], environment))
    shown = " ".join(captured.get().split())
    assert (
        f"copied from a tier per step, all rows: {spec} {row.moved_bytes / 2**20:,.2f} MiB" in shown
    )


def test_json_of_an_endless_perplexity_is_null():
    row = Row("rtn", 2.0, 1, 8.0, 0.1, 1.0, math.inf, 0.0, None)
    assert work.to_data([row], {})["rows"][0]["perplexity"] is None


def test_table_is_readable_at_100_columns(model, task, rows):
    environment = work.environment(model, "tiny", task, seed=0, text="lines")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(comparison_table(rows, environment))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= 100
    assert "kivi:group=32,residual=32" in shown  # not folded
    assert "kivi:group=64 cannot run: " in shown
    assert f"{rows[1].bits_per_value:.2f}" in shown


@pytest.mark.parametrize("width", [20, 40, 60, 99, 100, 200])
def test_a_table_of_any_width_shows_every_figure(model, task, width):
    row = Row("skvq:group=32,calibration=x.safetensors", 13.75, 6 << 20, 4.4, 0.63, 1099.9, 5.905,
              0.884, 1.0)  # fmt: skip
    environment = work.environment(model, "tiny", task, seed=0, text="lines")
    console = Console(width=width)
    with console.capture() as captured:
        console.print(comparison_table([row], environment))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    for figure in ("13.75", "6.00", "4.4x", "0.63", "1,099.9", "5.905", "88.4%", "3/3"):
        assert f" {figure}" in shown
    assert "perplexity" in shown or width == 20
    assert shown.count("recipe") == {20: 8, 40: 4, 60: 2}.get(width, 1)  # blocks of columns


def test_plot_writes_a_picture(model, task, rows, tmp_path):
    environment = work.environment(model, "tiny", task, seed=0)
    for name in ("a.png", "b.svg"):
        comparison_plot(rows, environment).savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    svg = (tmp_path / "b.svg").read_text()
    assert "window:tokens=24" in svg
    assert "kivi:group=64 " not in svg
    with pytest.raises(InputError, match=r"must end in one of \.png"):
        check_plot(tmp_path / "c.txt")


def test_no_two_of_sixty_recipes_look_the_same():
    assert len({str(line_style(i)) for i in range(60)}) == 60
