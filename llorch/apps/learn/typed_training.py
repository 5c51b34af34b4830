"""Functions of training that contain a known mistake, as a learner types them.

Rows of training replace functions of llorch. Here each is put around llorch's own function, and called with the
arguments that the lesson's function has. Files, batches and adapters, which a learner never sees, are made of these.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.exercises.training import in_one_row, our_adamw_step, our_clip_by_norm, our_lora_backward
from llorch.diagnosis.mistakes import TRAINING, Mistake
from llorch.diagnosis.mistakes.planting import instead, owner_of, replaced
from llorch.lora.config import LoraConfig
from llorch.ops.linear import linear_backward

Array = np.ndarray
Brought = Callable[[Mistake[Any], Exercise], Call]  # a row and an exercise: the function that a learner types


def typed_in_training(exercise: Exercise) -> Mapping[str, Call]:
    """Make the wrong functions of an exercise of training, by the names of the mistakes."""
    replaced_by = BROUGHT.get(exercise.name, {exercise.replaces: _called_alike})
    return {
        mistake.name: replaced_by[mistake.part](mistake, exercise)
        for mistake in TRAINING
        if mistake.part in replaced_by
    }


def _called_alike(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Call the wrong function as llorch calls the right one: arrays by position, settings by name."""
    wrong, names = mistake.wrong(exercise.reference), inspect.signature(exercise.reference)

    def typed(*given: Any, **named: Any) -> Any:
        arguments = names.bind(*given, **named).arguments
        arrays = [value for value in arguments.values() if isinstance(value, Array)]
        settings = {name: value for name, value in arguments.items() if not isinstance(value, Array)}
        return wrong(*arrays, **settings)

    return typed


def _rate(mistake: Mistake[Any], exercise: Exercise) -> Call:
    return mistake.wrong(exercise.reference)


