"""Starts of a training dump other than `--adapter`, for an adapter of an earlier or later step.

Moments and learning rate give the update of a step, so the tensors after a step give those before it. If the dump fits
such a start, the engine is right, and `--adapter` is of another step.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from llorch.diagnosis.training.judge import MOMENTS
from llorch.diagnosis.training.replay import ReplayedRun
from llorch.engines.dumps.training_dump import Settings, TrainingDump, TrainingStep
from llorch.families.config import ModelConfig
from llorch.lora.adapter import Adapter, assembled
from llorch.training.adamw import moved

NEARBY = 10.0  # largest distance of another step's adapter from `--adapter`, in learning rates


def first_step(dump: TrainingDump) -> TrainingStep:
    """Return the first step with token ids."""
    return next(step for step in dump.steps if step.batches)


def starts_from_adapter(dump: TrainingDump, adapter: Adapter, number: int) -> bool:
    """Tell if a step starts from `--adapter`: the first one with ids, if the dump lacks the parameters before it."""
    before = dump.steps[0]
    lacks_start = bool(before.batches) or any(("parameters", name) not in before.shown for name in adapter.flat())
    return number == first_step(dump).number and lacks_start


def describe_start(number: int, first: int) -> str:
    """Say that `--adapter` is not the adapter before step `number`, and from which step on llorch judged the dump."""
    fact = "its numbers give the tensors before this step, and llorch judged it from them"
    if first > number:
        fact = f"it fits the adapter as the one before step {first}, and llorch did not judge earlier steps"
    return f"--adapter is of another step: it is not the adapter before step {number} of the dump; {fact}"


def other_starts(
    config: ModelConfig, adapter: Adapter, dump: TrainingDump, run: ReplayedRun
) -> Iterator[tuple[Adapter, TrainingDump]]:
    """Yield the other starts that `dump` may have: the adapter before the first step that is judged, and the dump.

    `run` is the replay from `--adapter`.
    """
    step, tensors = first_step(dump), adapter.flat()
    after = _tensors_after(step, tensors)
    for end in ({name: array.astype(np.float64) for name, array in tensors.items()}, after):
        if len(end) == len(tensors) and _has_moments(step, tensors):
            start = {name: _before(step, name, array, run, dump.settings) for name, array in end.items()}
            if _is_near(start, tensors, step):
                yield assembled(adapter.config, start, config, where=None), dump
    if later_steps := _steps_after(dump, step):
        yield adapter, replace(dump, steps=later_steps)


def start_from_dump(dump: TrainingDump, adapter: Adapter) -> TrainingDump | None:
    """Leave out the first step, if the dump has the tensors after it, near to the adapter, and later steps."""
    step, tensors = first_step(dump), adapter.flat()
    later_steps, after = _steps_after(dump, step), _tensors_after(step, tensors)
    if not later_steps or len(after) < len(tensors) or not _is_near(after, tensors, step):
        return None
    note = (
        f"--adapter may be of another step: step {step.number}, which starts from it, is wrong, and later steps, which "
        f"start from the dump's tensors, are right; llorch did not judge step {step.number}"
    )
    return replace(dump, steps=(replace(step, batches=()), *later_steps), notes=(*dump.notes, note))


def _tensors_after(step: TrainingStep, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return the tensors after a step that the dump has."""
    return {name: step.shown["parameters", name].array for name in names if ("parameters", name) in step.shown}


def _steps_after(dump: TrainingDump, step: TrainingStep) -> tuple[TrainingStep, ...]:
    return tuple(later for later in dump.steps if later.number > step.number)


def _is_near(tensors: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray], step: TrainingStep) -> bool:
    """Tell if tensors may be those of an earlier or later step than the given ones; False for NaN."""
    distances = np.array([np.abs(tensors[name] - array).max() for name, array in given.items()])
    return bool((distances <= NEARBY * step.lr).all())


def _has_moments(step: TrainingStep, tensors: Mapping[str, np.ndarray]) -> bool:
    """Tell if the dump has the moments after a step, or all gradients of the first step, which give them."""
    sources = [MOMENTS, *((("gradient",), ("clipped",)) if step.number == 1 else ())]
    return any(all((group, name) in step.shown for group in groups for name in tensors) for groups in sources)


def _before(step: TrainingStep, name: str, after: np.ndarray, run: ReplayedRun, settings: Settings) -> np.ndarray:
    """Compute a tensor before a step from the tensor after it, and from the moments of the dump."""
    dumped = ((group, step.shown.get((group, name))) for group in MOMENTS)
    m, v = (run.arrays[step.number, group, name] if array is None else array.array for group, array in dumped)
    update = moved(
        np.zeros_like(after), m, v, step=step.number, lr=step.lr, betas=settings.betas, eps=settings.eps,
        weight_decay=settings.weight_decay,
    )  # fmt: skip
    return (after - update) / (1 - step.lr * settings.weight_decay)
