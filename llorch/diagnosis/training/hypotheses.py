"""Hypotheses that may explain a training dump: known mistakes, and settings with a recovered value.

A *group* is a quantity of a step (`FLOW`, in order), such as `gradient` or `clipped`. The *parts* of a step are its
forward pass with the loss (`shown`) and its gradients (`back`): a mistake may be in one of them only.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llorch.diagnosis.attempt import Hypothesis, SettingFamily
from llorch.diagnosis.mistakes import MISTAKES, TRAINING, Mistake
from llorch.diagnosis.mistakes.mistake import training_mistake
from llorch.diagnosis.mistakes.planting import Function, Replacement
from llorch.diagnosis.mistakes.training_adapter import SCALING, left_out
from llorch.diagnosis.mistakes.training_gradients import GRADIENT, left_at_zero
from llorch.diagnosis.mistakes.training_loss import BACK, DOCUMENTS, LOSS, STEP, divided_by_share, set_smoothing
from llorch.diagnosis.mistakes.training_mesh import MESH, rows_of_batch
from llorch.diagnosis.mistakes.training_optimizer import CLIP
from llorch.diagnosis.mistakes.training_optimizer import STEP as UPDATE
from llorch.diagnosis.mistakes.training_packing import PACKING
from llorch.diagnosis.training.replay import FLOW, InjectedMistake, StepPart
from llorch.engines.dumps.training_dump import Settings, TrainingDump, TrainingStep
from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.lora.adapter import Adapter
from llorch.lora.config import LAYER_TARGETS
from llorch.training.batch import PADDING, Batch

IN_FLOW = {"lora_delta": "adapted_logits", "loss_curve": "loss"}  # group of the table -> group in a dump
OUTSIDE = {  # first stage of a mistake -> reason why a training step cannot have the mistake
    "merged_weight": "a training step does not merge", "adapter_file": "a training step writes no files",
    "learning_rate": "a dump has the learning rate of every step, not the schedule",
}  # fmt: skip
RANDOM = ("lora-dropout-at-evaluation",)  # its random numbers cannot be reproduced
IN_FORWARD = FLOW[:3]  # logits, token losses, loss
BLOCKS = {"attention": LAYER_TARGETS[:4], "the feed-forward": LAYER_TARGETS[4:]}  # part of a layer -> its matrices
NOT_APPLIED = ("lora-delta-missing", "lora-partly-applied")  # gradients alone cannot show these
AFTER_CLIPPING = "gradients-after-clipping"  # hypothesis: the dump's gradients are named wrongly
MakeMistake = Callable[[float], Mistake[Any]]
Describe = Callable[[float], tuple[str, str]]  # value -> sentence and short form


def group_of(mistake: Mistake[Any]) -> str:
    """Return the group in which a mistake shows first."""
    stage = mistake.stages[0]
    if mistake.part == CLIP:
        return "grad_norm" if stage == "grad_norm" else "clipped"
    if mistake.part == DOCUMENTS and stage == "token_losses":  # masked labels have no token loss
        return "loss"
    return IN_FLOW.get(stage, stage)


def possible_mistakes(config: ModelConfig) -> list[Mistake[Any]]:
    """List the known mistakes that a step of a model can have and that llorch can reproduce."""
    # `MORE` has the mistakes in DIVISORS, for a whole step.
    replayed = (m for m in TRAINING if m.stages[0] not in OUTSIDE and m.name not in (*RANDOM, *DIVISORS))
    return [m for m in (*replayed, *MORE) if m.applies_to(config)]


def list_hypotheses(
    config: ModelConfig, adapter: Adapter, dump: TrainingDump, ran_since: Collection[str], wrong: str
) -> Iterator[Hypothesis]:
    """Yield the known mistakes that may explain a wrong group, once for each part of a step."""
    packing = PACKING if may_see_each_other(dump, config) else ()
    for mistake in (*possible_mistakes(config), *MESH, *packing, *partly_applied(adapter)):
        group = group_of(mistake)
        for injected in injections(mistake, group in ran_since, wrong):
            yield _hypothesis(injected)


def _hypothesis(injected: InjectedMistake) -> Hypothesis:
    mistake = injected.mistake
    return Hypothesis(mistake.name, "mistake", mistake.stages, mistake.diagnosis, injected)


def may_see_each_other(dump: TrainingDump, config: ModelConfig) -> bool:
    """Tell if a row of a dump has two documents; no row may be longer than the model's context."""
    batches = [batch for step in dump.steps for batch in step.batches]
    longest = max((batch.ids.shape[1] for batch in batches), default=0)
    has_packed_row = any((batch.documents > 0).any() for batch in batches)
    return has_packed_row and longest <= config.max_position_embeddings


