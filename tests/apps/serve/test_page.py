"""The page in a real browser, with a real server: it chats, shows what else could have come, and asks nobody else."""

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders.chat_models import LLAMA_3, chat_model
from fakes.raw_http import served as listening
from helpers.chromium import Browser
from helpers.served import Served, served

from llorch.apps.serve.app import PAGE_FILES
from llorch.apps.serve.service import Service
from llorch.model.model import Model

HOSTILE = "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return chat_model(tmp_path_factory.mktemp("models") / "story", "story", LLAMA_3)


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Served]:
    with served(model) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Browser]:
    """The page as somebody opens it, with an answer of 12 tokens, always the same."""
    open_page(browser, server)
    yield browser
    browser.evaluate("addEventListener('pagehide', () => sessionStorage.clear())")  # as the end of a tab does


def open_page(browser: Browser, server: Served, *, width: int = 1000, height: int = 900, scheme: str = "light") -> None:
    browser.visit(f"{server.url}/", width=width, height=height, scheme=scheme)
    wait(browser, MODELS)
    browser.evaluate("max_tokens.value = 12; temperature.value = 0; seed.value = 1")


def wait(browser: Browser, condition: str) -> None:
    """Until something is true, as the page changes."""
    script = """new Promise(done => {
        const look = () => (CONDITION) && (observer.disconnect(), done(true));
        const observer = new MutationObserver(look);
        const what = { subtree: true, childList: true, attributes: true, characterData: true };
        observer.observe(document.documentElement, what);
        look();
        setTimeout(() => done(false), 30000);
    })"""
    call = browser.call(
        "Runtime.evaluate", expression=script.replace("CONDITION", condition), awaitPromise=True, returnByValue=True
    )
    shown = browser.evaluate("document.body.innerText")
    assert call["result"].get("value") is True, (condition, shown)


IDLE = "!document.querySelector('#send').disabled"
MODELS = "document.querySelector('#model').value !== ''"
NOTICES = "[...document.querySelectorAll('.note, .error')].map(one => one.textContent)"
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}


def send(browser: Browser, text: str, until: str = IDLE) -> None:
    """Type a text and press Enter."""
    browser.evaluate("document.querySelector('#text').focus()")
    browser.call("Input.insertText", text=text)
    press(browser, "Enter", "\r")
    wait(browser, until)


def press(browser: Browser, key: str, text: str = "") -> None:
    code = {"Enter": 13, "Escape": 27, " ": 32, "ArrowRight": 39}[key]
    browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, text=text)
    browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)


def answers(browser: Browser) -> list[str]:
    return browser.evaluate("[...document.querySelectorAll('.assistant [role=group]')].map(one => one.textContent)")


