"""The page of a diagnosis: whole in itself, whatever an engine calls its arrays, and as a real browser shows it."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from builders import diagnoses
from helpers.chromium import Browser

from llorch.diagnosis.report.page import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LEVELS,
    MAX_FIGURES,
    WIDTH,
    Rung,
    heat,
    histogram,
    ladder,
    page,
    rungs,
)
from llorch.diagnosis.verdict import Diagnosis
from llorch.stages.comparison import FAIL

every = pytest.mark.parametrize("make", diagnoses.ALL)
EMPTY = {"meta", "br", "line", "rect", "circle", "path", "polyline"}


class Outline(HTMLParser):
    """Tags and attributes of a page; that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@every
def test_a_page_is_whole_in_itself_and_says_what_is_what(make: Callable[[], Diagnosis]):
    text = page(make())
    outline = Outline(text)
    names = [tag for tag, _ in outline.tags]
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(names)
    assert not {"src", "href", "style", "onload"} & {name for _, given in outline.tags for name in given}
    assert not re.search(r"https?:|url\(|@import", text)
    assert dict(outline.tags)["html"] == {"lang": "en"}
    assert ("title" in names, names.count("h1")) == (True, 1)
    assert "default-src 'none'" in text
    assert all(given.get("scope") for tag, given in outline.tags if tag == "th")
    assert all(given.get("aria-label") or given.get("aria-hidden") for tag, given in outline.tags if tag == "svg")
    assert not set(re.findall(r"[^\x20-\x7e\n]", text)) - set("✓≈✗≤∞\N{GRINNING FACE}")


@every
def test_every_stage_is_in_the_table_with_its_verdict(make: Callable[[], Diagnosis]):
    made = make()
    rows = re.findall(r'<th scope="row">([^<]*)</th><td><span class="(\w+)">. (\w+)<', page(made))
    assert rows == [(result.key, result.verdict, result.verdict) for result in made.results]


def test_hostile_names_are_text():
    text = page(diagnoses.hostile())
    assert r"&lt;script&gt;alert(1)&lt;/script&gt;\x00\x1b[31m\u202eevil\ud800" in text
    text.encode("utf-8")


def test_the_first_cause_is_marked_in_its_layer():
    text = page(diagnoses.two_bugs())
    (cell,) = re.findall(r'<li class="FAIL first">✗ (\w+)', text)
    assert cell == "q_rope"
    assert "Layer 1, stage by stage" in text
    assert text.index("First cause: l1.q_rope") < text.index("Another cause: l3.v_proj")
    assert text.index("Another cause: l3.v_proj") < text.index("Rounding: l3.ffn_act")


def test_a_page_has_the_ladder_of_the_layers():
    made = diagnoses.one_bug()
    (wrong,) = [result for result in made.results if result.verdict == FAIL]
    assert ladder(rungs(made.results, wrong)) in page(made)


def test_stages_that_the_dump_does_not_have_are_named():
    assert page(diagnoses.logits_only()).count("not in the dump") == 2


def test_only_so_many_findings_have_figures():
    assert page(diagnoses.every_layer()).count("By token:") == MAX_FIGURES


def test_a_rung_is_the_worst_of_a_layer_and_what_has_come_together():
    made = diagnoses.one_bug()
    (wrong,) = [result for result in made.results if result.verdict == FAIL]
    found = rungs(made.results, wrong)
    assert [rung.label for rung in found] == ["embed", "0", "1", "2", "3", "norm", "logits"]
    assert [rung.local > rung.limit for rung in found] == [False, False, True, False, False, False, False]
    assert wrong.chained is not None
    assert found[2].local == wrong.isolated.difference.error
    assert found[3].total > wrong.chained.difference.error


@pytest.mark.parametrize(("value", "level"), [(0, 0), (1, 0), (1.1, 1), (11, 2), (1e5, 6), (1e300, 6), (np.inf, 6)])
def test_cells_are_the_redder_the_farther_beyond_the_limit(value: float, level: int):
    assert f'class="h{level}"' in heat(np.array([value]), 1.0, "token")
    assert level < len(LEVELS)


def test_of_neighbours_that_share_a_cell_the_largest_shows():
    values = np.zeros(100_000)
    values[77_777] = 1
    drawn = heat(values, 1e-9, "token")
    assert (drawn.count("<rect"), drawn.count('class="h6"')) == (128, 1)


def test_maps_say_where_the_most_is():
    assert re.search(r"By token: 12 of 12 .* token 11<", page(diagnoses.one_bug()))


def test_a_ladder_rises_with_the_error_and_stays_in_its_frame():
    drawn = ladder([Rung("0", 1e-7, 1e-6, 1e-7), Rung("1", 1e-1, 1e-6, 1e-1)])
    (x0, y0), (x1, y1) = ((float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn))
    assert LEFT < x0 < x1 < WIDTH
    assert 0 < y1 < y0 < HEIGHT - BOTTOM
    limits = re.findall(r'class="limit" points="[\d.]+,([\d.]+) [\d.]+,([\d.]+)"', drawn)
    assert y1 < float(limits[0][0]) == float(limits[0][1]) < y0
    assert re.findall(r'class="(local|over)"', drawn) == ["local", "over"]


def test_figures_of_nothing_and_of_numbers_without_end_have_places():
    drawn = ladder([Rung("0", np.inf, 0.0, np.inf), Rung("1", 0.0, 1e-7, 0.0)]) + histogram(np.array([0, 3] + [0] * 24))
    assert "∞" in drawn
    assert not re.search("nan|inf", drawn)


@every
@pytest.mark.slow_cases("1400-*")
@pytest.mark.parametrize("width", [390, 1400])
def test_a_real_browser_shows_it_without_overflow_error_or_request(
    make: Callable[[], Diagnosis], width: int, browser: Browser, tmp_path: Path
):
    path = tmp_path / "page.html"
    path.write_text(page(make()), encoding="utf-8")
    browser.open(path, width=width)
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelectorAll('script').length") == 0
    assert browser.event_parameters("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled") == []
    assert [sent["request"]["url"] for sent in browser.event_parameters("Network.requestWillBeSent")] == [path.as_uri()]


@pytest.mark.slow
def test_a_page_is_dark_where_its_reader_wants_that(browser: Browser, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text(page(diagnoses.one_bug()), encoding="utf-8")
    shades = {}
    for scheme in ("light", "dark"):
        browser.open(path, width=390, scheme=scheme)
        colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        shades[scheme] = sum(map(int, re.findall(r"\d+", colour)))
    assert shades["dark"] < 100 < 700 < shades["light"]