def partly_applied(adapter: Adapter) -> Iterator[Mistake[Any]]:
    """Yield the mistakes of an adapter that is not applied to the matrices of one kind, block or layer."""
    parts: dict[str, set[str]] = {}
    for name in adapter.targets:
        layer, _, kind = name.rpartition(".")
        blocks = [block for block, kinds in BLOCKS.items() if kind in kinds]
        for part in (kind, *blocks, *([f"layer {layer.split('.')[1]}"] if layer else [])):
            parts.setdefault(part, set()).add(name)
    for part, names in parts.items():
        if len(names) < len(adapter.targets):
            diagnosis = f"The adapter of {part} is not applied."
            yield training_mistake("lora-partly-applied", ("lora_delta",), SCALING, left_out(names), diagnosis)
    if any(target.is_embedding for target in adapter.targets.values()):  # the known mistake leaves it applied
        missing = MISTAKES["lora-delta-missing"]
        yield replace(missing, part=SCALING, wrong=left_out(adapter.targets), along=None)


def zero_gradients(names: Sequence[str]) -> Hypothesis:
    """Make the hypothesis that the gradients of some tensors are exactly 0."""
    others = f", like those of {len(names) - 1} other tensors" if len(names) > 1 else ""
    diagnosis = (
        f"The gradient of {names[0]} is exactly 0{others}: the tensor is frozen, its adapter is not applied, or the "
        "graph is cut."
    )
    mistake = training_mistake("gradient-exactly-zero", GRADIENT, STEP, left_at_zero(names), diagnosis)
    return _hypothesis(InjectedMistake(mistake))


def injections(mistake: Mistake[Any], in_gap: bool, wrong: str) -> Iterator[InjectedMistake]:
    """Yield the injections of a mistake that may explain a wrong group.

    `in_gap` is True if the mistake's group was computed since the last right quantity.
    """
    with_along = (True, False) if mistake.along else (False,)
    if group_of(mistake) not in IN_FORWARD:
        yield from (InjectedMistake(mistake, "both", along) for along in with_along if in_gap)
    elif in_gap:
        yield from (InjectedMistake(mistake, "both", along) for along in with_along)
        if wrong in IN_FORWARD:
            yield InjectedMistake(mistake, "shown")
    if group_of(mistake) in IN_FORWARD and wrong == "gradient" and mistake.name not in NOT_APPLIED:
        yield from (InjectedMistake(mistake, "back", along) for along in with_along)


def setting_families(
    dump: TrainingDump, step: TrainingStep, scale: float, norm: float, ran_since: Collection[str], wrong: str
) -> Iterator[SettingFamily]:
    """Yield the settings that may differ, once for each part of a step that they may differ in.

    `scale` is the adapter's scaling, `norm` the norm of the step's gradients, `ran_since` has the groups computed since
    the last right one, and `wrong` is the group of the wrong quantity.
    """
    for name, group, values, mistake, describe, setting, largest in _settings(dump.settings, step.lr, scale, norm):
        is_declared = not setting or setting in dump.declared
        for step_part in _step_parts(group, wrong):
            make = partial(_with_value, name, group, mistake, describe, step_part, is_declared)
            if name == "loss-normalisation" and step_part == "back":
                make = partial(_scaled_gradients, group, dump.settings.max_grad_norm, norm)
            if group in ran_since or step_part == "back":
                yield SettingFamily(name, (group,), values, make, largest=largest)


