"""The page of `kvloom report` in a real browser: what it shows is what the folders say.

Needs Chromium and its chromedriver. Without them these tests are skipped; REQUIRE_BROWSER=1 makes
that a failure.
"""

from __future__ import annotations

import json
import re

import pytest
from test_page import Page, browser

from kvloom_lab.eval.kvpress import read_kvpress
from kvloom_lab.eval.results import read_run
from kvloom_lab.show.pages import page_data, results_page
from results_folder import HOSTILE, recipe_name, write_kvpress, write_results

__all__ = ["browser"]  # the fixture

FEW = {"methods": ("kivi", "h2o", "snapkv", "skvq"), "shares": (1 / 4, 1 / 8), "samples": 20}
RIGHT, LEFT, END, ENTER, ESCAPE = "\ue014", "\ue012", "\ue010", "\ue007", "\ue00c"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_results(root / "short", **FEW)
    write_results(root / "long", **{**FEW, "length": 4096})
    write_kvpress(root / "kvpress")
    return root


@pytest.fixture(scope="module")
def pages(folders):
    """Summary and file of a page by the folders that it shows."""
    short, long = read_run(folders / "short"), read_run(folders / "long")
    kvpress = read_kvpress(folders / "kvpress")
    made = {}
    for name, runs in {"one": [short], "all": [short, long, *kvpress]}.items():
        summary, chunks = page_data(runs)
        file = folders / f"{name}.html"
        file.write_text(results_page(summary, chunks), encoding="utf-8")
        made[name] = summary, file
    return made


@pytest.fixture
def one(browser, pages):
    shown = Page(browser, *pages["one"])
    yield shown
    assert shown.errors() == []


@pytest.fixture
def several(browser, pages):
    shown = Page(browser, *pages["all"])
    yield shown
    assert shown.errors() == []


def wait(test, seconds=10):
    """Wait until test() is true: the page unpacks texts while it runs."""
    import time

    until = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < until, "the page did not show it in time"
        time.sleep(0.05)


def task_of(shown, name, run=0):
    return next(task for task in shown.data["runs"][run]["tasks"] if task["name"] == name)


def row_of(task, recipe):
    return next(row for row in task["rows"] if row["recipe"] == recipe)


def points(shown, box="#pareto"):
    return {e.get_attribute("data-recipe"): e for e in shown.all(f"{box} .point")}


def place(point):
    x, y = point.get_attribute("transform").removeprefix("translate(").rstrip(")").split()
    return float(x), float(y)


def test_the_first_screen_answers(one):
    assert one.browser.title == "short – kvloom report"
    rows = one.all("#answers tbody tr")
    names = [row.find_element("css selector", "b").text for row in rows]
    assert names == ["perplexity", "free", "niah", "ruler"]
    for keep in ("0.99", "0.9", "0.8"):
        one.choose("keep", keep)
        for task, row in zip(names, one.all("#answers tbody tr"), strict=True):
            task = task_of(one, task)
            main, exact = task["main"], row_of(task, "full")["scores"][task["main"]][0]
            good = []
            for other in task["rows"][1:]:
                if main in other["scores"]:
                    mine = other["scores"][main][0]
                    lower = task["scores"][main] == "lower"
                    quality = exact / mine if lower else mine / exact
                    if quality >= float(keep):
                        good.append((other["share"], -quality, other["recipe"]))
            wanted = min(good)[2] if good else "None."
            assert wanted in row.text
    assert one.find("#answers").rect["y"] + one.find("#answers").rect["height"] < 1000


def test_a_headline_on_one_sample_says_so(browser, tmp_path, one):
    assert "one sample" not in one.find("#answers").text
    write_results(tmp_path, **{**FEW, "samples": 1})
    summary, chunks = page_data([read_run(tmp_path)])
    (tmp_path / "page.html").write_text(results_page(summary, chunks), encoding="utf-8")
    single = Page(browser, summary, tmp_path / "page.html")
    for keep in ("0.8", "0.99"):  # with an answer, and without one
        single.choose("keep", keep)
        rows = [row.text for row in single.all("#answers tbody tr")]
        assert all(re.search(r"keeps \d+\.\d% on one sample", row) for row in rows), rows
    assert any("None. The best" in row for row in rows)


def test_a_recipe_without_all_samples_is_not_compared(browser, tmp_path):
    write_results(tmp_path, **FEW)
    file = tmp_path / "perplexity.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    recipe = "kivi:fraction=0.250"
    of_recipe = [line for line in lines if json.loads(line)["recipe"] == recipe]
    file.write_text("".join(line for line in lines if line != of_recipe[0]))
    summary, chunks = page_data([read_run(tmp_path)])
    (tmp_path / "page.html").write_text(results_page(summary, chunks), encoding="utf-8")
    page = Page(browser, summary, tmp_path / "page.html")
    said = f"{recipe} (perplexity: {len(of_recipe) - 1} of {len(of_recipe)})"
    assert f"Not compared, because samples are missing: {said}. Run" in page.find("#answers").text
    task = task_of(page, "perplexity")
    number = [row["recipe"] for row in task["rows"]].index(recipe)
    assert number not in task["fronts"]["perplexity"]
    page.choose("keep", "0.8")
    assert recipe not in page.all("#answers tbody tr")[0].text


