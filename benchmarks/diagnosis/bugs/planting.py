"""Mistakes that are injected into the port, and the table `BUGS` of all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.diagnosis.port import Port
from llorch.runtime.builtin import BUILTIN

WITH_BIAS, WITH_HEAD_NORM, SCALED = "micro-qwen2", "micro-qwen3", "micro-llama3"
LLAMA = "micro-llama micro-llama3 story"  # rows of q and k are interleaved in the file
QWEN = "micro-qwen2 micro-qwen3"
UNTIED = "micro-llama micro-qwen3"
NARROW_HEADS = "micro-llama micro-llama3 micro-qwen2 story"  # models without a norm of heads


@dataclass(frozen=True)
class Bug:
    """Mistake of the port.

    Attributes:
        name: Name of the bug; the known mistakes it may be named as are in `expected`.
        sentence: Docstring of the function that injects it.
        inject: Function that changes a port.
        starts_in: Stages in which it acts; the first of them shows first.
        layers: Layers in which it acts; None for all.
        models: Models into which it can be injected.
        plan: Plan of `cases.PLANS` by which the tokens are given.
        first_pass: The first pass that it changes.
        shapes: True if tensors of the port keep their usual shapes.
        is_known: True for a mistake that others made before, False for nonsense in one place.
    """

    name: str
    sentence: str
    inject: Callable[[Port], object]
    starts_in: tuple[str, ...]
    layers: tuple[int, ...] | None
    models: tuple[str, ...]
    plan: str
    first_pass: int
    shapes: bool
    is_known: bool


BUGS: dict[str, Bug] = {}
PortChange = Callable[[Port], object]


def bug(
    stage_names: str,
    *,
    layer: int | None = None,
    models: str = " ".join(BUILTIN),
    plan: str = "steps",
    first_pass: int = 0,
    shapes: bool = True,
    is_known: bool = True,
) -> Callable[[PortChange], PortChange]:
    """Register a bug under the name of the function that injects it; the docstring's first line describes the bug."""

    def enter(inject: PortChange) -> PortChange:
        name = inject.__name__.replace("_", "-")
        assert name not in BUGS, name
        layers = None if layer is None else (layer,)
        sentence = (inject.__doc__ or "").strip()
        starts_in, injected_in = tuple(stage_names.split()), tuple(models.split())
        BUGS[name] = Bug(name, sentence, inject, starts_in, layers, injected_in, plan, first_pass, shapes, is_known)
        return inject

    return enter


def local(stage_names: str, **options: Any) -> Callable[[PortChange], PortChange]:
    """Register a bug that is no known mistake."""
    return bug(stage_names, is_known=False, **options)


def changed(
    port: Port, step: str, change: Callable[[np.ndarray], None], layer: int | None = None, only: str = ""
) -> None:
    """Change a copy of a step's result; with `only`, if the step's last argument equals it."""

    def new(right: Callable[..., np.ndarray], *args: object) -> np.ndarray:
        result = right(*args)
        if only and args[-1] != only:
            return result
        result = result.copy()
        change(result)
        return result

    port.around(step, new, layer)


def put(select: Callable[[np.ndarray], Any], value: Any) -> Callable[[np.ndarray], None]:
    """Make a change that sets a part of an array to a number or to a function of the array."""

    def change(x: np.ndarray) -> None:
        x[select(x)] = value(x) if callable(value) else value

    return change
