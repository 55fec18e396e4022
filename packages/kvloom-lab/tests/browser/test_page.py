"""The page of `kvloom inspect` in a real browser: what the selectors show is what the data says.

Needs Chromium and its chromedriver. Without them these tests are skipped; REQUIRE_BROWSER=1 makes
that a failure.
"""

from __future__ import annotations

import io
import os
import shutil
from itertools import pairwise

import matplotlib.image
import numpy as np
import pytest

from kvloom_lab.eval import load
from kvloom_lab.inspect import trace_recipe
from kvloom_lab.show.pages import inspect_page

TEXT = (
    "The magic number for copper is 48213.\nThe </script> of it: naïve 日本, <b>bold</b> & done.\n"
    + "A cache holds what a model has read, so that it need not read it again.\n" * 11
    + "The magic number for copper is"
)
NEW = 6
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--window-size=1360,1000"
)


def missing(what):
    """Skip, or fail where a browser is required."""
    (pytest.fail if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip)(what)


@pytest.fixture(scope="module")
def browser():
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        missing("selenium is not installed: pip install -e '.[dev]'")
    binary = next((p for p in map(shutil.which, BROWSERS) if p), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        missing("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "localhost,127.0.0.1")  # the driver listens on this machine
        running = webdriver.Chrome(options=options, service=Service(driver))
        yield running
        running.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Data and file of a page by recipe."""
    model, tokenizer = load()
    folder, made = tmp_path_factory.mktemp("pages"), {}
    for recipe in (
        "h2o",
        "minikv:group=16,residual=32",
        "kivi:group=16,residual=32",
        "full",
        "clusterkv:tokens=40,size=8,sinks=4",
    ):
        data = trace_recipe(model, tokenizer, recipe, TEXT, new_tokens=NEW)
        file = folder / f"{recipe.partition(':')[0]}.html"
        file.write_text(inspect_page(data), encoding="utf-8")
        made[file.stem] = data, file
    return made


class Page:
    """An opened page and the data in it."""

    def __init__(self, browser, data, file):
        self.browser, self.data = browser, data
        browser.get(file.as_uri())

    def find(self, css):
        return self.browser.find_element("css selector", css)

    def all(self, css):
        return self.browser.find_elements("css selector", css)

    def choose(self, selector, value):
        self.find(f"#{selector} option[value='{value}']").click()

    def shades(self):
        """By token: the shade in percent, None where it is struck out or not there yet."""
        return self.browser.execute_script(
            "return [...document.querySelectorAll('#text .t')].map(e => "
            "e.matches('.gone, .later') ? null : +e.style.getPropertyValue('--p'))"
        )

    def colors(self):
        """By token: the colour behind it as the browser paints it."""
        return self.browser.execute_script(
            "return [...document.querySelectorAll('#text .t')]"
            ".map(e => getComputedStyle(e).backgroundColor)"
        )

    def picture(self):
        """The window's pixels [height, width, 3], 0 to 1."""
        png = io.BytesIO(self.browser.get_screenshot_as_png())
        return matplotlib.image.imread(png)[..., :3]

    def errors(self):
        return [line for line in self.browser.get_log("browser") if line["level"] != "INFO"]


@pytest.fixture
def shown(browser, pages):
    return Page(browser, *pages["h2o"])


def expected(data, step, layers=None, heads=None):
    """Shades as the data says they must be."""
    some = [
        head
        for i, layer in enumerate(data["layers"])
        for h, head in enumerate(layer["heads"])
        if layers in (None, i) and heads in (None, h)
    ]
    found = []
    for i in range(len(data["tokens"])):
        there = i < data["prompt_tokens"] + step
        count = sum(there and (g["gone"][i] == -1 or g["gone"][i] > step) for g in some)
        found.append(pytest.approx(100 * count / len(some), abs=0.06) if count else None)
    return found


def test_the_page_opens_without_an_error_and_says_what_it_shows(shown):
    assert shown.errors() == []
    assert shown.browser.title == "h2o – kvloom inspect"
    tokens = [e.get_property("textContent") for e in shown.all("#text .t")]
    clean = "".join(tokens).replace("⏎", "").replace("·", "")
    assert clean == "".join(shown.data["tokens"])
    assert TEXT in clean
    assert shown.all("#text b, #text script") == []
    size = shown.data["prompt_tokens"]
    assert f"a head keeps {size // 2} of {size} tokens (50.0%)" in shown.find("#said").text
    assert shown.shades() == expected(shown.data, 0)


def test_the_selectors_change_the_shading(shown):
    seen = [shown.colors()]
    shown.choose("layer", 3)
    assert shown.shades() == expected(shown.data, 0, layers=3)
    seen.append(shown.colors())
    shown.choose("head", 1)
    assert shown.shades() == expected(shown.data, 0, layers=3, heads=1)
    assert set(shown.shades()) == {None, 100}
    seen.append(shown.colors())
    shown.choose("layer", -1)
    assert shown.shades() == expected(shown.data, 0, heads=1)
    seen.append(shown.colors())
    assert all(a != b for a, b in pairwise(seen))


def test_the_figures_follow_the_selectors(shown):
    def kept(step, layers, heads):
        found = [shown.data["layers"][i]["heads"][h]["mass"][step] for i in layers for h in heads]
        return f"{100 * sum(found) / len(found):.1f}%"

    assert f"they receive {kept(0, range(6), range(2))} of" in shown.find("#said").text
    shown.choose("layer", 2)
    assert f"they receive {kept(0, [2], range(2))} of" in shown.find("#said").text
    shown.choose("head", 0)
    shown.choose("layer", 4)
    assert "After the prompt, layer 4, head 0: " in shown.find("#said").text
    assert f"they receive {kept(0, [4], [0])} of" in shown.find("#said").text
    rows = [e.text.split() for e in shown.all("#heads button")]
    assert [row[-1] for row in rows] == [kept(0, [4], [h]) for h in (0, 1)]
    shown.find("#next").click()
    assert f"they receive {kept(1, [4], [0])} of" in shown.find("#said").text
    rows = [e.text.split() for e in shown.all("#layers button")]
    assert [row[-1] for row in rows] == [kept(1, [i], [0]) for i in range(6)]


def test_steps_go_on_and_back(shown):
    assert shown.find("#when").text == f"0 of {NEW}: after the prompt"
    assert not shown.find("#back").is_enabled()
    for step in range(1, NEW + 1):
        shown.find("#next").click()
        assert shown.shades() == expected(shown.data, step)
        assert shown.find("#when").text.startswith(f"{step} of {NEW}: after ")
    assert not shown.find("#next").is_enabled()
    assert len([e for e in shown.all("#text .t.made") if e.is_displayed()]) == NEW
    assert shown.find("#text .t.born").get_attribute("data-i") == str(len(shown.shades()) - 1)
    shown.find("#back").click()
    assert shown.shades() == expected(shown.data, NEW - 1)
    slider = shown.find("#step")
    slider.send_keys("\ue012")  # arrow left
    assert shown.shades() == expected(shown.data, NEW - 2)


def test_bars_choose_a_layer_and_a_head(shown):
    shown.all("#layers button")[5].click()
    assert shown.find("#layer").get_property("value") == "5"
    assert shown.shades() == expected(shown.data, 0, layers=5)
    assert shown.all("#layers button")[5].get_attribute("aria-pressed") == "true"
    shown.all("#heads button")[0].click()
    assert shown.shades() == expected(shown.data, 0, layers=5, heads=0)
    shown.all("#layers button")[5].click()
    assert shown.shades() == expected(shown.data, 0, heads=0)


def test_a_hover_tells_of_a_token(shown):
    from selenium.webdriver import ActionChains

    data = shown.data
    heads = [(i, h) for i in range(6) for h in range(2)]
    gone = {at: data["layers"][at[0]]["heads"][at[1]]["gone"] for at in heads}
    some = next(j for j in range(30) if 0 < sum(g[j] == 0 for g in gone.values()) < 12)
    ActionChains(shown.browser).move_to_element(shown.all("#text .t")[some]).perform()
    holding = [at for at in heads if gone[at][some] != 0]
    told = shown.find("#token").text
    assert f"token {some}" in told
    assert data["tokens"][some].strip() in told
    assert f"{len(holding)} of 12 heads (all layers, all heads)" in told
    by_layer = {i: [h for at, h in holding if at == i] for i, _ in holding}
    which = "; ".join(f"layer {i}: {', '.join(map(str, hs))}" for i, hs in by_layer.items())
    assert which in told
    assert len(shown.all("#token .grid span[data-p]")) == len(holding)
    layer, head = holding[0]
    shown.choose("layer", layer)
    shown.choose("head", head)
    scored = data["layers"][layer]["heads"][head]["scores"]["first"][some]
    assert f"1 of 1 head (layer {layer}, head {head})" in shown.find("#token").text
    assert f"{scored:g} (in the choice after the prompt)" in shown.find("#token").text


def test_the_keyboard_goes_from_token_to_token(shown):
    first = shown.find("#text .t[tabindex='0']")
    assert len(shown.all("#text .t[tabindex='0']")) == 1  # one stop for the Tab key
    first.send_keys("\ue014")  # arrow right
    active = shown.browser.switch_to.active_element
    assert active.get_attribute("data-i") == "1"
    assert "token 1" in shown.find("#token").text
    active.send_keys("\ue010")  # End: the last token that is there
    last = shown.data["prompt_tokens"] - 1
    assert shown.browser.switch_to.active_element.get_attribute("data-i") == str(last)


@pytest.mark.parametrize("recipe", ["kivi", "minikv"])
def test_the_view_of_formats_shows_what_is_packed(browser, pages, recipe):
    shown = Page(browser, *pages[recipe])
    assert shown.find("#view").is_displayed() == (recipe == "minikv")
    if recipe == "minikv":
        shown.choose("view", "format")
    for step, layer, head in ((0, 0, 0), (NEW, 4, 1)):
        for name, value in (("layer", layer), ("head", head)):
            shown.choose(name, value)
        for _ in range(step):
            shown.find("#next").click()
        data = shown.data["layers"][layer]["heads"][head]
        found = shown.shades()
        for i, shade in enumerate(found[: shown.data["prompt_tokens"] + step]):
            packed = [side[i] != -1 and side[i] <= step for side in data["packed"].values()]
            held = data["gone"][i] == -1 or data["gone"][i] > step
            assert shade == (50 * sum(packed) if held else None)
        assert 100 in found
        assert {0, 50} & set(found)
    assert "packed in " in shown.find("#token").text or "exact in " in shown.find("#token").text
    assert shown.errors() == []


def test_what_keeps_everything_shades_everything(browser, pages):
    shown = Page(browser, *pages["full"])
    assert set(shown.shades()[: shown.data["prompt_tokens"]]) == {100}
    assert "Every token is kept by at least one of them." in shown.find("#said").text
    assert "they receive 100.0% of" in shown.find("#said").text


def test_the_view_of_reads_steps_through_clusters(browser, pages):
    shown = Page(browser, *pages["clusterkv"])
    data = shown.data

    def read(layer, head, step):
        pairs = data["layers"][layer]["heads"][head]["read"][step]
        return {i for lo, n in zip(pairs[::2], pairs[1::2], strict=True) for i in range(lo, lo + n)}

    assert "read" in shown.find("main").get_attribute("data-view")
    assert "Choose a layer and a head" in shown.find("#parts").text
    layer, head = 3, 1
    shown.choose("layer", layer)
    shown.choose("head", head)
    colors = []
    for step in range(NEW + 1):
        seen = data["prompt_tokens"] + step
        want = read(layer, head, step)
        shades = shown.shades()
        assert {i for i, x in enumerate(shades) if x == 100} == want
        assert all(x in (0, 100) for x in shades[:seen])
        assert f"layer {layer}, head {head}: a head reads {len(want)} of {seen} tokens" in (
            shown.find("#said").text
        )
        mass = data["layers"][layer]["heads"][head]["read_mass"][step]
        assert f"they receive {100 * mass:.1f}%" in shown.find("#said").text
        parts = data["layers"][layer]["heads"][head]["parts"]
        touched = {parts[i] for i in want if parts[i] >= 0}
        known = {p for p in parts if p >= 0}
        assert f"{len(touched)} of {len(known)} clusters read" in shown.find("#parts").text
        assert len(shown.all("#parts .grid span[data-p]")) == len(touched)
        colors.append(shown.colors())
        if step < NEW:
            shown.find("#next").click()
    assert len({tuple(c[: data["prompt_tokens"]]) for c in colors[1:]}) > 1  # steps read others
    some = next(i for i in range(20, 60) if i in read(layer, head, NEW) and parts[i] >= 0)
    shown.all("#text .t")[some].click()
    mates = [i for i, p in enumerate(parts) if p == parts[some]]
    got = [int(e.get_attribute("data-i")) for e in shown.all("#text .t.mate")]
    assert got == mates
    told = shown.find("#token").text
    steps = [s for s in range(1, NEW + 1) if some in read(layer, head, s)]
    now = sum(i in read(layer, head, NEW) for i in mates)
    assert f"{parts[some]}: {len(mates)} token" in told
    assert f"{now} read now" in told
    assert ", ".join(map(str, steps)) in told
    shown.choose("layer", 0)  # reads everything
    assert set(shown.shades()) == {100}
    assert "Choose a layer and a head" in shown.find("#parts").text
    assert shown.errors() == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_picture_of_it_is_no_blank_sheet(browser, shown, theme):
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        picture = shown.picture()
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    paper = picture[2, 2]
    assert (paper.mean() > 0.9) == (theme == "light")
    assert (paper.mean() < 0.2) == (theme == "dark")
    red, green, blue = np.moveaxis(picture, -1, 0)
    assert np.mean(green - red > 0.08) > 0.02  # shaded tokens and bars
    assert np.mean((blue - green > 0.2) & (blue - red > 0.2)) > 0.001  # bars of mass
    assert np.mean(np.abs(picture - paper).max(axis=-1) > 0.5) > 0.005  # text


def test_a_narrow_window_needs_no_sideways_scrolling(browser, shown):
    metrics = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 420
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