def test_points_are_where_the_figures_say(one):
    task = task_of(one, "perplexity")
    found = points(one)
    assert set(found) == {row["recipe"] for row in task["rows"] if row["scores"]}
    a, b = recipe_name("h2o", 1 / 4), recipe_name("h2o", 1 / 8)
    (ax, ay), (bx, by), (fx, fy) = (place(found[name]) for name in (a, b, "full"))
    assert (fx - ax) / (fx - bx) == pytest.approx(2 / 3, abs=1e-3)  # log: 1/4 and 1/8 of the bytes
    assert fy < ay < by  # a lower perplexity is better, and better is up
    one.find("#logx").click()
    (ax, _), (bx, _), (fx, _) = (place(points(one)[name]) for name in (a, b, "full"))
    assert (fx - ax) / (fx - bx) == pytest.approx(0.75 / 0.875, abs=1e-3)
    one.choose("task", "niah")
    task = task_of(one, "niah")
    ys = {name: place(e)[1] for name, e in points(one).items()}
    scores = {row["recipe"]: row["scores"]["correct"][0] for row in task["rows"] if row["scores"]}
    assert sorted(ys, key=ys.get) == sorted(scores, key=lambda r: (-scores[r], list(ys).index(r)))


def test_hover_and_focus_show_the_figures(one):
    from selenium.webdriver import ActionChains

    name = recipe_name("kivi", 1 / 8)
    row = row_of(task_of(one, "perplexity"), name)
    one.choose("size", "0.125")
    assert not one.find("#tip").is_displayed()
    ActionChains(one.browser).move_to_element(points(one)[name]).perform()
    wait(lambda: one.find("#tip").is_displayed())
    shown = one.find("#tip").text
    mean, low, high, _ = row["scores"]["perplexity"]
    assert f"{mean:.3f} [{low:.3f}, {high:.3f}]" in shown
    assert name in shown
    assert "12.5% (8.0× smaller)" in shown


def test_the_keyboard_reaches_every_point(one):
    assert len(one.all("#pareto .point[tabindex='0']")) == 1  # one stop for the Tab key
    first = one.find("#pareto .point[tabindex='0']")
    one.browser.execute_script("arguments[0].focus()", first)
    seen = [one.browser.switch_to.active_element.get_attribute("data-recipe")]
    for _ in range(len(points(one)) - 1):
        one.browser.switch_to.active_element.send_keys(RIGHT)
        seen.append(one.browser.switch_to.active_element.get_attribute("data-recipe"))
        assert seen[-1] in one.find("#tip").text
    assert sorted(seen) == sorted(points(one))
    active = one.browser.switch_to.active_element
    assert active.get_attribute("data-recipe") == "full"
    active.send_keys(LEFT)
    name = one.browser.switch_to.active_element.get_attribute("data-recipe")
    one.browser.switch_to.active_element.send_keys(ENTER)
    assert one.find("#a").get_property("value") == name
    assert one.browser.switch_to.active_element.get_attribute("id") == "a"


def test_recipes_can_be_filtered(one):
    everything = set(points(one))
    one.find("#filter summary").click()
    button = next(e for e in one.all("#families button") if e.text == "h2o")
    button.click()
    assert set(points(one)) == {name for name in everything if not name.startswith("h2o")}
    again = next(e for e in one.all("#families button") if e.text == "h2o")
    assert again.get_attribute("aria-pressed") == "false"
    assert "h2o" not in one.find("#table").text
    assert "h2o" not in one.find("#answers").text
    one.find("#everything").click()
    one.find("#find").send_keys("snap")
    assert set(points(one)) == {name for name in everything if "snap" in name}
    one.find("#everything").click()
    one.find("#find").send_keys(ESCAPE)
    assert not one.find("#families").is_displayed()
    one.choose("size", "0.25")
    assert set(points(one)) == {name for name in everything if name == "full" or "0.25" in name}


def test_the_front_joins_what_nothing_beats(one):
    one.choose("task", "ruler")
    task = task_of(one, "ruler")
    front = [task["rows"][i]["recipe"] for i in task["fronts"]["correct"]]
    path = one.find("#pareto .front").get_attribute("d")
    x, y = path.removeprefix("M").partition("H")[0].split(",")
    assert (float(x), float(y)) == pytest.approx(place(points(one)[front[0]]))
    marked = [
        e.text.split()[0]
        for e in one.all("#table td.recipe")
        if e.find_elements("css selector", "[title='on the Pareto front']")
    ]
    assert sorted(marked) == sorted(front)


