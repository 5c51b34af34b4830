"""`llorch serve`, as a process of its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from command_line import REPOSITORY, invoke
from random_adapters import random_adapter

from llorch.lora.base import identity_of
from llorch.lora.peft_format import write_peft
from llorch.model import load

ASKED: Any = [{"role": "user", "content": "Once upon a time"}]


@dataclass
class Process:
    """A server, the line that said that it was ready, and where it is."""

    process: subprocess.Popen[str]
    ready: str

    @property
    def url(self) -> str:
        found = re.search(r"http://[^ ;]+", self.ready)
        assert found is not None
        return found[0]

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


@contextmanager
def serving(*args: str, **environment: str) -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, "-m", "llorch", "serve", *args, "--port", "0"],
        stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, env=os.environ | environment,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        ready = next((line for line in process.stderr if " at http://" in line), "")
        yield Process(process, ready)
    finally:
        process.kill()
        process.communicate()


def ended(server: Process) -> tuple[int, str]:
    _, said = server.process.communicate(timeout=60)
    return server.process.returncode, said


def answer(client: openai.OpenAI, model: str = "story") -> str | None:
    with client:
        got = client.chat.completions.create(model=model, messages=ASKED, temperature=0, max_tokens=8)
    return got.choices[0].message.content


def solo(**how: Any) -> str:
    return "".join(token.text for token in load("story").generate("Once upon a time", max_tokens=8, **how))


def test_it_answers_says_so_in_a_line_and_ends_with_sigterm():
    with serving("-v") as server:
        assert server.ready.startswith("llorch: story at http://127.0.0.1:")
        assert "no chat template" in server.ready
        assert answer(server.client()) == solo()
        server.process.send_signal(signal.SIGTERM)
        code, said = ended(server)
    assert code == 0
    assert re.fullmatch(r"POST /v1/chat/completions 200 \d+ ms\n", said)


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_torch_answers_as_torch_does_alone(mode: str):
    with serving("story", "--mode", mode, "--backend", "torch", "--dtype", "float32") as server:
        assert answer(server.client()) == solo()


def test_adapters_are_models(tmp_path: Path):
    model = load("story")
    write_peft(random_adapter(model.config), tmp_path / "random", base=identity_of(model.weights))
    with serving("story", "--adapter", f"wild={tmp_path / 'random'}", "--any-base") as server:
        assert answer(server.client(), "story:wild") != answer(server.client())


def test_with_a_key_nobody_is_answered_who_does_not_know_it():
    with serving("story", LLORCH_API_KEY="s3cret") as server:
        assert answer(server.client("s3cret")) == solo()
        with pytest.raises(openai.AuthenticationError):
            answer(server.client("wrong"))


def test_an_engine_that_dies_ends_the_process():
    dying = "import llorch.serve.turns as t; t.Turns.leave = lambda *a: 1 / 0; from llorch.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", dying, "serve", "story", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert process.stderr is not None
    server = Process(process, process.stderr.readline())
    with pytest.raises(openai.InternalServerError) as caught:
        answer(server.client())
    assert caught.value.status_code == 503
    code, said = ended(server)
    assert code == 70
    assert said.splitlines()[-1] == "llorch: serve: the engine has died: ZeroDivisionError('division by zero')"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--host", "0.0.0.0"), "expected an API key (--api-key), got none"),
        (("--host", "no.such.host.invalid"), "expected an address of this machine"),
        (("--port", "99999"), "99999 is not in the range"),
        (("--adapter", "wild"), "expected NAME=PATH"),
        (("--adapter", "wild=/nowhere"), "/nowhere"),
        (("--mode", "reproducible"), "--mode reproducible goes with --backend torch"),
        (("--backend", "torch", "--numerics", "ggml"), "goes with --backend numpy"),
        (("nowhere.gguf",), "no such file"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(args: tuple[str, ...], said: str):
    result = invoke("serve", *args, *(() if "--port" in args else ("--port", "0")))
    assert result.exit_code in (2, 3)
    assert said in result.stderr
    assert "Traceback" not in result.stderr
