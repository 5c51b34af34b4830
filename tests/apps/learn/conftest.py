"""Lessons are judged on fewer passes than learners get, and built-in models and goldens are read once.

A pass is cut for the cache at one place instead of three: near the start in the middle, far on before its last token.
"""

import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from llorch.files import Weights
    from llorch.judging.expectations.forward import ForwardExpectations
    from llorch.judging.goldens.forward import Golden


@pytest.fixture(autouse=True, scope="module")
def brief_checks() -> Iterator[None]:
    from llorch.apps.learn.checks import after_logits, forward, foundation

    whole_suite = forward.suite_of
    with pytest.MonkeyPatch.context() as patch:
        for module in (forward, foundation):
            patch.setattr(module, "stored", stored_once)
        for module in (forward, after_logits, *on_torch()):
            patch.setattr(module, "suite_of", brief_suite)
        yield
    for module in on_torch():  # imported meanwhile
        vars(module)["suite_of"] = whole_suite


def on_torch() -> list[ModuleType]:
    """The check of lesson 14, once it is imported."""
    found = sys.modules.get("llorch.apps.learn.on_torch.check")
    return [found] if found is not None else []


@cache
def stored_once(model: str) -> "tuple[Weights, Golden]":
    from llorch.judging.verify import stored

    return stored(model)


@cache
def brief_suite(model: str) -> "ForwardExpectations":
    from llorch.judging.expectations.forward import ForwardExpectations
    from llorch.stages.stage_ref import Pass

    class CutOnce(Pass):
        @property
        def splits(self) -> list[int]:
            return [len(self.ids) - 1 if self.first_position else len(self.ids) // 2]

    weights, golden = stored_once(model)
    cases = {name: CutOnce(case.ids, case.first_position) for name, case in golden.cases.items()}
    return ForwardExpectations(model, weights, cases, golden.engine_outputs, golden.reference)
