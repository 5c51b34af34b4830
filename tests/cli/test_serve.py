"""`llorch serve`: a process of its own where signals and its end are looked at, else in this one."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from builders.random_adapters import random_adapter
from helpers.command_line import REPOSITORY, invoke
from helpers.refusals import assert_cli_refuses, assert_tells
from helpers.served import listening

from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model.model import load

ASKED: Any = [{"role": "user", "content": "Once upon a time"}]
Ask = Callable[..., Any]  # of a function of the address of a server, and of the words behind `llorch serve`


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Let `llorch serve`, in this process, serve until a function has asked."""

    def asked(question: Callable[[str], Any], *words: str) -> Any:
        answers = []

        def serve_here(app: Any, bound: object, **_: object) -> None:
            with listening(app) as port:
                answers.append(question(f"http://127.0.0.1:{port}"))

        monkeypatch.setattr("llorch.apps.serve.server.serve", serve_here)
        result = invoke("serve", *words, "--port", "0")
        assert (result.exit_code, len(answers)) == (0, 1), result.stderr
        return answers[0]

    return asked


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


@dataclass
class Process:
    """A server, the line that said that it was ready, and where it is."""

    process: subprocess.Popen[str]
    ready: str
    url: str


@contextmanager
def serving(*args: str, start: tuple[str, str] = ("-m", "llorch")) -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, *start, "serve", *args, "--port", "0"],
        stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        ready = next((line for line in process.stderr if " at http://" in line), "")
        yield Process(process, ready, re.findall(r"http://[^ ;]+", ready)[0])
    finally:
        process.kill()
        process.communicate()


def ended(server: Process) -> tuple[int, str]:
    _, said = server.process.communicate(timeout=60)
    return server.process.returncode, said


def answer(client: openai.OpenAI, model: str = "story") -> str | None:
    with client:
        actual = client.chat.completions.create(model=model, messages=ASKED, temperature=0, max_tokens=8)
    return actual.choices[0].message.content


def solo() -> str:
    return "".join(token.text for token in load("story").generate("Once upon a time", max_tokens=8))


def test_it_answers_says_so_in_a_line_and_ends_with_sigterm():
    with serving("-v") as server:
        assert server.ready.startswith("llorch: story at http://127.0.0.1:")
        assert "no chat template" in server.ready
        assert answer(client(server.url)) == solo()
        server.process.send_signal(signal.SIGTERM)
        code, said = ended(server)
    assert code == 0
    assert re.fullmatch(r"POST /v1/chat/completions 200 \d+ ms\n", said)


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_torch_answers_as_torch_does_alone(mode: str, ask: Ask):
    how = ("story", "--mode", mode, "--backend", "torch", "--dtype", "float32")
    assert ask(lambda url: answer(client(url)), *how) == solo()


def test_adapters_are_models(tmp_path: Path, ask: Ask):
    model = load("story")
    write_peft(random_adapter(model.config), tmp_path / "random", base=identity_of(model.weights))
    how = ("story", "--adapter", f"wild={tmp_path / 'random'}", "--any-base")
    wild, alone = ask(lambda url: (answer(client(url), "story:wild"), answer(client(url))), *how)
    assert wild != alone == solo()


@pytest.mark.parametrize("numerics", ["exact", "ggml"])
def test_the_list_of_models_names_the_numerics(numerics: str, ask: Ask):
    def names(url: str) -> set[str]:
        return {model["numerics"] for model in httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]}

    assert ask(names, "story", "--numerics", numerics) == {numerics}


def test_a_page_of_an_allowed_origin_is_answered(ask: Ask):
    def asking(url: str) -> list[tuple[int, str | None]]:
        found = [httpx.get(f"{url}/v1/models", headers={"origin": origin}, trust_env=False) for origin in origins]
        return [(one.status_code, one.headers.get("access-control-allow-origin")) for one in found]

    origins = ("http://localhost:3000", "app://obsidian.md", "null", "http://localhost:3001")
    how = [word for origin in origins[:3] for word in ("--allow-origin", origin)]
    assert ask(asking, "story", *how) == [*((200, origin) for origin in origins[:3]), (403, None)]


def test_server_with_a_key_refuses_requests_without_it(ask: Ask, monkeypatch: pytest.MonkeyPatch):
    def with_keys(url: str) -> str | None:
        with pytest.raises(openai.AuthenticationError):
            answer(client(url, "wrong"))
        return answer(client(url, "s3cret"))

    monkeypatch.setenv("LLORCH_API_KEY", "s3cret")
    assert ask(with_keys, "story") == solo()


def test_an_engine_that_dies_ends_the_process():
    dying = (
        "import llorch.apps.serve.scheduler as t; t.Turns.leave = lambda *a: 1 / 0; from llorch.cli import main; main()"
    )
    with serving("story", start=("-c", dying)) as server:
        with pytest.raises(openai.InternalServerError) as caught:
            answer(client(server.url))
        code, said = ended(server)
    assert (caught.value.status_code, code) == (503, 70)
    assert_tells(said.splitlines()[-1], "llorch: serve: ", "ZeroDivisionError('division by zero')")


NO_ORIGINS = (
    "*", "", "localhost:3000", "http://localhost:3000/", "http://*.example", "HTTP://localhost", "http://a b",
    "http://a,http://b", "NULL", "https://user@chat.example",
)  # fmt: skip


def test_the_context_of_the_model_is_the_most_that_ctx_takes(ask: Ask):
    def context(url: str) -> int:
        with client(url) as asking:
            (model,) = asking.models.list().data
        return model.context_length  # type: ignore[attr-defined]

    assert [ask(context, "story", *ctx) for ctx in ((), ("--ctx", "512"), ("--ctx", "64"))] == [512, 512, 64]


@pytest.mark.parametrize(
    ("args", "code", "facts"),
    [
        (("--host", "no.such.host.invalid"), 2, ("serve", "no.such.host.invalid:0")),
        (("--port", "99999"), 2, ("--port", 99999, "0<=x<=65535")),
        (("--ctx", "100000"), 2, ("--ctx", 100000, 512, "story")),
        *((("--allow-origin", bad), 2, ("--allow-origin", repr(bad))) for bad in NO_ORIGINS),
        (("--adapter", "wild"), 2, ("--adapter", "NAME=PATH", "'wild'")),
        (("--adapter", "wild=/nowhere"), 3, ("/nowhere: ", "adapter")),
        (("--backend", "torch", "--numerics", "ggml"), 2, ("--numerics ggml", "--backend numpy")),
        (("nowhere.gguf",), 3, ("'nowhere.gguf'",)),
    ],
)
def test_unservable_model_or_option_is_refused_in_a_line(args: tuple[str, ...], code: int, facts: tuple[object, ...]):
    result = invoke("serve", *args, *(() if "--port" in args else ("--port", "0")))
    assert_cli_refuses(result, code, *facts)
