"""What the process that renders chat templates answers: what the same code answers in this process, at little cost."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from builders import chat_models
from builders.vocabularies import real_vocabulary
from fetch_vocabularies import TEMPLATES
from helpers.work_limit import work_limit

from llorch.files.tokenizer import template_worker
from llorch.files.tokenizer.template_process import RESIDENT
from llorch.files.tokenizer.template_worker import answer
from llorch.runtime import channel, worker
from tests.files.tokenizer.test_chat import PUBLISHED_CHATS, TOOLS
from tests.repository.test_layers import imported_modules

ODD = [
    "\ud800", "\x00\x1b[0m", "\ufdd0\uffff", "\U0001f98a", "\u2028\x85\r\n", '"\\"', "<|im_end|>", "\udfff\ud800",
    "\ud83e" + "\udd8a",
]  # fmt: skip
SOURCES = {
    name: value for name, value in vars(chat_models).items() if isinstance(value, str) and not name.startswith("_")
}
MAX_TEXT = 4 << 20
LIGHT = ("llorch.runtime.channel", "llorch.runtime.worker")  # with the standard library only


def requests(source: str) -> list[dict[str, Any]]:
    odd = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in ODD]
    same = {"documents": None, "bos_token": "<bos>"}
    return [
        {"source": source, "variables": {"messages": chat, "tools": tools, "add_generation_prompt": opened, **same}}
        for chat in [*(messages for messages, *_ in PUBLISHED_CHATS.values()), *odd]
        for tools in (None, TOOLS)
        for opened in (False, True)
    ]


@pytest.mark.parametrize("name", ["CHATML", "LLAMA_3", "THINKING", "OPENS_WITH_THINKING", "NO_END"])
def test_worker_answers_equal_those_of_this_process(name: str):
    for request in requests(SOURCES[name]):
        assert RESIDENT.ask(request) == answer(request, max_text=MAX_TEXT)


@pytest.mark.weights
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_process_renders_real_templates_as_this_process_would(name: str):
    for request in requests((real_vocabulary("qwen2").parent / "templates" / f"{name}.jinja").read_text()):
        assert RESIDENT.ask(request) == answer(request, max_text=MAX_TEXT)


@pytest.mark.parametrize("text", ODD)
def test_no_text_is_changed_on_the_way(text: str):
    request = {"source": "{{ x }}{{ y | tojson }}", "variables": {"x": text, "y": {text: [1, 2.5, True, None]}}}
    found = RESIDENT.ask(request)["text"]
    assert found.startswith(text)
    assert json.loads(found[len(text) :]) == {text: [1, 2.5, True, None]}


def test_a_conversation_may_be_longer_than_a_pipe_holds():
    text = "\u4f60 " * 500_000
    assert RESIDENT.ask({"source": "{{ x }}", "variables": {"x": text}}) == {"text": text}


def test_a_reason_is_short_and_never_empty():
    long = answer({"source": "{{ raise_exception('x' * 9999) }}", "variables": {}}, max_text=9)
    empty = answer({"source": "{{ raise_exception('') }}", "variables": {}}, max_text=9)
    assert (long["message"].count("x"), empty["message"].split()[-1]) == (500, "TemplateError")


def test_out_of_memory_is_no_answer():
    with pytest.raises(MemoryError):
        answer({"source": "{{ 'a' * n }}", "variables": {"n": 2**62}}, max_text=9)


def test_the_process_imports_jinja_the_worker_and_the_standard_library_only():
    def heavy(module: ModuleType, package: str) -> set[str]:
        names = (name for name, _ in imported_modules(Path(str(module.__file__)).read_text(), package))
        return {name for name in names if name.split(".")[0] in ("llorch", "numpy")}

    assert {name.rpartition(".")[0] for name in heavy(template_worker, "llorch.files.tokenizer")} == {*LIGHT}
    assert {name.rpartition(".")[0] for name in heavy(worker, "llorch")} == {"llorch.runtime.channel"}
    assert heavy(channel, "llorch") == set()


def test_another_rendering_runs_few_lines_of_python_and_compiles_nothing():
    request = requests(SOURCES["CHATML"])[0]
    first = answer(request, max_text=MAX_TEXT)
    with work_limit(2_000):  # compiling takes ten times as many
        assert answer(request, max_text=MAX_TEXT) == first
    assert RESIDENT.ask(request) == first
    with work_limit(2_000):
        assert RESIDENT.ask(request) == first


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: no count of the reads of another process")
def test_a_rendering_is_one_message_each_way():
    request = requests(SOURCES["CHATML"])[0]
    RESIDENT.ask(request)
    pid = RESIDENT.pid

    def n_calls() -> tuple[int, int]:
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return int(counts["syscr"]), int(counts["syscw"])

    reads, writes = n_calls()
    for _ in range(200):
        RESIDENT.ask(request)
    assert RESIDENT.pid == pid
    assert n_calls()[0] - reads <= 200 * 4  # nothing there yet, the length, the request
    assert n_calls()[1] - writes == 200