def test_heatmaps_show_length_by_depth(one):
    task = task_of(one, "niah")
    name = recipe_name("h2o", 1 / 8)
    box = next(e for e in one.all(".heat") if e.find_element("css selector", "h3").text == name)
    row = row_of(task, name)
    lengths = sorted(set(task["fields"]["length"]))
    depths = sorted(set(task["fields"]["depth"]))
    cells = [
        [td.text for td in tr.find_elements("css selector", "td")]
        for tr in box.find_elements("css selector", "tr")[1:]
    ]
    for depth, line in zip(depths, cells, strict=True):
        for length, text in zip(lengths, line, strict=True):
            at = zip(task["fields"]["length"], task["fields"]["depth"], row["values"], strict=True)
            mine = [v for x, d, v in at if (x, d) == (length, depth)]
            assert text == (str(round(100 * sum(mine) / len(mine))) if mine else "")
    one.choose("variant", "multikey")
    assert "correct" in one.find(".heat").text


def test_curves_and_speed(one):
    lines = {e.get_attribute("data-recipe"): e for e in one.all("#curves .line")}
    assert set(lines) == {
        recipe_name(m, s) for m in ("kivi", "h2o", "snapkv") for s in (1 / 4, 1 / 8)
    }
    one.choose("curve", "free/kl")
    assert len(one.all("#curves .line")) == len(lines)
    first = one.find("#curves .line[tabindex='0']")
    one.browser.execute_script("arguments[0].focus()", first)
    first.send_keys(RIGHT)
    active = one.browser.switch_to.active_element
    assert active.get_attribute("data-recipe") in one.find("#tip").text
    assert set(points(one, "#speeds")) == set(points(one))
    x = {name: place(e)[0] for name, e in points(one, "#speeds").items()}
    assert x["full"] < x[recipe_name("h2o", 1 / 4)] < x[recipe_name("h2o", 1 / 8)]


def test_the_table_has_every_figure_and_sorts(one):
    one.choose("task", "niah")
    task = task_of(one, "niah")
    rows = {
        e.find_element("css selector", "td.recipe button").text: e.text
        for e in one.all("#table tbody tr")
    }
    for row in task["rows"]:
        if row["scores"]:
            mean, low, high, _ = row["scores"]["correct"]
            assert f"{mean:.3f}" in rows[row["recipe"]]
            assert f"[{low:.3f}, {high:.3f}]" in rows[row["recipe"]]
    for down in (False, True):
        one.find("#table button[data-key='correct']").click()
        assert one.browser.switch_to.active_element.get_attribute("data-key") == "correct"
        order = [e.text for e in one.all("#table td.recipe button")]
        means = [row_of(task, name)["scores"]["correct"][0] for name in order]
        assert means == sorted(means, reverse=down)
        state = one.find("#table th[aria-sort]").get_attribute("aria-sort")
        assert state == ("descending" if down else "ascending")
    assert "groups of 128 do not fit" in one.find("#problems").text


def test_a_sample_is_one_click_away(one, folders):
    one.choose("task", "niah")
    prompts = [
        json.loads(x) for x in (folders / "short" / "prompts.jsonl").read_text().splitlines()
    ]
    prompt = next(p for p in prompts if p["sample"] == "niah-0")
    lines = [json.loads(x) for x in (folders / "short" / "niah.jsonl").read_text().splitlines()]
    wait(lambda: "…" not in [e.text for e in one.all("#list td.text")])
    one.find("#list button.open").click()
    wait(lambda: one.find("#sample").is_displayed())
    passages = [e.text for e in one.all("#sample .passage")]
    assert HOSTILE in passages[0]
    left_out = len(prompt["context"]) - 4000
    assert f"{left_out:,} characters are left out" in passages[0]
    assert prompt["context"][-50:].split() == passages[0][-50:].split()
    assert passages[1] == prompt["question"]
    assert passages[2] == prompt["reference"]
    assert one.all("#sample .passage script, #sample .passage b") == []
    answers = {
        e.find_element("css selector", "button").text: e.text for e in one.all("#sample tbody tr")
    }
    for line in lines:
        if line["sample"] == "niah-0":
            assert line.get("problem", line.get("answer", "")).strip() in answers[line["recipe"]]
    one.browser.switch_to.active_element.send_keys(ESCAPE)
    assert not one.find("#sample").is_displayed()