def _settings(
    settings: Settings, lr: float, scale: float, norm: float
) -> list[tuple[str, str, Sequence[float], MakeMistake, Describe, str, float]]:
    """List name, group, first values, mistake, description, field of `Settings` and largest value of each setting.

    Betas are fitted as 1 - beta. The first max_grad_norm is below the norm, because clipping above it has no effect.
    """
    beta1, beta2 = settings.betas
    return [
        ("lora-scaling", "adapted_logits", (0.5, 2.0, 8.0), scale_adapter, lambda x: (
            f"The adapter's product is multiplied by {scale * x:.4g} here; its configuration gives {scale:.4g}.",
            f"{scale * x:.4g}"), "", math.inf),
        ("label-smoothing", "token_losses", (0.1,), smooth_labels,
         describe_value("label smoothing", settings.label_smoothing), "label_smoothing", 1.0),
        ("loss-normalisation", "loss", (1.0,), scale_loss, lambda x: (
            f"The loss is {x:.6g} times the right one in every step.", f"{x:.6g}"), "", math.inf),
        ("max-grad-norm", "clipped", (0.9 * min(norm, settings.max_grad_norm),), change_clipping,
         describe_value("max_grad_norm", settings.max_grad_norm), "max_grad_norm", math.inf),
        ("adamw-beta1", "first_moment", (1 - beta1,), lambda x: change_update(betas=(1 - x, beta2)),
         describe_value("beta1", beta1, lambda x: 1 - x), "betas", 1.0),
        ("adamw-beta2", "second_moment", (1 - beta2,), lambda x: change_update(betas=(beta1, 1 - x)),
         describe_value("beta2", beta2, lambda x: 1 - x), "betas", 1.0),
        ("learning-rate", "parameters", (settings.lr,), lambda x: change_update(lr=x),
         describe_value("the learning rate", lr), "lr", math.inf),
        ("adamw-weight-decay", "parameters", (0.01, 1.0), lambda x: change_update(weight_decay=x),
         describe_value("weight_decay", settings.weight_decay), "weight_decay", math.inf),
        ("adamw-eps", "parameters", (1e-8, 1e-6, 1e-4, 1e-10), lambda x: change_update(eps=x),
         describe_value("eps", settings.eps), "eps", math.inf),
    ]  # fmt: skip


def _with_value(
    name: str, group: str, mistake: MakeMistake, describe: Describe, part: StepPart, is_declared: bool, value: float
) -> Hypothesis:
    """Make the hypothesis that a setting has a value; of kind rounding if the dump does not declare the setting."""
    sentence, short_form = describe(value)
    injected = InjectedMistake(mistake(value), part, along=True)
    if is_declared:
        return Hypothesis(name, "setting", (group,), sentence, injected, short_form)
    return Hypothesis(name, "rounding", (group,), f"{sentence} The dump does not declare it.", injected, short_form)


def _scaled_gradients(group: str, max_norm: float, norm: float, factor: float) -> Hypothesis:
    """Make the hypothesis that all gradients are a multiple of the right ones: already clipped, or scaled."""
    injected, short_form = InjectedMistake(scale_loss(factor), "back", along=True), f"{factor:.6g}"
    if norm > max_norm and math.isclose(factor, max_norm / norm, rel_tol=1e-3):
        sentence = "These are the gradients after clipping; name them `clipped.`, or dump them before clipping."
        return Hypothesis(AFTER_CLIPPING, "rounding", (group,), sentence, injected, short_form)
    sentence = f"All gradients are {factor:.6g} times the gradients of the dumped loss."
    return Hypothesis("gradient-scale", "setting", (group,), sentence, injected, short_form)


def _step_parts(group: str, wrong: str) -> tuple[StepPart, ...]:
    """List the parts of a step in which a setting may differ."""
    if group not in IN_FORWARD:
        return ("both",)
    return ("both", "shown") if wrong in IN_FORWARD else ("back",) if wrong == "gradient" else ()


def describe_value(
    name: str, right: float, convert: Callable[[float], float] = float
) -> Callable[[float], tuple[str, str]]:
    """Make a function that describes a recovered value and the right value."""

    def describe(x: float) -> tuple[str, str]:
        return f"{name[0].upper()}{name[1:]} is {convert(x):.4g} here; it should be {right:.4g}.", f"{convert(x):.4g}"

    return describe