def test_chat_sends_earlier_messages_and_asks_no_other_server(page: Browser, server: Served, model: Model):
    messages = []
    for text in ("Once upon a time", "The fox <|eot_id|> ran"):
        send(page, text)
        messages.append({"role": "user", "content": text})
        expected = "".join(token.text for token in model.generate(messages=messages, max_tokens=12))
        assert answers(page)[-1] == expected
        messages.append({"role": "assistant", "content": expected})
    urls = {one["request"]["url"] for one in page.event_parameters("Network.requestWillBeSent")}
    assert all(url.startswith(f"{server.url}/") for url in urls)
    assert f"{server.url}/style.css" in urls
    said = page.event_parameters("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert [one for one in said if one.get("entry", {}).get("level") != "verbose"] == []


def test_token_shows_its_alternatives(page: Browser, server: Served):
    send(page, "Once upon a time")
    page.evaluate("document.querySelectorAll('.token')[2].focus()")
    press(page, "ArrowRight")
    assert page.evaluate("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 3
    press(page, "Enter", "\r")
    rows = page.evaluate("[...document.querySelectorAll('#token tr')].map(one => [one.className, one.innerText])")
    asked = {"model": server.service.model.name, "messages": [{"role": "user", "content": "Once upon a time"}]}
    how = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 8}
    reply = server.client.chat.completions.create(**asked, **how)  # type: ignore[call-overload]
    top = reply.choices[0].logprobs.content[3].top_logprobs
    assert len(rows) == len(top) == 8
    assert [kind for kind, _ in rows] == ["taken"] + [""] * 7  # at temperature 0 the likeliest one was taken
    for (_, row), one in zip(rows, top, strict=True):
        assert json.dumps(one.token, ensure_ascii=False)[1:-1].strip() in row
        assert f"{100 * 2.718281828459045**one.logprob:.1f} %" in row


def test_the_stages_that_ran_are_listed_by_layer(page: Browser, server: Served, model: Model):
    send(page, "Once")
    page.evaluate("document.querySelectorAll('.token')[5].click()")
    page.evaluate("document.querySelector('.stages').previousSibling.click()")
    wait(page, "document.querySelector('.stages details')")
    trace: dict = {}
    model.forward([1, 2], trace=trace)
    titles = page.evaluate("[...document.querySelectorAll('.stages summary')].map(one => one.textContent)")
    n_of_layer = sum(name.startswith("l0.") for name in trace)
    assert titles[:2] == ["embed (1)", f"layer 0 ({n_of_layer})"]
    assert len([title for title in titles if title.startswith("layer")]) == model.config.n_layers
    n_prompt = len(model.prompt_ids([{"role": "user", "content": "Once"}]))
    assert page.evaluate("document.querySelector('.stages p').textContent") == (
        f"{len(trace)} stages of {n_prompt + 5} tokens"
    )
    first = page.evaluate("[...document.querySelectorAll('.stages td')].map(one => one.textContent)")
    assert first[:2] == ["embed", f"{n_prompt + 5} \u00d7 {model.config.hidden_size}"]


@pytest.mark.parametrize("control", ["Escape", "button"])
def test_an_answer_can_be_stopped(page: Browser, server: Served, control: str):
    page.evaluate("max_tokens.value = 400")
    send(page, "Once upon a time", until="document.querySelectorAll('.token').length > 3")
    if control == "button":
        page.evaluate("document.querySelector('#stop').click()")
    else:
        press(page, "Escape")
    wait(page, IDLE)
    assert page.evaluate(NOTICES) == ["Stopped."]
    assert 3 < page.evaluate("document.querySelectorAll('.token').length") < 350
    page.evaluate("max_tokens.value = 3")
    send(page, "go on")  # what was said before the end counts
    assert len(answers(page)) == 2


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends an answer."""
    job = Service.job
    monkeypatch.setattr(Service, "job", lambda *a, **k: replace(job(*a, **k), end_ids=frozenset()))


def places(browser: Browser, *selectors: str) -> list[list[float]]:
    """Upper and lower edge of the last element of each selector, in pixels of the window."""
    script = "SELECTORS.map(one => [...document.querySelectorAll(one)].at(-1).getBoundingClientRect())"
    return browser.evaluate(f"{script}.map(one => [one.top, one.bottom])".replace("SELECTORS", json.dumps(selectors)))


def assert_inside(browser: Browser, selector: str) -> None:
    """The last such element is in view, between the edges of the conversation."""
    (top, bottom), (highest, lowest) = places(browser, selector, "#talk")
    assert highest <= top < bottom <= lowest, browser.evaluate("document.body.innerText")


@pytest.mark.parametrize("screen", SIZES)
@pytest.mark.usefixtures("endless")
def test_box_is_pinned_and_the_view_follows_the_conversation(page: Browser, server: Served, screen: str):
    width, height = SIZES[screen]
    open_page(page, server, width=width, height=height)
    page.evaluate("max_tokens.value = 90")
    first = places(page, "#form")
    for text in ("Once upon a time", "The fox", "And then"):
        send(page, text)
        assert_inside(page, ".token")
        assert_inside(page, ".note")
    assert page.evaluate("talk.scrollHeight > talk.clientHeight")
    page.evaluate("max_tokens.value = 200")
    send(page, "again", until="document.querySelectorAll('.token').length > 300")
    assert_inside(page, ".token")
    press(page, "Escape")
    wait(page, IDLE)
    assert_inside(page, ".note")
    page.evaluate("temperature.value = 3")
    send(page, "Hello")
    assert_inside(page, ".error")
    assert places(page, "#form") == first
    assert first[0][1] <= height
    assert page.evaluate("[scrollY, document.documentElement.scrollHeight]") == [0, height]


@pytest.mark.usefixtures("endless")
def test_view_stays_where_the_reader_scrolled_up_to_until_the_end_is_reached(page: Browser, server: Served):
    open_page(page, server, height=500)
    page.evaluate("max_tokens.value = 120")
    send(page, "Once upon a time")
    page.evaluate("max_tokens.value = 300")
    send(page, "The fox", until="document.querySelectorAll('.token').length > 130")
    page.evaluate("talk.scrollTop = 30")
    wait(page, "document.querySelectorAll('.token').length > 160")
    assert page.evaluate("talk.scrollTop") == 30
    page.evaluate("talk.scrollTop = talk.scrollHeight")
    wait(page, "document.querySelectorAll('.token').length > 190")
    assert_inside(page, ".token")
    page.evaluate("talk.scrollTop = 30")
    press(page, "Escape")
    wait(page, IDLE)
    assert page.evaluate("talk.scrollTop") == 30
    send(page, "go on")  # a question of the reader is at the end
    assert_inside(page, ".token")


@pytest.mark.parametrize("screen", SIZES)
def test_click_or_key_chooses_a_token_and_the_pointer_alone_does_not(page: Browser, server: Served, screen: str):
    width, height = SIZES[screen]
    open_page(page, server, width=width, height=height)
    send(page, "Once upon a time")
    places_of = "[...document.querySelectorAll('.token')].map(one => one.classList.contains('chosen'))"
    chosen = f"{places_of}.indexOf(true)"
    x, y = page.evaluate("(({x, y}) => [x + 3, y + 5])(document.querySelectorAll('.token')[4].getBoundingClientRect())")
    mouse = {"x": x, "y": y, "button": "left", "clickCount": 1}
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.evaluate("document.querySelectorAll('.token')[2].focus()")
    assert page.evaluate(chosen) == -1
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", type=kind, **mouse)
    assert page.evaluate(chosen) == 4
    assert_inside(page, ".chosen")
    for key, text in (("Enter", "\r"), (" ", " ")):
        press(page, "ArrowRight")
        press(page, key, text)
    assert page.evaluate(chosen) == 6
    assert page.evaluate("token.querySelectorAll('tr').length") == 8
    page.evaluate("document.querySelector('#token .close').click()")
    assert (page.evaluate(chosen), page.evaluate("token.querySelectorAll('tr').length")) == (-1, 0)


def test_reload_keeps_the_conversation_and_new_chat_deletes_it(page: Browser, server: Served):
    page.evaluate("document.querySelector('#key').value = 'k3y'; system.value = 'Be kind.'")
    for text in ("Once upon a time", "The fox"):
        send(page, text)
    before = [answers(page), page.evaluate(NOTICES)]
    page.evaluate("text.value = 'unsent'")
    page.reload()
    wait(page, MODELS)
    assert [answers(page), page.evaluate(NOTICES)] == before
    fields = page.evaluate("[text, system, max_tokens, document.querySelector('#key')].map(one => one.value)")
    assert fields == ["unsent", "Be kind.", "12", ""]
    assert "k3y" not in page.evaluate("JSON.stringify(sessionStorage) + JSON.stringify(localStorage)")
    page.evaluate("document.querySelectorAll('.token')[3].click()")
    assert page.evaluate("token.querySelectorAll('tr').length") == 8
    page.evaluate("text.value = ''")
    send(page, "again")
    (first, second, _) = answers(page)
    assert asked(page) == [["Be kind.", "Once upon a time", first, "The fox", second, "again"]]
    page.evaluate("document.querySelector('#new').click()")
    page.reload()
    wait(page, MODELS)
    assert answers(page) == []


@pytest.mark.usefixtures("endless")
def test_reload_during_an_answer_keeps_its_beginning_or_gives_the_question_back(
    page: Browser, server: Served, monkeypatch: pytest.MonkeyPatch
):
    page.evaluate("max_tokens.value = 400")
    send(page, "Once upon a time", until="document.querySelectorAll('.token').length > 3")
    page.reload()
    wait(page, MODELS)
    assert (len(answers(page)), len(page.evaluate(NOTICES)), page.evaluate(TYPED)) == (1, 1, "")
    enough = threading.Event()
    monkeypatch.setattr(type(server.service), "chat_ids", lambda *a, **k: enough.wait(20) and [5])
    send(page, "Hello", until="!document.querySelector('#stop').disabled")
    page.reload()
    enough.set()
    wait(page, MODELS)
    assert (len(answers(page)), len(page.evaluate(NOTICES)), page.evaluate(TYPED)) == (1, 2, "Hello")


def test_page_without_storage_or_with_too_much_to_store_chats(page: Browser):
    page.evaluate("Storage.prototype.setItem = (key, text) => { throw new Error() }")
    send(page, "Once")
    assert len(answers(page)) == 1
    page.evaluate(
        "Storage.prototype.setItem = function (key, text) { if (text.includes('logprob')) throw new Error(); "
        "this[key] = text; }"
    )
    send(page, "again")
    before = answers(page)
    page.reload()
    wait(page, MODELS)
    assert answers(page) == before


def test_tokens_that_end_inside_a_character_show_bytes(page: Browser, server: Served, monkeypatch: pytest.MonkeyPatch):
    pieces = [bytes([0xF0, code]) for code in range(0x90, 0xA0)]
    monkeypatch.setattr(server.service.model.tokenizer, "token_bytes", lambda token_id: pieces[token_id % len(pieces)])
    send(page, "Once")
    page.evaluate("document.querySelector('.token').click()")
    rows = page.evaluate("[...document.querySelectorAll('#token td.word')].map(one => one.textContent)")
    assert len(rows) == 8
    assert all(row.startswith(r"\xf0\x9") for row in rows)
    assert page.evaluate("document.querySelectorAll('#token .taken').length") == 1


def test_markup_stays_text_whoever_wrote_it(page: Browser, server: Served, monkeypatch: pytest.MonkeyPatch):
    pieces = [HOSTILE[at : at + 9].encode() for at in range(0, len(HOSTILE), 9)]
    tokenizer = server.service.model.tokenizer
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token_id: pieces[token_id % len(pieces)])
    send(page, HOSTILE)
    page.evaluate("document.querySelector('.token').click()")
    assert page.evaluate("document.querySelector('.user p').textContent") == HOSTILE
    assert "<" in answers(page)[-1] + page.evaluate("token.innerText")
    assert page.evaluate("document.querySelectorAll('#talk img, #talk script, #token img, #token script').length") == 0
    assert page.evaluate("window.hurt") is None


def asked(browser: Browser) -> list[list[str]]:
    """The conversations that the page has sent, in order: each is the contents of its messages."""
    sent = [one["request"] for one in browser.event_parameters("Network.requestWillBeSent")]
    bodies = [json.loads(one["postData"]) for one in sent if one["url"].endswith("/chat/completions")]
    return [[message["content"] for message in body["messages"]] for body in bodies]


TYPED = "document.querySelector('#text').value"


def test_new_chat_during_an_answer_takes_nothing_along(page: Browser):
    page.evaluate("max_tokens.value = 400")
    send(page, "Once upon a time", until="document.querySelectorAll('.token').length > 3")
    page.evaluate("document.querySelector('.token').click(); document.querySelector('#new').click()")
    page.evaluate("max_tokens.value = 3")
    wait(page, IDLE)
    assert answers(page) == []
    assert page.evaluate("token.querySelectorAll('table').length") == 0
    assert page.evaluate("[note.textContent, error.textContent]") == ["", ""]
    for text in ("Hello", "again"):
        send(page, text, until=f"{IDLE} && document.querySelectorAll('.assistant').length")
    first = answers(page)[0]
    assert asked(page) == [["Once upon a time"], ["Hello"], ["Hello", first, "again"]]


def test_a_turn_that_failed_goes_back_to_the_box_and_the_next_one_works(page: Browser):
    page.evaluate("temperature.value = 3")
    send(page, "Hello")
    assert "temperature" in page.evaluate("document.querySelector('article:last-child .error').textContent")
    assert (page.evaluate(TYPED), answers(page)) == ("Hello", [])
    page.evaluate("temperature.value = 0")
    send(page, " there")
    assert "temperature" not in page.evaluate("talk.textContent")
    assert asked(page) == [["Hello"], ["Hello there"]]
    assert len(answers(page)) == 1


def test_a_turn_that_was_stopped_before_its_first_token_goes_back_to_the_box(
    page: Browser, server: Served, monkeypatch: pytest.MonkeyPatch
):
    enough = threading.Event()
    monkeypatch.setattr(type(server.service), "chat_ids", lambda *a, **k: enough.wait(20) and [5])
    send(page, "Hello", until="!document.querySelector('#stop').disabled")
    press(page, "Escape")
    wait(page, IDLE)
    enough.set()
    assert (page.evaluate(TYPED), answers(page)) == ("Hello", [])


def test_without_a_server_the_text_is_kept_and_sent_when_there_is_one(browser: Browser, model: Model):
    with served(model) as server:
        browser.visit(f"{server.url}/", width=1000)
        wait(browser, "document.querySelector('#model').value !== ''")
    send(browser, "Hello")
    assert (browser.evaluate(TYPED), answers(browser)) == ("Hello", [])
    assert "server" in browser.evaluate("document.querySelector('article:last-child .error').textContent")


def test_an_answer_that_breaks_off_is_an_error(page: Browser):
    page.evaluate(
        """window.fetch = async () => new Response('data: {"choices": [{"delta": {"content": "On"}}]}\\n\\n')"""
    )
    send(page, "Hello")
    assert page.evaluate("document.querySelector('.assistant .error').textContent") != ""
    assert answers(page)[0].startswith("On")


def test_the_note_on_a_model_without_a_template_stays(browser: Browser):
    with served() as server:
        browser.visit(f"{server.url}/", width=1000)
        wait(browser, "document.querySelector('#note').textContent !== ''")
        note = browser.evaluate("max_tokens.value = 60; note.textContent")
        send(browser, "Once upon a time", until="document.querySelectorAll('.token').length > 1")
        assert browser.evaluate("note.textContent") == note
        press(browser, "Escape")
        wait(browser, IDLE)
        browser.evaluate("document.querySelector('#new').click()")
        assert browser.evaluate("note.textContent") == note


def test_models_are_read_again_where_they_could_not_be(page: Browser, server: Served):
    page.evaluate("document.querySelector('#model').replaceChildren()")  # as when the server came after the page
    send(page, "Hello", until=f"{IDLE} && document.querySelectorAll('.token').length")
    assert page.evaluate("error.textContent") == ""
    assert len(answers(page)) == 1


@pytest.mark.nightly_cases("1280-light", "380-dark")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1280])
def test_page_fits_the_screen(page: Browser, server: Served, width: int, scheme: str):
    open_page(page, server, width=width, scheme=scheme)
    page.evaluate("max_tokens.value = 20; document.querySelector('#settings').open = true")
    send(page, "Once upon a time " + "x" * 200)
    page.evaluate("document.querySelector('.token').click()")
    page.evaluate("document.querySelector('.stages').previousSibling.click()")
    wait(page, "document.querySelector('.stages details')")
    page.evaluate("document.querySelectorAll('.stages details').forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if folder := os.environ.get("LLORCH_SCREENSHOTS"):
        page.screenshot(Path(folder) / f"page-{width}-{scheme}.png")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 248)"
    assert light == (scheme == "light")


@pytest.mark.parametrize("allowed", [True, False])
def test_page_of_an_allowed_origin_may_read_answers_of_another_server(page: Browser, server: Served, allowed: bool):
    from llorch.apps.serve.app import make_app
    from llorch.apps.serve.guard import Guard

    guarded = Guard(make_app(server.service), key="k3y", origins=[server.url if allowed else "http://localhost:1"])
    script = """fetch('URL/v1/models', {headers: {authorization: 'Bearer k3y', 'x-request-id': 'mine'}})
        .then(got => got.status + ' ' + got.headers.get('x-request-id'), error => error.name)"""
    with listening(guarded) as other:
        # no page of llorch, whose policy lets it ask its own server alone
        page.visit(f"{server.url}/v1/models", width=1000)
        asked = page.call(
            "Runtime.evaluate", expression=script.replace("URL", f"http://127.0.0.1:{other.port}"), awaitPromise=True,
            returnByValue=True,
        )  # fmt: skip
    assert asked["result"]["value"] == ("200 mine" if allowed else "TypeError")


def test_everything_that_is_typed_into_has_a_label(page: Browser):
    without = "[...document.querySelectorAll('input, select, textarea')].filter(one => !one.labels.length).length"
    assert page.evaluate(without) == 0
    assert page.evaluate("document.querySelectorAll('[role=button]:not([tabindex])').length") == 0


@pytest.mark.parametrize("path", PAGE_FILES)
def test_no_file_names_another_place_and_all_are_under_a_policy(server: Served, path: str):
    reply = server.client.with_options(base_url=server.url)._client.get(f"{server.url}{path}")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith(PAGE_FILES[path][1])
    assert reply.headers["content-security-policy"].startswith("default-src 'self';")
    text = reply.text.replace("http://www.w3.org/2000/svg", "")
    assert "//" not in text.replace("// ", "")
    assert "innerHTML" not in text
    assert (Path("llorch/apps/serve/page") / PAGE_FILES[path][0]).read_text() == reply.text
