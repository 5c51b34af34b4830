"""`--impl` of `llorch chat`, `llorch serve` and `llorch lora train`; that of `llorch run` is in `test_run`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fakes.scripted_learner import paste_hints
from helpers.command_line import invoke
from helpers.refusals import assert_cli_refuses, assert_tells
from helpers.served import listening

from llorch.apps.learn.choice import opened
from llorch.apps.learn.lessons import BY_NUMBER, exercises_of_run, exercises_of_training
from llorch.cli.chat import _converse
from llorch.cli.chat_session import ChatSession
from llorch.cli.outcome import DIFFERS, USAGE
from llorch.model.model import load
from llorch.ops.sampling import SamplingSettings

NORM = "def rms_norm(x, weight, eps):\n    return x / (1 + abs(x).max()) * weight\n"  # wrong, with usable results
RAISES = "def rms_norm(x, weight, eps):\n    return nothing\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def write(folder: Path, text: str, number: str = "01") -> None:
    (folder / f"{BY_NUMBER[number].module}.py").write_text(text)


def test_run_exercises_are_those_of_the_models_stages():
    names = {model: [e.name for e in exercises_of_run(load(model).config)] for model in ("story", "micro-qwen3-moe")}
    assert {"bfloat16_to_float32", "merge", "rms_norm", "generate"} <= {*names["story"]}
    assert {"topk_weights", "delta_rule", "q8_0", "lora_delta"}.isdisjoint(names["story"])
    assert {*names["micro-qwen3-moe"]} - {*names["story"]} == {"top_k", "topk_weights", "expert_outputs", "mixed"}


def chat(*words: str) -> Any:
    return invoke("chat", "story", "-n", "4", *words, stdin="Once upon a time\nand then\n")


def test_chat_answers_with_the_learners_functions(folder: Path):
    right, alone = paste_hints(BY_NUMBER["01"]), chat()
    write(folder, right)
    result = chat("--impl", str(folder))
    assert (result.exit_code, result.stdout) == (0, alone.stdout), result.stderr
    assert_tells(result.stderr, str(folder), "your functions: rms_norm; borrowed from llorch: ")
    write(folder, NORM)
    assert chat("--impl", str(folder)).stdout != alone.stdout


def test_chat_ends_with_a_fault_in_a_pipe_and_goes_on_at_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write(folder, RAISES)
    result = chat("--impl", str(folder))
    assert (result.exit_code, result.stdout) == (DIFFERS, "")
    assert_tells(result.stderr, "l01_rms_norm.py:2  return nothing", "llorch: rms_norm: raised NameError")
    lines = iter(["Once", "again"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/quit"))
    session = ChatSession(load("story"), [], SamplingSettings(), max_tokens=4)
    with opened(str(folder)).installed(live=True):
        _converse(session, is_terminal=True)
    assert capsys.readouterr().err.count("rms_norm: raised NameError") == 2


def test_functions_and_an_adapter_exclude_each_other(folder: Path, tmp_path: Path):
    write(folder, RAISES)
    for verb in (("chat", "story", "--adapter", "x"), ("serve", "story", "--adapter", "x=x")):
        assert_cli_refuses(invoke(*verb, "--impl", str(folder)), USAGE, "--impl", "--adapter")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Serve `story` in this process; return the replies to two requests, and what was printed on stderr."""

    def served(*words: str) -> tuple[list[httpx.Response], str]:
        replies = []

        def serve_here(app: Any, bound: object, **_: object) -> None:
            with listening(app) as port:
                body: dict[str, Any] = {
                    "model": "story",
                    "prompt": "Once upon a time",
                    "max_tokens": 4,
                    "temperature": 0,
                }
                for _request in range(2):
                    url = f"http://127.0.0.1:{port}/v1/completions"
                    replies.append(httpx.post(url, json=body, trust_env=False, timeout=60))

        monkeypatch.setattr("llorch.apps.serve.server.serve", serve_here)
        result = invoke("serve", "story", *words, "--port", "0")
        assert result.exit_code == 0, result.stderr
        return replies, result.stderr

    return served


def test_server_answers_with_the_learners_functions(folder: Path, serve: Callable[..., Any]):
    def texts(*words: str) -> list[str]:
        return [reply.json()["choices"][0]["text"] for reply in serve(*words)[0]]

    write(folder, paste_hints(BY_NUMBER["01"]))
    write(folder, paste_hints(BY_NUMBER["12"]), "12")
    alone = texts()
    assert texts("--impl", str(folder)) == alone
    assert "generate" not in serve("--impl", str(folder))[1]  # a server has its own loop
    write(folder, NORM)
    assert texts("--impl", str(folder)) != alone