def scale_adapter(factor: float) -> Mistake[Any]:
    """Multiply every scale of the adapter by a factor."""
    return training_mistake(
        "lora-scaling", ("lora_delta",), SCALING, lambda right: lambda *args: right(*args) * factor, ""
    )


def smooth_labels(share: float) -> Mistake[Any]:
    """Use another label smoothing."""
    wrong = set_smoothing(share)
    return training_mistake("label-smoothing", ("token_losses",), LOSS, wrong, "", along=(BACK, wrong))


def scale_loss(factor: float) -> Mistake[Any]:
    """Multiply the loss of a step and its gradients by a factor."""
    return training_mistake("loss-normalisation", ("loss",), STEP, multiply_loss(lambda batches: factor), "")


def change_clipping(max_norm: float) -> Mistake[Any]:
    """Clip gradients at another norm."""
    return training_mistake(
        "max-grad-norm", ("first_moment",), CLIP, lambda right: lambda grads, **_: right(grads, max_norm=max_norm), ""
    )


def change_update(**changes: Any) -> Mistake[Any]:
    """Use other settings of AdamW."""
    stage = "first_moment" if "betas" in changes else "parameters"
    return training_mistake(
        "adamw", (stage,), UPDATE, lambda right: lambda *arrays, **kwargs: right(*arrays, **kwargs | changes), ""
    )


def split_rows(batches: Sequence[Batch]) -> list[list[Batch]]:
    """Split batches into batches of one row; skip rows of padding."""
    return [
        [rows_of_batch(batch, [i])]
        for batch in batches
        for i in range(len(batch.ids))
        if (batch.documents[i] != PADDING).any()
    ]


def swap_rslora(right: Function) -> Function:
    """Divide alpha by the rank instead of its square root, or vice versa."""
    return lambda config, target: right(replace(config, use_rslora=not config.use_rslora), target)


def multiply_loss(factor_of: Callable[[Sequence[Batch]], float]) -> Replacement:
    """Make the replacement that multiplies loss and gradients of a step by a factor computed from its batches."""

    def make(right: Function) -> Function:
        def wrong(weights: Weights, adapter: Adapter, batches: Sequence[Batch], **kw: object) -> tuple[float, Mapping]:
            loss, grads = right(weights, adapter, batches, **kw)
            factor = factor_of(batches)
            return loss * factor, {name: grad * factor for name, grad in grads.items()}

        return wrong

    return make


def divide_loss(count: Callable[[Sequence[Batch]], int]) -> Replacement:
    """Make the replacement that divides the loss sum of a step by another count than the tokens in the loss."""
    return multiply_loss(lambda batches: sum(batch.n_trained for batch in batches) / count(batches))


def _n_slots(batches: Sequence[Batch]) -> int:
    """Count the positions of all rows, padding included."""
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
    "loss-divided-by-slots": ("by all tokens and padding", _n_slots),
    "loss-divided-by-shifted-slots": (
        "by all tokens and padding but the first of each row",
        lambda b: _n_slots(b) - _n_rows(b),
    ),
    "loss-divided-by-rows": ("by the number of rows", _n_rows),
    "loss-summed": ("by nothing", lambda batches: 1),
}
MORE = (  # known mistakes that are in no lesson
    training_mistake("lora-rslora-not-asked-for", ("lora_delta",), SCALING, swap_rslora,
        "Alpha was divided by the root of the rank; without use_rslora it is divided by the rank."),
    training_mistake("loss-mean-of-rows", ("loss",), STEP, divided_by_share(split_rows),
        "Each row was divided by its own tokens and the means were averaged; the sum over the whole step is divided "
        "once, by all its learned tokens."),
    *(training_mistake(name, ("loss",), STEP, divide_loss(count),
        f"The sum of the losses was divided {divisor}; it is divided by the learned tokens of the step.")
      for name, (divisor, count) in DIVISORS.items()),
)  # fmt: skip
