"""benchmarks/rounds.py: engines that do not survive are not run, and the others are timed to the end."""

import importlib
from types import ModuleType
from typing import Any

import pytest
from helpers.command_line import REPOSITORY

from llorch.runtime.errors import EngineDied


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("rounds")


GONE = "engine: gone"


class Here:
    """An engine that counts, and ends when it has counted to a number."""

    def __init__(self, end: int) -> None:
        self._left = end

    def prefill(self, ids: list[int]) -> None:
        if self._left == 0:
            raise EngineDied(GONE)
        self._left -= 1

    def decode(self, token_id: int) -> None: ...


@pytest.mark.parametrize("end", [0, 1, 3])
def test_an_engine_that_ends_is_named_and_the_others_go_on(rounds: Any, end: int, capsys: pytest.CaptureFixture[str]):
    samples = rounds.interleave({"short": lambda: Here(end), "long": lambda: Here(99)}, [4], 2, 3)
    assert list(samples) == ["long"]
    assert [len(of_one) for of_one in samples["long"].values()] == [3, 3]
    assert capsys.readouterr().out == f"NOT RUN: {GONE}\n"
    rounds.report(samples, ["long"], ["short"])
    with pytest.raises(SystemExit, match="3"):
        rounds.finish(samples, ["short", "long"])
    rounds.finish(samples, ["long"])


@pytest.mark.live
def test_engines_of_others_are_timed_in_their_process(rounds: Any, monkeypatch: pytest.MonkeyPatch):
    engines, models = importlib.import_module("engines"), importlib.import_module("random_models")
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr("time.process_time", lambda: 1 / 0)  # of this process, which only waits
    with models.random_model(models.QWEN_05B | small | {"vocab_size": 2048}) as folder:
        makers = {"llama.cpp": lambda: engines.foreign("LlamaCpp", folder / "model.gguf", 1)}
        samples = rounds.interleave(makers, [4, 8], 2, 1)
    n_samples = {what: len(of_one) for what, of_one in samples["llama.cpp"].items()}
    assert n_samples == {"prefill 4": 1, "decode": 1, "prefill 8": 1}
