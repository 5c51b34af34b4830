"""llorch's optimizer steps in float64 on the arrays of a training dump, with mistakes injected into functions.

If `fed`, llorch computes every quantity from the dump's inputs if it has them: the loss from its token losses, the norm
and the moments from its gradients, the parameters from its moments, the next step from its parameters. llorch computes
missing inputs itself. If not `fed`, only the adapter and the tokens come from the dump. `TrainingStep.shown` has the
dump's arrays of a step.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from llorch.diagnosis.mistakes import Mistake
from llorch.diagnosis.mistakes.planting import Replacement, replace_all, replaced
from llorch.diagnosis.mistakes.training_loss import STEP
from llorch.engines.dumps.training_dump import Settings, StepArray, TrainingDump, TrainingStep
from llorch.files import Weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.ops.cross_entropy import IGNORED, cross_entropy, shifted
from llorch.training.adamw import adamw_step, clip_by_norm
from llorch.training.batch import Batch
from llorch.training.numpy_step import loss_and_gradients

StepPart = Literal["both", "shown", "back"]  # whole step, forward pass and loss only, gradients only
Arrays = dict[str, np.ndarray]
Key = tuple[int, str, str]  # number of the step, group of stages, tensor
FLOW = (
    "adapted_logits", "token_losses", "loss", "gradient", "grad_norm", "clipped", "first_moment", "second_moment",
    "parameters",
)  # fmt: skip
_Arguments = tuple[tuple[Adapter, Sequence[Batch]], dict[str, Any]]  # of `loss_and_gradients`, after the weights
STATE = ("parameters", "first_moment", "second_moment")
_TOKEN_GROUPS, _PASS_GROUPS = ("adapted_logits", "token_losses"), ("loss", "gradient")
_OPTIMIZER = "llorch.training.adamw."


@dataclass(frozen=True)
class InjectedMistake:
    """Mistake injected in a part of a step; with `along`, into a second function too, see `Mistake.along`."""

    mistake: Mistake[Any]
    step_part: StepPart = "both"
    along: bool = False

    @property
    def in_passes(self) -> bool:
        """True if the mistake changes the loss or the gradients."""
        return not self.mistake.part.startswith(_OPTIMIZER)

    @property
    def changes(self) -> list[tuple[str, Replacement]]:
        """Replaced functions of llorch, each with its replacement."""
        return self.mistake.changes(along=self.along)

    def is_made_in(self, step_part: str) -> bool:
        """Tell if the mistake is injected in a part of a step, or in its optimizer."""
        return self.in_passes == (step_part != "optimizer") and self.step_part in ("both", step_part)


class TrainingReplay:
    """Replay of the steps of one dump, with float64 weights."""

    def __init__(self, weights: Weights, adapter: Adapter, dump: TrainingDump) -> None:
        """Store the dump without computing anything."""
        self.weights, self.adapter, self.dump = weights, adapter, dump
        self.shows_tokens = any(group in _TOKEN_GROUPS for step in dump.steps for group, _ in step.shown)
        flat = {name: array.astype(np.float64) for name, array in adapter.flat().items()}
        zero = {name: np.zeros_like(array) for name, array in flat.items()}
        self._start = {group: flat if group == "parameters" else zero for group in STATE}
        self._complete_parameters = {step.number: {name: step.shown["parameters", name].array for name in flat}
                       for step in dump.steps if all(("parameters", name) in step.shown for name in flat)}  # fmt: skip
        self._memory: dict[Any, Any] = {}

    def run(
        self, mistakes: tuple[InjectedMistake, ...] = (), *, fed: bool = True, until: Key | None = None
    ) -> "ReplayedRun":
        """Run all steps, or those up to the step of `until`, with mistakes injected."""
        run, state = ReplayedRun(), self._start
        for step in self.dump.steps:
            if step.batches:
                state = self._step(run, step, state, mistakes, fed, until)
            if fed:
                state = {group: _merge(group, arrays, step.shown) for group, arrays in state.items()}
                # The same object in every run, because `_remembered` looks parameters up by id.
                state["parameters"] = self._complete_parameters.get(step.number, state["parameters"])
            if until is not None and step.number >= until[0]:
                break
        return run

    def _step(
        self, run: "ReplayedRun", step: TrainingStep, state: dict[str, Arrays],
        mistakes: tuple[InjectedMistake, ...], fed: bool, until: Key | None,
    ) -> dict[str, Arrays]:  # fmt: skip
        """Replay one optimizer step with mistakes, at least its groups up to `until`; return the last known state."""
        parameters, dumped = state["parameters"], step.shown if fed else {}
        run.record(step, "start", parameters)
        actual, computed = dumped.get(("token_losses", "")), np.zeros(0)
        if self.shows_tokens:
            logits, computed = self._remembered("tokens", step, parameters, mistakes)
            dumped_logits = dumped.get(("adapted_logits", ""))
            losses = computed if dumped_logits is None else self._recompute_losses(step, dumped_logits.array, mistakes)
            run.record(step, "adapted_logits", {"": logits})
            run.record(step, "token_losses", {"": losses})
        last = until[1] if until is not None and until[0] == step.number else ""
        if last in _TOKEN_GROUPS:
            return state
        loss, grads = self._remembered("gradients", step, parameters, mistakes)
        run.record(step, "loss", {"": np.asarray(loss if actual is None else _replace_losses(loss, computed, actual))})
        run.record(step, "gradient", grads)
        if last in _PASS_GROUPS:
            return state
        with _inject(mistakes, "optimizer"):
            return _optimizer(run, step, grads, state, dumped, self.dump.settings)

    def _remembered(
        self, array_kind: str, step: TrainingStep, parameters: Arrays, mistakes: tuple[InjectedMistake, ...]
    ) -> Any:
        """Call the method `_{array_kind}` for a step; cache its return value while the parameters are the same arrays.

        The oldest entry is dropped first, because logits may be large.
        """
        key = (array_kind, step.number, id(parameters), tuple(mistake for mistake in mistakes if mistake.in_passes))
        entry = self._memory.pop(key, None) or (parameters, getattr(self, f"_{array_kind}")(step, parameters, mistakes))
        self._memory[key] = entry  # holds the parameters too, so that their id is not reused
        if len(self._memory) > 6 * len(self.dump.steps):
            self._memory.pop(next(iter(self._memory)))
        return entry[1]

    def _tokens(self, step: TrainingStep, parameters: Arrays, mistakes: tuple[InjectedMistake, ...]) -> tuple:
        """Return logits and losses of all tokens of a step, with the mistakes injected."""
        with _inject(mistakes, "shown"):
            logits = self._logits(step, self._adapted(parameters))
            return logits, self._token_losses(step, logits)

    def _gradients(
        self, step: TrainingStep, parameters: Arrays, mistakes: tuple[InjectedMistake, ...]
    ) -> tuple[float, Arrays]:
        """Return loss and gradients of a step, with each mistake injected in its part of the step."""
        loss, grads = self._loss_and_gradients(step, parameters, mistakes, "shown")
        if any(mistake.step_part != "both" for mistake in mistakes):
            _, grads = self._loss_and_gradients(step, parameters, mistakes, "back")
        return loss, grads

    def _adapted(self, parameters: Arrays) -> Weights:
        return AdaptedWeights(self.weights, replace(self.adapter), parameters=parameters)  # a copy: no cached scaling

    def _loss_and_gradients(
        self, step: TrainingStep, parameters: Arrays, mistakes: tuple[InjectedMistake, ...], step_part: StepPart
    ) -> tuple[float, Arrays]:
        """Compute loss and gradients with mistakes; a mistake that wraps the whole step gets the right ones cached."""
        cached, arguments = nullcontext(), self._arguments(step, parameters)
        if {name for mistake in mistakes if mistake.is_made_in(step_part) for name, _ in mistake.changes} <= {STEP}:
            cached = replaced(STEP, _remember_answer(arguments, self._remembered("right", step, parameters, ())))
        with cached, _inject(mistakes, step_part):
            return loss_and_gradients(self.weights, *arguments[0], **arguments[1])

    def _right(self, step: TrainingStep, parameters: Arrays, _: tuple[InjectedMistake, ...]) -> tuple[float, Arrays]:
        """Compute loss and gradients without mistakes; like all methods for `_remembered`, it takes three arguments."""
        arguments = self._arguments(step, parameters)
        return loss_and_gradients(self.weights, *arguments[0], **arguments[1])

    def _arguments(self, step: TrainingStep, parameters: Arrays) -> _Arguments:
        keywords = {"parameters": parameters, "label_smoothing": self.dump.settings.label_smoothing}
        return (replace(self.adapter), step.batches), keywords  # a copy: no cached scaling

    def _logits(self, step: TrainingStep, weights: Weights) -> np.ndarray:
        logits = [
            forward(ids, weights, KVCache(weights.config, weights.dtype))
            for batch in step.batches
            for ids, _ in batch.each_document()
        ]
        return np.concatenate(logits)

    def _recompute_losses(
        self, step: TrainingStep, logits: np.ndarray, mistakes: tuple[InjectedMistake, ...]
    ) -> np.ndarray:
        with _inject(mistakes, "shown"):
            return self._token_losses(step, logits)

    def _token_losses(self, step: TrainingStep, logits: np.ndarray) -> np.ndarray:
        """Compute the loss of every row of logits; NaN where the label is masked."""
        smoothing = self.dump.settings.label_smoothing
        labels = np.concatenate([shifted(labels) for batch in step.batches for _, labels in batch.each_document()])
        losses = np.full(len(logits), np.nan)
        for row in np.flatnonzero(labels != IGNORED):
            row_slice = slice(row, row + 1)
            # Row by row, because `cross_entropy` returns a sum, and the number of tokens in the loss.
            losses[row], _ = cross_entropy(logits[row_slice], labels[row_slice], label_smoothing=smoothing)
        return losses


class ReplayedRun:
    """Arrays that a replay computed, by key."""

    def __init__(self) -> None:
        """Create a run without arrays."""
        self.arrays: dict[Key, np.ndarray] = {}

    def record(self, step: TrainingStep, group: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Store the arrays of a group of stages."""
        self.arrays |= {(step.number, group, name): array for name, array in arrays.items()}


