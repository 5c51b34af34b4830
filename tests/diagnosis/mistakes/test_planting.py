"""Wrong functions in the place of right ones: wherever these are used, and never for longer than they are wanted."""

import sys
from types import ModuleType
from typing import Any

import pytest

from llorch.diagnosis.mistakes import MISTAKES, Mistake
from llorch.diagnosis.mistakes.planting import injected
from llorch.judging.runners import training_numpy as runner
from llorch.lora.config import LoraConfig
from llorch.training import adamw

MISSING, LATE = "adamw-decay-missing", "adamw-step-counted-late"


def of(*names: str) -> list[Mistake[Any]]:
    return [MISTAKES[name] for name in names]


def test_users_of_a_function_have_the_wrong_one_too():
    with injected(*of("gradient-graph-cut-between-blocks", "loss-labels-not-shifted")):
        assert runner.shifted.__qualname__.startswith("not_shifted")


def test_injected_mistakes_stack_and_are_undone_after_an_error():
    right, of_class = adamw.moved, vars(LoraConfig)["scaling_of"]
    with pytest.raises(RuntimeError, match="inside"), injected(*of(MISSING, LATE, "lora-alpha-not-divided")):  # noqa: PT012
        assert adamw.moved is not right
        assert vars(LoraConfig)["scaling_of"] is not of_class
        raise RuntimeError("inside")
    assert adamw.moved is right
    assert vars(LoraConfig)["scaling_of"] is of_class


@pytest.mark.parametrize("n_imports", [1, 2])
def test_a_user_that_is_imported_after_another_mistake_has_the_wrong_one_too(
    monkeypatch: pytest.MonkeyPatch, n_imports: int
):
    users = [ModuleType("llorch.of_this_test") for _ in range(n_imports)]
    for user in users:  # the second is the same module, imported again
        vars(user)["moved"] = adamw.moved
        with injected(*of("loss-labels-not-shifted")):
            pass
        monkeypatch.delitem(sys.modules, user.__name__, raising=False)
        monkeypatch.setitem(sys.modules, user.__name__, user)
    with injected(*of(MISSING)):
        assert vars(users[-1])["moved"] is adamw.moved
    assert vars(users[-1])["moved"] is adamw.moved