def _wrong_scaling(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Make a configuration of the settings, in which one matrix may have its own rank and alpha."""

    def right(config: LoraConfig, target: Any) -> float:
        own = {"own_r": config.rank_of(target), "own_alpha": config.alpha_of(target)}
        return exercise.reference(r=config.r, lora_alpha=config.lora_alpha, use_rslora=config.use_rslora, **own)

    def lora_scaling(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool) -> float:
        config = LoraConfig(
            r=r, lora_alpha=lora_alpha, use_rslora=use_rslora, rank_pattern={} if own_r is None else {"own": own_r},
            alpha_pattern={} if own_alpha is None else {"own": own_alpha},
        )  # fmt: skip
        return mistake.wrong(right)(config, SimpleNamespace(path="own"))

    return lora_scaling


def _labels(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def masked_labels(ids: Array, learned: Array) -> Array:
        documents = mistake.wrong(lambda batch: [(ids, exercise.reference(ids=ids, learned=learned))])
        return next(iter(documents(None)))[1]

    return masked_labels


def _beside_matrix(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Send the gradient through the frozen matrix as well, which the row is not about."""

    def lora_backward(
        grad: Array, x: Array, weight: Array, lora_A: Array, lora_B: Array, scaling: float
    ) -> tuple[Array, Array, Array]:
        d_x, d_A, d_B = mistake.wrong(our_lora_backward)(grad, x, lora_A, lora_B, scaling=scaling)
        return linear_backward(grad, weight) + d_x, d_A, d_B

    return lora_backward


def _wrong_lora_backward(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Make the backward pass of a LoRA matrix that has a mistake, with the parameters of the exercise."""

    def lora_backward(
        grad: Array, x: Array, weight: Array, lora_A: Array, lora_B: Array, scaling: float
    ) -> tuple[Array, Array, Array]:
        def right(matrix: Any, grad: Array, x: Array) -> tuple[Array, dict[str, Array]]:
            d_x, d_A, d_B = exercise.reference(grad, x, weight, lora_A, lora_B, scaling)
            return d_x, {"lora_A": d_A, "lora_B": d_B}

        d_x, trained = mistake.wrong(right)(SimpleNamespace(base=weight), grad, x)
        return d_x, trained["lora_A"], trained["lora_B"]

    return lora_backward


def _residual(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def residual_backward(grad: Array, through: Array) -> Array:
        return mistake.wrong(lambda d_out: exercise.reference(grad=d_out, through=through))(grad)

    return residual_backward


def _clip(mistake: Mistake[Any], exercise: Exercise) -> Call:
    wrong = mistake.wrong(our_clip_by_norm)

    def clip_by_norm(grads: Mapping[str, Array], max_norm: float) -> tuple[Array, float]:
        clipped, norm = wrong(grads, max_norm=max_norm)
        return in_one_row(clipped), norm

    return clip_by_norm


def _step(mistake: Mistake[Any], exercise: Exercise) -> Call:
    return _with_betas(mistake.wrong(our_adamw_step))


def _inside_step(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Put a wrong function into llorch's step, with the wrong function that belongs to it."""
    rows = [(mistake.part, mistake.wrong), *([mistake.along] if mistake.along else [])]
    made = [(function, instead(wrong(getattr(*owner_of(function))))) for function, wrong in rows]  # once: some count

    def step(*arrays: Array, **how: Any) -> tuple[Array, ...]:
        with ExitStack() as planting:
            for function, wrong in made:
                planting.enter_context(replaced(function, wrong))
            return our_adamw_step(*arrays, **how)

    return _with_betas(step)


def _with_betas(wrong: Call) -> Call:
    def adamw_step(
        param: Array, grad: Array, m: Array, v: Array, step: int, lr: float, beta1: float, beta2: float, eps: float,
        weight_decay: float,
    ) -> tuple[Array, ...]:  # fmt: skip
        how = {"step": step, "lr": lr, "eps": eps, "weight_decay": weight_decay}
        return wrong(param, grad, m, v, betas=(beta1, beta2), **how)

    return adamw_step


def _accumulated(mistake: Mistake[Any], exercise: Exercise) -> Call:
    """Take the sums of each micro-batch for the batches of a step."""

    def accumulated(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
        def right(weights: Any, adapter: Any, batches: list[int], **how: Any) -> tuple[float, dict[str, Array]]:
            loss, grad = exercise.reference(loss_sums[batches], n_trained[batches], grad_sums[batches])
            return loss, {"all": grad}

        loss, grads = mistake.wrong(right)(None, None, [*range(len(n_trained))])
        return loss, grads["all"]

    return accumulated


def _wrong_merge(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def merged(weight: Array, lora_A: Array, lora_B: Array, scaling: float) -> Array:
        wrong = mistake.wrong(lambda weight, adapter, name: exercise.reference(weight, lora_A, lora_B, scaling))
        return wrong(weight, SimpleNamespace(scaling=lambda name: scaling), "")

    return merged


def _alpha(mistake: Mistake[Any], exercise: Exercise) -> Call:
    def gguf_alpha(lora_alpha: float, scalings: Array, ranks: Array) -> float:
        adapter = SimpleNamespace(config=SimpleNamespace(lora_alpha=lora_alpha))
        return mistake.wrong(lambda adapter: exercise.reference(lora_alpha, scalings, ranks))(adapter)

    return gguf_alpha


ADAMW, LORA = "llorch.training.adamw.", "llorch.ops.lora."
BROUGHT: Mapping[str, Mapping[str, Brought]] = {  # exercise -> function of llorch that a row replaces -> how
    "lora_scaling": {"llorch.lora.config.LoraConfig.scaling_of": _wrong_scaling},
    "masked_labels": {"llorch.training.batch.Batch.each_document": _labels},
    "lora_backward": {LORA + "lora_backward": _beside_matrix, LORA + "LoraMatrix.backward": _wrong_lora_backward},
    "residual_backward": {"llorch.model.backward.block_backward": _residual},
    "clip_by_norm": {ADAMW + "clip_by_norm": _clip},
    "adamw_step": {ADAMW + "adamw_step": _step, ADAMW + "moved": _inside_step, ADAMW + "moments": _inside_step},
    "learning_rate": {"llorch.training.schedules.learning_rate": _rate},
    "accumulated": {"llorch.training.numpy_step.loss_and_gradients": _accumulated},
    "merged": {"llorch.lora.merge.merged_matrix": _wrong_merge},
    "gguf_alpha": {"llorch.lora.gguf_format.common_alpha": _alpha},
}