def _optimizer(
    run: ReplayedRun, step: TrainingStep, grads: Arrays, state: Mapping[str, Arrays],
    dumped: Mapping[tuple[str, str], StepArray], settings: Settings,
) -> dict[str, Arrays]:  # fmt: skip
    """Clip the gradients and update the parameters, each from the dump's arrays if it has them."""
    clipped, norm = clip_by_norm(_merge("gradient", grads, dumped), max_norm=settings.max_grad_norm)
    run.record(step, "grad_norm", {"": np.asarray(norm)})
    run.record(step, "clipped", clipped)
    computed: dict[str, Arrays] = {group: {} for group in STATE}
    current = ""

    def record_moments(right: Callable[..., Any]) -> Callable[..., Any]:
        def moments(grad: np.ndarray, m: np.ndarray, v: np.ndarray, **kwargs: object) -> tuple[np.ndarray, ...]:
            arrays = dict(zip(STATE[1:], right(grad, m, v, **kwargs), strict=True))
            for group, array in arrays.items():
                computed[group][current] = array
            return tuple(_merge(group, {current: array}, dumped)[current] for group, array in arrays.items())

        return moments

    with replaced("llorch.training.adamw.moments", record_moments):
        for current, grad in _merge("clipped", clipped, dumped).items():
            computed["parameters"][current], *_ = adamw_step(
                state["parameters"][current], grad, state["first_moment"][current], state["second_moment"][current],
                step=step.number, lr=step.lr, betas=settings.betas, eps=settings.eps,
                weight_decay=settings.weight_decay,
            )  # fmt: skip
    for group in STATE:
        run.record(step, group, computed[group])
    return computed


