"""The report: one page that stands alone, opened in a real browser at two widths."""

import functools
import os
import re
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest

from shardclip.pictures.report import page
from shardclip.record.run_file import Run

from .browser import PROGRAMS, REQUIRED, Browser, program
from .runs import outcome, steps

PHONE, DESKTOP = 390, 1280


def spiky(name="spiky"):
    meta = {"lr": 3e-4, "note": "<script>alert(1)</script>"}
    return Run(name, steps(200, spikes=(120,), nonfinite=(150,)), meta=meta)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.tags, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.found.append(value)
            if name == "id":
                self.ids.append(value)


def test_the_page_stands_alone():
    text = page([spiky(), spiky("calm")])
    links = Links()
    links.feed(text)
    assert [link for link in links.found if not link.startswith(("#", "data:image/"))] == []
    assert not {"script", "iframe", "link", "object"} & set(links.tags)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "&lt;script&gt;alert(1)" in text
    assert "Content-Security-Policy" in text
    assert len(links.ids) == len(set(links.ids)), "pictures share inner names"


def test_the_page_is_the_same_each_time():
    assert page([spiky()]) == page_of("spiky")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if program() is None:
        why = f"no {' or '.join(PROGRAMS)}: apt-get install {PROGRAMS[0]}"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but {why}")
        pytest.skip(why)
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@functools.cache
def page_of(*names):
    return page([spiky(name) for name in names])


def opened(browser, tmp_path, width, *names):
    path = tmp_path / "report.html"
    path.write_text(page_of(*names or ("spiky",)), encoding="utf-8")
    browser.complaints.clear()
    browser.open(path.as_uri(), width, mobile=width == PHONE)
    return browser


SMALLEST = """
Math.min(...[...document.querySelectorAll('svg text')]
    .map(text => text.getBoundingClientRect().height).filter(height => height > 0))
"""
WIDEST = """
Math.max(...[...document.querySelectorAll('body *')]
    .map(element => element.getBoundingClientRect().right))
"""
HIDDEN = "getComputedStyle(document.querySelector('.{}')).display === 'none'"


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.processes
def test_it_is_readable(browser, tmp_path, width, count):
    """Nothing runs out of the window, and text in pictures is neither tiny nor cut."""
    names = ["a-name-without-any-blank-" * n for n in range(1, count + 1)]
    shown = opened(browser, tmp_path, width, *names)
    assert shown.ask("window.innerWidth") == width
    assert shown.ask("document.documentElement.scrollWidth") <= width
    assert shown.ask(WIDEST) <= width
    assert shown.ask(SMALLEST) >= 9
    assert shown.ask(HIDDEN.format("wide")) == (width == PHONE)
    assert shown.ask(HIDDEN.format("narrow")) == (width != PHONE)
    sections = shown.ask(
        "[...document.querySelectorAll('section')].map(s => s.getBoundingClientRect().left)"
    )
    side_by_side = len(set(sections)) > 1
    assert side_by_side == (width == DESKTOP and count > 1)


@pytest.mark.processes
def test_it_asks_for_nothing_and_complains_of_nothing(browser, tmp_path):
    shown = opened(browser, tmp_path, DESKTOP)
    others = [url for url in shown.requests if not url.startswith("data:image/")]
    assert others == [(tmp_path / "report.html").as_uri()]
    assert shown.complaints == []


@pytest.mark.processes
def test_a_request_and_a_complaint_would_be_seen(browser, tmp_path):
    """Else the test above could not fail."""
    path = tmp_path / "bad.html"
    path.write_text('<img src="http://127.0.0.1:9/a.png"><script>console.log(1)</script>')
    browser.complaints.clear()
    browser.open(path.as_uri(), DESKTOP, mobile=False)
    assert "http://127.0.0.1:9/a.png" in browser.requests
    assert browser.complaints != []


@pytest.mark.processes
def test_it_says_what_there_is_to_see(browser, tmp_path):
    shown = opened(browser, tmp_path, PHONE)
    said = shown.ask("document.body.innerText")
    for text in ("layers.2.mlp (100\xa0%)", "layers.1.attn", "NaN", "max_norm", "Recommended"):
        assert text in said, text
    assert "before clipping" in said
    assert "alert(1)" in said


def test_the_pictures_are_painted(browser, tmp_path):
    """A screenshot shows the norm's blue, the threshold's orange and the spikes' red."""
    shown = opened(browser, tmp_path, DESKTOP)
    shown.picture(tmp_path / "shot.png")
    seen = (matplotlib.image.imread(tmp_path / "shot.png")[..., :3] * 255).reshape(-1, 3)
    for colour in ("#5b9bd5", "#e08214", "#c1121f"):
        wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        assert (np.abs(seen - wanted).max(axis=1) < 12).sum() > 30, colour


def test_a_run_without_norms_by_module_says_how_to_get_them():
    text = page([Run("a", [outcome(step) for step in range(1, 30)])])
    assert 'build the clipper with norms="module"' in text.replace("&quot;", '"')


def test_a_short_run_has_a_page_without_a_threshold():
    assert "quantiles need at least 20" in page([Run("a", [outcome(1), outcome(2)])])
