"""Hypotheses that may explain a training dump: known mistakes, and settings with a recovered value."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llorch.diagnosis.attempt import Hypothesis, SettingFamily
from llorch.diagnosis.mistakes import TRAINING, Mistake
from llorch.diagnosis.mistakes.mistake import training_mistake
from llorch.diagnosis.mistakes.training_adapter import SCALING
from llorch.diagnosis.mistakes.training_loss import BACK, DOCUMENTS, LOSS, STEP, Function, divided_by_share
from llorch.diagnosis.mistakes.training_mesh import MESH, rows_of_batch
from llorch.diagnosis.mistakes.training_optimizer import CLIP
from llorch.diagnosis.mistakes.training_optimizer import STEP as UPDATE
from llorch.diagnosis.training.replay import FLOW, InjectedMistake, Where
from llorch.engines.dumps.training_dump import Settings, TrainingDump, TrainingStep
from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.lora.adapter import Adapter
from llorch.training.batch import PADDING, Batch

IN_FLOW = {"lora_delta": "adapted_logits", "loss_curve": "loss"}  # group of the table -> the one that a dump shows
OUTSIDE = {  # mistakes that no step makes, by the first of their stages
    "merged_weight": "a training step does not merge", "adapter_file": "a training step writes no files",
    "learning_rate": "a dump has the learning rate of every step, not the schedule",
}  # fmt: skip
RANDOM = ("lora-dropout-at-evaluation",)  # makes numbers that nobody can make again
IN_FORWARD = FLOW[:3]
AFTER_CLIPPING = "gradients-after-clipping"
MakeMistake = Callable[[float], Mistake[Any]]
Describe = Callable[[float], tuple[str, str]]  # of a number: its meaning, and its short form


def group_of(mistake: Mistake[Any]) -> str:
    """Return the quantity of a step in which a mistake shows first."""
    first = mistake.stages[0]
    if mistake.part == CLIP:
        return "grad_norm" if first == "grad_norm" else "clipped"
    return "loss" if mistake.part == DOCUMENTS else IN_FLOW.get(first, first)  # losses are compared where one learns


def possible(config: ModelConfig) -> list[Mistake[Any]]:
    """List the known mistakes that a step of a model can have and that can be made again."""
    replayed = (m for m in TRAINING if m.stages[0] not in OUTSIDE and m.name not in (*RANDOM, *DIVISORS))
    return [m for m in (*replayed, *MORE) if m.applies_to(config)]


def known(config: ModelConfig, ran_since: Collection[str], wrong: str) -> Iterator[Hypothesis]:
    """Yield the known mistakes of the quantities of which one is wrong, in every way in which they can be made."""
    for mistake in (*possible(config), *MESH):
        group = group_of(mistake)
        for injected in ways(mistake, group in ran_since, wrong):
            yield Hypothesis(mistake.name, "mistake", mistake.stages, mistake.diagnosis, injected)


def ways(mistake: Mistake[Any], in_gap: bool, wrong: str) -> Iterator[InjectedMistake]:
    """Yield the parts of a step in which a mistake may be made, if the quantities before the gap are right."""
    backs = (True, False) if mistake.along else (False,)
    if group_of(mistake) not in IN_FORWARD:
        yield from (InjectedMistake(mistake, "both", along) for along in backs if in_gap)
    elif in_gap:
        yield from (InjectedMistake(mistake, "both", along) for along in backs)
        if wrong in IN_FORWARD:
            yield InjectedMistake(mistake, "shown")
    if group_of(mistake) in IN_FORWARD and wrong == "gradient":
        yield from (InjectedMistake(mistake, "back", along) for along in backs)


def setting_families(
    dump: TrainingDump, step: TrainingStep, scale: float, norm: float, ran_since: Collection[str], wrong: str
) -> Iterator[SettingFamily]:
    """Yield the numbers that may differ, once for each part of a step in which they may.

    `scale` is that of the adapter, `norm` that of the step's gradients; `ran_since` are the groups made since the last
    right one, `wrong` the group of the wrong quantity.
    """
    for name, group, values, mistake, describe, setting, most in _settings(dump.settings, step.lr, scale, norm):
        is_declared = not setting or setting in dump.said
        for where in _where_of(group, wrong):
            make = partial(_with_value, name, group, mistake, describe, where, is_declared)
            if name == "loss-normalisation" and where == "back":
                make = partial(_scaled_gradients, group, dump.settings.max_grad_norm, norm)
            if group in ran_since or where == "back":
                yield SettingFamily(name, (group,), values, make, most=most)


def _settings(
    settings: Settings, lr: float, scale: float, norm: float
) -> list[tuple[str, str, Sequence[float], MakeMistake, Describe, str, float]]:
    """List name, group, first values, mistake, meaning, field of `Settings` and largest value of each number."""
    beta1, beta2 = settings.betas
    return [
        ("lora-scaling", "adapted_logits", (0.5, 2.0, 8.0), scaled, lambda x: (
            f"The adapter's product is multiplied by {scale * x:.4g} here; its configuration gives {scale:.4g}.",
            f"{scale * x:.4g}"), "", math.inf),
        ("label-smoothing", "token_losses", (0.1,), smoothed, told("label smoothing", settings.label_smoothing),
         "label_smoothing", 1.0),
        ("loss-normalisation", "loss", (1.0,), loss_times, lambda x: (
            f"The loss is {x:.6g} times the right one in every step.", f"{x:.6g}"), "", math.inf),
        ("max-grad-norm", "clipped", (0.9 * min(norm, settings.max_grad_norm),), in_clip,
         told("max_grad_norm", settings.max_grad_norm), "max_grad_norm", math.inf),
        ("adamw-beta1", "first_moment", (1 - beta1,), lambda x: in_update(betas=(1 - x, beta2)),
         told("beta1", beta1, lambda x: 1 - x), "betas", 1.0),
        ("adamw-beta2", "second_moment", (1 - beta2,), lambda x: in_update(betas=(beta1, 1 - x)),
         told("beta2", beta2, lambda x: 1 - x), "betas", 1.0),
        ("learning-rate", "parameters", (settings.lr,), lambda x: in_update(lr=x),
         told("the learning rate", lr), "lr", math.inf),
        ("adamw-weight-decay", "parameters", (0.01, 1.0), lambda x: in_update(weight_decay=x),
         told("weight_decay", settings.weight_decay), "weight_decay", math.inf),
        ("adamw-eps", "parameters", (1e-8, 1e-6, 1e-4, 1e-10), lambda x: in_update(eps=x),
         told("eps", settings.eps), "eps", math.inf),
    ]  # fmt: skip


def _with_value(
    name: str, group: str, mistake: MakeMistake, describe: Describe, where: Where, is_declared: bool, value: float
) -> Hypothesis:
    """Make the hypothesis that a number has a value; it is no mistake if the dump does not declare the setting."""
    sentence, shown = describe(value)
    injected = InjectedMistake(mistake(value), where, along=True)
    if is_declared:
        return Hypothesis(name, "setting", (group,), sentence, injected, shown)
    return Hypothesis(name, "rounding", (group,), f"{sentence} The dump does not declare it.", injected, shown)


def _scaled_gradients(group: str, largest: float, norm: float, factor: float) -> Hypothesis:
    """Make the hypothesis that all gradients are a multiple of the right ones: clipped already, or scaled."""
    injected, shown = InjectedMistake(loss_times(factor), "back", along=True), f"{factor:.6g}"
    if norm > largest and math.isclose(factor, largest / norm, rel_tol=1e-3):
        sentence = "These are the gradients after clipping; name them `clipped.`, or dump them before clipping."
        return Hypothesis(AFTER_CLIPPING, "rounding", (group,), sentence, injected, shown)
    sentence = f"All gradients are {factor:.6g} times the gradients of the dumped loss."
    return Hypothesis("gradient-scale", "setting", (group,), sentence, injected, shown)


def _where_of(group: str, wrong: str) -> tuple[Where, ...]:
    """List the parts of a step in which a number may differ."""
    if group not in IN_FORWARD:
        return ("both",)
    return ("both", "shown") if wrong in IN_FORWARD else ("back",) if wrong == "gradient" else ()


def told(what: str, right: float, shown: Callable[[float], float] = float) -> Callable[[float], tuple[str, str]]:
    """Make a function that describes a recovered number and its right value."""

    def say(x: float) -> tuple[str, str]:
        return f"{what[0].upper()}{what[1:]} is {shown(x):.4g} here; it should be {right:.4g}.", f"{shown(x):.4g}"

    return say


def scaled(factor: float) -> Mistake[Any]:
    """Multiply every scale of the adapter by a factor."""
    return training_mistake(
        "lora-scaling", ("lora_delta",), SCALING, lambda right: lambda *given: right(*given) * factor, ""
    )


def smoothed(share: float) -> Mistake[Any]:
    """Use another label smoothing."""

    def wrong(right: Function) -> Function:
        return lambda logits, labels, **how: right(logits, labels, **how | {"label_smoothing": share})

    return training_mistake("label-smoothing", ("token_losses",), LOSS, wrong, "", along=(BACK, wrong))


def loss_times(factor: float) -> Mistake[Any]:
    """Multiply the loss of a step and its gradients by a factor."""
    return training_mistake("loss-normalisation", ("loss",), STEP, multiplied(lambda batches: factor), "")


def in_clip(max_norm: float) -> Mistake[Any]:
    """Use another largest norm."""
    return training_mistake(
        "max-grad-norm", ("first_moment",), CLIP, lambda right: lambda grads, **_: right(grads, max_norm=max_norm), ""
    )


def in_update(**other: Any) -> Mistake[Any]:
    """Use other settings of AdamW."""
    stage = "first_moment" if "betas" in other else "parameters"
    return training_mistake(
        "adamw", (stage,), UPDATE, lambda right: lambda *arrays, **how: right(*arrays, **how | other), ""
    )


def rows_one_by_one(batches: Sequence[Batch]) -> list[list[Batch]]:
    """Make a share of every row that has tokens."""
    return [
        [rows_of_batch(batch, [i])]
        for batch in batches
        for i in range(len(batch.ids))
        if (batch.documents[i] != PADDING).any()
    ]


def rslora_turned(right: Function) -> Function:
    """Divide alpha by the rank instead of its root, or the other way round."""
    return lambda config, target: right(replace(config, use_rslora=not config.use_rslora), target)


def multiplied(factor_of: Callable[[Sequence[Batch]], float]) -> Function:
    """Multiply the loss of a step and its gradients by a factor that its batches give."""

    def make(right: Function) -> Function:
        def wrong(weights: Weights, adapter: Adapter, batches: Sequence[Batch], **how: object) -> tuple[float, Mapping]:
            loss, grads = right(weights, adapter, batches, **how)
            factor = factor_of(batches)
            return loss * factor, {name: grad * factor for name, grad in grads.items()}

        return wrong

    return make


def divided(count: Callable[[Sequence[Batch]], int]) -> Function:
    """Divide the sum of a step by another number than its learned tokens."""
    return multiplied(lambda batches: sum(batch.n_trained for batch in batches) / count(batches))


def _slots(batches: Sequence[Batch]) -> int:
    """Count the places for tokens in all rows, padding included."""
    return sum(batch.ids.size for batch in batches)


def _n_tokens(batches: Sequence[Batch]) -> int:
    """Count the tokens of all batches without padding."""
    return sum(int((batch.documents != PADDING).sum()) for batch in batches)


def _n_rows(batches: Sequence[Batch]) -> int:
    return sum(len(batch.ids) for batch in batches)


DIVISORS: Mapping[str, tuple[str, Callable[[Sequence[Batch]], int]]] = {
    "loss-divided-by-all-tokens": ("by all tokens", _n_tokens),
    "loss-divided-by-all-rows-of-logits": (
        "by all tokens but the first of each row",
        lambda b: _n_tokens(b) - _n_rows(b),
    ),
    "loss-divided-by-slots": ("by all tokens and padding", _slots),
    "loss-divided-by-shifted-slots": (
        "by all tokens and padding but the first of each row",
        lambda b: _slots(b) - _n_rows(b),
    ),
    "loss-divided-by-rows": ("by the number of rows", _n_rows),
    "loss-summed": ("by nothing", lambda batches: 1),
}
MORE = (  # known, but in no checkpoint's library
    training_mistake("lora-rslora-not-asked-for", ("lora_delta",), SCALING, rslora_turned,
        "Alpha was divided by the root of the rank; without use_rslora it is divided by the rank."),
    training_mistake("loss-mean-of-rows", ("loss",), STEP, divided_by_share(rows_one_by_one),
        "Each row was divided by its own tokens and the means were averaged; the sum over the whole step is divided "
        "once, by all its learned tokens."),
    *(training_mistake(name, ("loss",), STEP, divided(count),
        f"The sum of the losses was divided {said}; it is divided by the learned tokens of the step.")
      for name, (said, count) in DIVISORS.items()),
)  # fmt: skip
