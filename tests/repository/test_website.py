"""The site, built and looked at: it loads nothing from elsewhere, is as wide as the screen, and shows its formulas."""

import json
import re
import time
from urllib.parse import quote_plus, unquote

import pytest

from llorch.stages.table import CHECKPOINTS

pytestmark = pytest.mark.slow
pytest.importorskip("sphinx", reason="NOT RUN: sphinx is not installed; pip install -c constraints.txt -e '.[docs]'")

LOADED = re.compile(  # a link that is followed when somebody clicks is none of these
    r"<(?:script|img|iframe|source|video|audio|embed|object|link)\b[^>]*?(?:src|href|data)=[\"']?(?:https?:)?//[^>]*>"
    r"|url\([\"']?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*;|\bfetch\([\"']https?:"
)
FORMULAS = "document.querySelectorAll('mjx-container svg').length"
RESULTS = "[...document.querySelectorAll('#search-results li > a')].map(link => link.textContent)"
RENDERED = "MathJax.startup.promise.then(() => true)"


def test_no_file_of_the_site_loads_anything_from_elsewhere(site):
    for path in (each for each in site.rglob("*") if each.suffix in (".html", ".css", ".js", ".svg")):
        assert LOADED.findall(path.read_text(encoding="utf-8")) == [], path


def test_every_link_leads_to_a_file_of_the_site(site):
    pages = [*site.rglob("*.html")]
    assert any("source" in page.relative_to(site).parts for page in pages)
    for page in pages:
        links = set(re.findall(r'<a\b[^>]*?href="(?![a-z]+:|#|//)([^"#?]+)', page.read_text(encoding="utf-8")))
        assert [link for link in links if not (page.parent / unquote(link)).exists()] == [], page


def test_every_lesson_can_be_downloaded_as_a_notebook(site):
    for number, name in CHECKPOINTS.items():
        page = site / f"checkpoints/{number}_{name}/README.html"
        (link,) = re.findall(r'href="([^"]+\.ipynb)"', page.read_text(encoding="utf-8"))
        cells = json.loads((page.parent / link).read_text(encoding="utf-8"))["cells"]
        assert {cell["cell_type"] for cell in cells} == {"code", "markdown"}


def test_code_has_a_button_that_copies_it(site, browser):
    browser.open(site / "index.html", width=1280)
    assert browser.evaluate("document.querySelectorAll('.highlight .copybtn').length") > 8


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("port a model", "llorch"),
        ("exclamation marks", "Museum of bugs"),
        ("norm-eps-outside-root", "01 rms_norm: for porters"),
    ],
)
def test_the_search_finds_the_landing_page_symptoms_and_names_of_mistakes(site, browser, words, title):
    browser.visit(f"{(site / 'search.html').as_uri()}?q={quote_plus(words)}", width=1280)
    deadline = time.monotonic() + 20
    while title not in (titles := browser.evaluate(RESULTS)):
        assert time.monotonic() < deadline, titles
        time.sleep(0.1)


@pytest.mark.parametrize("text", ['<script src="https://a/b.js">', "<link href=//a/b.css>", "url(http://a/b.woff)"])
def test_external_resources_are_found(text):
    assert LOADED.search(text)
    assert not LOADED.search('<a href="https://arxiv.org">')


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_fits_the_screen_and_shows_its_formulas_without_a_word_on_the_console(site, browser, width, scheme):
    pages = [path for path in site.rglob("*.html") if "source" not in path.relative_to(site).parts]
    assert len(pages) > 30
    for path in pages if (width, scheme) in ((390, "light"), (1280, "dark")) else pages[:5]:
        browser.open(path, width=width, scheme=scheme)
        formulas = path.read_text(encoding="utf-8").count('class="math ')
        if formulas:
            browser.call("Runtime.evaluate", expression=RENDERED, awaitPromise=True)
        assert browser.evaluate(FORMULAS) == formulas, path
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, path
        said = browser.event_parameters("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        loaded = [each["request"]["url"] for each in browser.event_parameters("Network.requestWillBeSent")]
        assert (said, [url for url in loaded if not url.startswith(("file:", "data:"))]) == ([], []), path