def test_two_recipes_token_by_token(one, folders):
    one.choose("task", "free")
    lines = [json.loads(x) for x in (folders / "short" / "free.jsonl").read_text().splitlines()]
    name = recipe_name("h2o", 1 / 8)
    a = next(x for x in lines if x["recipe"] == name and 3 < x["scores"]["diverged_at"] < 40)
    b = next(x for x in lines if x["recipe"] == "full" and x["sample"] == a["sample"])
    one.choose("a", name)
    one.choose("b", "full")
    number = int(a["sample"].removeprefix("free-"))
    one.browser.execute_script(f"openSample({number})")
    wait(lambda: one.all("#sample [data-side=B] span"))
    for side, line in (("A", a), ("B", b)):
        spans = one.all(f"#sample [data-side={side}] span")
        assert [e.get_property("textContent") for e in spans] == line["tokens"]
        marked = [i for i, e in enumerate(spans) if "d" in e.get_attribute("class").split()]
        differ = [
            i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y
        ]
        assert marked == differ
        assert "first" in spans[differ[0]].get_attribute("class")
    equal = 48 - len(differ)
    assert (
        f"The first difference is at token {differ[0]}; {equal} of 48 positions"
        in one.find("#sample").text
    )


def test_samples_can_be_narrowed_to_those_that_differ(one):
    one.choose("task", "niah")
    task = task_of(one, "niah")
    name = recipe_name("h2o", 1 / 8)
    one.choose("a", name)
    one.choose("which", "worse")
    pairs = zip(row_of(task, name)["values"], row_of(task, "full")["values"], strict=True)
    worse = [f"niah-{i}" for i, (x, y) in enumerate(pairs) if x < y]
    assert worse
    assert [e.text for e in one.all("#list button.open")] == worse[:15]
    one.choose("which", "all")
    assert len(one.all("#list button.open")) == 15
    assert "page 1 of 2, 20 samples" in one.find("#pager").text
    one.all("#pager button")[1].click()
    assert len(one.all("#list button.open")) == 5


def test_the_reader_picks_runs(several):
    assert [e.text for e in several.all("#runs button")] == [
        r["name"] for r in several.data["runs"]
    ]
    assert len(several.all("#pareto .panel")) == 1
    several.all("#runs button")[1].click()
    assert [e.text for e in several.all("#pareto h3")] == ["short", "long"]
    several.all("#runs button")[0].click()
    assert [e.text for e in several.all("#pareto h3")] == ["long"]
    several.all("#runs button")[1].click()  # the last one stays
    assert [e.text for e in several.all("#pareto h3")] == ["long"]


def test_kvpress_points_are_marked(several):
    several.all("#runs button")[2].click()
    several.choose("task", "ruler")
    panel = several.all("#pareto .panel")[1]
    assert "counts tokens, not bytes" in panel.text
    assert "share of the tokens kept (not bytes)" in panel.text
    assert panel.find_elements("css selector", ".front") == []
    fills = {e.get_attribute("fill") for e in panel.find_elements("css selector", ".point path")}
    assert fills == {"var(--card)"}  # hollow
    mine = several.all("#pareto .panel")[0]
    filled = {e.get_attribute("fill") for e in mine.find_elements("css selector", ".point path")}
    assert len(filled) > 2
    text = several.find("#table").text
    assert text.count("tokens") >= 7


def test_themes(one):
    def paper():
        return one.browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    def system(theme):
        features = [{"name": "prefers-color-scheme", "value": theme}]
        one.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    try:
        system("light")
        light = paper()
        system("dark")
        dark = paper()
        assert light != dark
        for theme, color in (("light", light), ("dark", dark)):
            next(e for e in one.all("#theme option") if e.text == theme).click()
            assert paper() == color
        system("light")
        assert paper() == dark  # the switch goes before the system
        next(e for e in one.all("#theme option") if e.text == "system").click()
        assert paper() == light
    finally:
        system("")


def test_paper_shows_the_charts_and_no_controls(one):
    one.browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    one.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not one.find("#controls").is_displayed()
        assert one.find("#pareto svg").is_displayed()
        assert one.find("#pareto svg").get_dom_attribute("viewBox") == "0 0 960 400"
        assert one.find("#table table").is_displayed()
        pdf = one.browser.execute_cdp_cmd("Page.printToPDF", {})["data"]
        assert len(pdf) > 20_000
    finally:
        one.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        one.browser.execute_script("dispatchEvent(new Event('afterprint'))")


@pytest.mark.parametrize("width", [400, 800])
def test_a_narrow_window_needs_no_sideways_scrolling(browser, several, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        several.all("#runs button")[1].click()
        several.all("#runs button")[2].click()
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_every_control_has_a_name(one):
    unnamed = one.browser.execute_script("""
        const controls = "select, input, button, [role=button], svg[role]";
        const named = e => e.getAttribute("aria-label") || (e.labels && e.labels.length)
          || (e.tagName === "BUTTON" && e.textContent.trim());
        return [...document.querySelectorAll(controls)].filter(e => !named(e)).map(e => e.outerHTML)
    """)
    assert unnamed == []