def _merge(group: str, arrays: Mapping[str, np.ndarray], dumped: Mapping[tuple[str, str], StepArray]) -> Arrays:
    """Replace llorch's arrays by the dump's if the dump has them and they are finite."""
    replaced_arrays = {name: dumped[group, name].array for name in arrays if (group, name) in dumped}
    return {**arrays, **{name: array for name, array in replaced_arrays.items() if np.isfinite(array).all()}}


def _replace_losses(loss: float, llorch_losses: np.ndarray, dumped: StepArray) -> float:
    """Compute the loss as if the sum had used the dump's token losses."""
    assert dumped.rows is not None
    in_loss = ~np.isnan(llorch_losses)
    common = in_loss & dumped.rows
    return loss + float((dumped.array[common] - llorch_losses[common]).sum()) / int(in_loss.sum())


def _remember_answer(arguments: _Arguments, answer: tuple[float, Arrays]) -> Replacement:
    """Make a replacement that returns `answer` if its arguments are the very objects of `arguments`."""
    expected_args = [*arguments[0], *arguments[1].values()]

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def answering(weights: Weights, *args: object, **kwargs: object) -> tuple[float, Arrays]:
            actual_args = [*args, *(kwargs.get(name) for name in arguments[1])]
            is_same = all(actual is expected for actual, expected in zip(expected_args, actual_args, strict=True))
            return answer if is_same else right(weights, *args, **kwargs)

        return answering

    return make


def _inject(mistakes: tuple[InjectedMistake, ...], step_part: str) -> AbstractContextManager[None]:
    """Inject the mistakes of a part of the step."""
    return replace_all(change for mistake in mistakes if mistake.is_made_in(step_part) for change in mistake.changes)