def test_server_reports_a_fault_and_lives(folder: Path, serve: Callable[..., Any]):
    write(folder, RAISES)
    replies, said = serve("--impl", str(folder))
    assert [reply.status_code for reply in replies] == [500, 500]
    error = replies[1].json()["error"]
    assert (error["code"], error["type"]) == ("learner_fault", "server_error")
    assert_tells(error["message"], "rms_norm: raised NameError")
    assert said.count("l01_rms_norm.py:2  return nothing") == 2


TRAIN = ("--data", "pirate", "--r", "2", "--batch-size", "2", "--steps", "3", "--lr", "0.005", "--max-length", "24")


def train(output: Path, *words: str) -> Any:
    return invoke("lora", "train", "micro-qwen3", "-o", str(output), *TRAIN, *words)


def losses(output: Path) -> list[float]:
    records = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_training_in_numpy_agrees_with_torch_and_runs_all_functions(folder: Path, tmp_path: Path):
    for number in ("15", "16", "17", "18", "19"):
        write(folder, paste_hints(BY_NUMBER[number]), number)
    result = train(tmp_path / "learner", "--impl", str(folder))
    assert result.exit_code == 0, result.stderr
    names = ", ".join(exercise.name for exercise in exercises_of_training())
    assert (names.partition(",")[0], names.rpartition(" ")[2]) == ("lora_scaling", "accumulated")
    assert_tells(result.stderr, f"your functions: {names}; borrowed from llorch: none", "float32 on NumPy")
    assert train(tmp_path / "torch").exit_code == 0
    assert losses(tmp_path / "learner") == pytest.approx(losses(tmp_path / "torch"), rel=1e-5)
    run = invoke("run", "micro-qwen3", "--adapter", str(tmp_path / "learner"), "-n", "1", stdin="Once")
    assert run.exit_code == 0, run.stderr


@pytest.mark.nightly_cases(*(e.name for e in exercises_of_training() if e.name not in ("cross_entropy", "adamw_step")))
@pytest.mark.parametrize("name", [exercise.name for exercise in exercises_of_training()])
def test_training_calls_every_function_of_the_learner(name: str, folder: Path, tmp_path: Path):
    lesson = next(BY_NUMBER[n] for n in ("15", "16", "17", "18", "19") if name in [e.name for e in BY_NUMBER[n].parts])
    write(folder, f"def {name}(**arguments):\n    return nothing\n", lesson.number)
    result = train(tmp_path / "run", "--impl", str(folder))
    assert result.exit_code == DIFFERS
    assert_tells(result.stderr, f"{lesson.module}.py:2  return nothing", f"llorch: {name}: raised NameError")


def test_training_with_a_fault_keeps_the_steps_before_and_continues(folder: Path, tmp_path: Path):
    right = paste_hints(BY_NUMBER["18"])
    late, n_changes = re.subn(r"(def clip_by_norm\(.*\n)", r"\1    count()\n", right)
    assert n_changes == 1
    write(folder, f"calls = []\ndef count():\n    calls.append(1)\n    assert len(calls) < 3\n{late}", "18")
    result = train(tmp_path / "run", "--impl", str(folder))
    assert result.exit_code == DIFFERS
    assert_tells(result.stderr, "stopped after 2 of 3 steps", "--resume", "clip_by_norm: raised AssertionError")
    assert_cli_refuses(train(tmp_path / "run", "--resume"), USAGE, "arithmetic", "numpy")
    write(folder, right, "18")
    assert train(tmp_path / "run", "--resume", "--impl", str(folder)).exit_code == 0
    assert train(tmp_path / "whole", "--impl", "reference").exit_code == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


@pytest.mark.parametrize(
    "words", [("--dropout", "0.1"), ("--dtype", "bfloat16"), ("--init", "pissa"), ("--mesh", "dp=2")]
)
def test_training_in_numpy_refuses_what_it_does_not_do(words: tuple[str, str], folder: Path, tmp_path: Path):
    write(folder, RAISES)
    result = train(tmp_path / "run", "--impl", str(folder), *words)
    assert_cli_refuses(result, USAGE, words[0] if words[0] == "--mesh" else words[0].removeprefix("--"), "--impl")
