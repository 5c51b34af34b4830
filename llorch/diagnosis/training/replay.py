"""llorch's optimizer steps in float64 on the arrays of a training dump, with mistakes injected at given points.

Fed, every quantity is computed from the dump's inputs if the dump has them: the loss from its token losses, the norm
and the moments from its gradients, the parameters from its moments, the next step from its parameters. llorch computes
the inputs that the dump does not show. Not fed, only the adapter and the tokens are the dump's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from llorch.diagnosis.mistakes import Mistake
from llorch.diagnosis.mistakes.planting import Replacement, replaced, replaced_all
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

Where = Literal["both", "shown", "back"]  # the whole step, what it shows of its loss alone, its gradients alone
Named = dict[str, np.ndarray]
Key = tuple[int, str, str]  # number of the step, group of stages, tensor
FLOW = (
    "adapted_logits", "token_losses", "loss", "gradient", "grad_norm", "clipped", "first_moment", "second_moment",
    "parameters",
)  # fmt: skip
_Given = tuple[tuple[Adapter, Sequence[Batch]], dict[str, Any]]  # of `loss_and_gradients`, after the weights
STATE = ("parameters", "first_moment", "second_moment")
_OF_TOKENS, _OF_PASSES = ("adapted_logits", "token_losses"), ("loss", "gradient")
_OPTIMIZER = "llorch.training.adamw."


@dataclass(frozen=True)
class InjectedMistake:
    """A mistake, and in which part of a step it is made; `along`: with what mostly goes wrong with it."""

    mistake: Mistake[Any]
    where: Where = "both"
    along: bool = False

    @property
    def in_passes(self) -> bool:
        """True if the mistake changes the loss or the gradients."""
        return not self.mistake.part.startswith(_OPTIMIZER)

    @property
    def changes(self) -> list[tuple[str, Replacement]]:
        """The functions of llorch that go wrong, each with its replacement."""
        return self.mistake.changes(along=self.along)

    def is_made_in(self, where: str) -> bool:
        """Tell if a part of a step, or its optimizer, has the mistake."""
        return self.in_passes == (where != "optimizer") and self.where in ("both", where)


class TrainingReplay:
    """Runs of the steps of one dump; `weights` are float64."""

    def __init__(self, weights: Weights, adapter: Adapter, dump: TrainingDump) -> None:
        """Prepare; nothing is computed yet."""
        self.weights, self.adapter, self.dump = weights, adapter, dump
        self.shows_tokens = any(group in _OF_TOKENS for step in dump.steps for group, _ in step.shown)
        flat = {name: array.astype(np.float64) for name, array in adapter.flat().items()}
        zero = {name: np.zeros_like(array) for name, array in flat.items()}
        self._start = {group: flat if group == "parameters" else zero for group in STATE}
        self._whole = {step.number: {name: step.shown["parameters", name].array for name in flat}
                       for step in dump.steps if all(("parameters", name) in step.shown for name in flat)}  # fmt: skip
        self._kept: dict[Any, Any] = {}

    def run(
        self, mistakes: tuple[InjectedMistake, ...] = (), *, fed: bool = True, until: Key | None = None
    ) -> "ReplayedRun":
        """Run all steps, or those up to the step of `until`, with mistakes injected."""
        run, state = ReplayedRun(), self._start
        for step in self.dump.steps:
            if step.batches:
                state = self._step(run, step, state, mistakes, fed, until)
            if fed:
                state = {group: _over(group, arrays, step.shown) for group, arrays in state.items()}
                state["parameters"] = self._whole.get(step.number, state["parameters"])
            if until is not None and step.number >= until[0]:
                break
        return run

    def _step(
        self, run: "ReplayedRun", step: TrainingStep, state: dict[str, Named],
        mistakes: tuple[InjectedMistake, ...], fed: bool, until: Key | None,
    ) -> dict[str, Named]:  # fmt: skip
        """Replay one optimizer step with mistakes, and return the state after it."""
        parameters, shown = state["parameters"], step.shown if fed else {}
        run.keep(step, "start", parameters)
        theirs, own = shown.get(("token_losses", "")), np.zeros(0)
        if self.shows_tokens:
            logits, own = self._remembered("tokens", step, parameters, mistakes)
            given = shown.get(("adapted_logits", ""))
            losses = own if given is None else self._losses(step, given.array, mistakes)
            run.keep(step, "adapted_logits", {"": logits})
            run.keep(step, "token_losses", {"": losses})
        last = until[1] if until is not None and until[0] == step.number else ""
        if last in _OF_TOKENS:
            return state
        loss, grads = self._remembered("gradients", step, parameters, mistakes)
        run.keep(step, "loss", {"": np.asarray(loss if theirs is None else _with_their_losses(loss, own, theirs))})
        run.keep(step, "gradient", grads)
        if last in _OF_PASSES:
            return state
        with _inside(mistakes, "optimizer"):
            return _optimizer(run, step, grads, state, shown, self.dump.settings)

    def _remembered(
        self, what: str, step: TrainingStep, parameters: Named, mistakes: tuple[InjectedMistake, ...]
    ) -> Any:
        """Compute a result of a step, and keep it while the step's parameters are the same arrays.

        The oldest result is dropped first, because logits may be large.
        """
        key = (what, step.number, id(parameters), tuple(one for one in mistakes if one.in_passes))
        found = self._kept.pop(key, None) or (parameters, getattr(self, f"_{what}")(step, parameters, mistakes))
        self._kept[key] = found  # with the parameters, which keeps them alive, so that no other object gets their id
        if len(self._kept) > 6 * len(self.dump.steps):
            self._kept.pop(next(iter(self._kept)))
        return found[1]

    def _tokens(self, step: TrainingStep, parameters: Named, mistakes: tuple[InjectedMistake, ...]) -> tuple:
        """Return logits and losses of all tokens of a step, with the mistakes injected."""
        with _inside(mistakes, "shown"):
            logits = self._logits(step, self._adapted(parameters))
            return logits, self._token_losses(step, logits)

    def _gradients(
        self, step: TrainingStep, parameters: Named, mistakes: tuple[InjectedMistake, ...]
    ) -> tuple[float, Named]:
        """Return loss and gradients of a step, with the mistakes injected into the passes they belong to."""
        loss, grads = self._loss_and_gradients(step, parameters, mistakes, "shown")
        if any(one.where != "both" for one in mistakes):
            _, grads = self._loss_and_gradients(step, parameters, mistakes, "back")
        return loss, grads

    def _adapted(self, parameters: Named) -> Weights:
        return AdaptedWeights(self.weights, replace(self.adapter), parameters=parameters)  # replaced: scales anew

    def _loss_and_gradients(
        self, step: TrainingStep, parameters: Named, mistakes: tuple[InjectedMistake, ...], where: Where
    ) -> tuple[float, Named]:
        """Compute loss and gradients with mistakes; a mistake around the whole step gets the right ones from memory."""
        right, given = nullcontext(), self._given(step, parameters)
        if {part for one in mistakes if one.is_made_in(where) for part, _ in one.changes} <= {STEP}:
            right = replaced(STEP, _answering(given, self._remembered("right", step, parameters, ())))
        with right, _inside(mistakes, where):
            return loss_and_gradients(self.weights, *given[0], **given[1])

    def _right(self, step: TrainingStep, parameters: Named, _: tuple[InjectedMistake, ...]) -> tuple[float, Named]:
        given = self._given(step, parameters)
        return loss_and_gradients(self.weights, *given[0], **given[1])

    def _given(self, step: TrainingStep, parameters: Named) -> _Given:
        named = {"parameters": parameters, "label_smoothing": self.dump.settings.label_smoothing}
        return (replace(self.adapter), step.batches), named  # replaced: scales anew

    def _logits(self, step: TrainingStep, weights: Weights) -> np.ndarray:
        logits = [
            forward(ids, weights, KVCache(weights.config, weights.dtype))
            for batch in step.batches
            for ids, _ in batch.each_document()
        ]
        return np.concatenate(logits)

    def _losses(self, step: TrainingStep, logits: np.ndarray, mistakes: tuple[InjectedMistake, ...]) -> np.ndarray:
        with _inside(mistakes, "shown"):
            return self._token_losses(step, logits)

    def _token_losses(self, step: TrainingStep, logits: np.ndarray) -> np.ndarray:
        """Compute the loss of every row of logits; NaN where nothing is learned."""
        smoothing = self.dump.settings.label_smoothing
        wanted = np.concatenate([shifted(labels) for batch in step.batches for _, labels in batch.each_document()])
        losses = np.full(len(logits), np.nan)
        for row in np.flatnonzero(wanted != IGNORED):
            alone = slice(row, row + 1)
            losses[row], _ = cross_entropy(logits[alone], wanted[alone], label_smoothing=smoothing)
        return losses


class ReplayedRun:
    """Arrays that a replay computed, by key."""

    def __init__(self) -> None:
        """Create a run without arrays."""
        self.arrays: dict[Key, np.ndarray] = {}

    def keep(self, step: TrainingStep, group: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Note the arrays of a group of stages."""
        self.arrays |= {(step.number, group, name): array for name, array in arrays.items()}


def _optimizer(
    run: ReplayedRun, step: TrainingStep, grads: Named, state: Mapping[str, Named],
    shown: Mapping[tuple[str, str], StepArray], settings: Settings,
) -> dict[str, Named]:  # fmt: skip
    """Clip and update, each from what the dump shows of the quantity before."""
    clipped, norm = clip_by_norm(_over("gradient", grads, shown), max_norm=settings.max_grad_norm)
    run.keep(step, "grad_norm", {"": np.asarray(norm)})
    run.keep(step, "clipped", clipped)
    made: dict[str, Named] = {group: {} for group in STATE}
    current = ""

    def noting(right: Callable[..., Any]) -> Callable[..., Any]:
        def moments(grad: np.ndarray, m: np.ndarray, v: np.ndarray, **how: object) -> tuple[np.ndarray, ...]:
            found = dict(zip(STATE[1:], right(grad, m, v, **how), strict=True))
            for group, array in found.items():
                made[group][current] = array
            return tuple(_over(group, {current: array}, shown)[current] for group, array in found.items())

        return moments

    with replaced("llorch.training.adamw.moments", noting):
        for current, grad in _over("clipped", clipped, shown).items():
            made["parameters"][current], *_ = adamw_step(
                state["parameters"][current], grad, state["first_moment"][current], state["second_moment"][current],
                step=step.number, lr=step.lr, betas=settings.betas, eps=settings.eps,
                weight_decay=settings.weight_decay,
            )  # fmt: skip
    for group in STATE:
        run.keep(step, group, made[group])
    return made


def _over(group: str, ours: Mapping[str, np.ndarray], shown: Mapping[tuple[str, str], StepArray]) -> Named:
    """Replace llorch's arrays by the dump's where the dump shows them and they are finite."""
    theirs = {name: shown[group, name].array for name in ours if (group, name) in shown}
    return {**ours, **{name: array for name, array in theirs.items() if np.isfinite(array).all()}}


def _with_their_losses(loss: float, ours: np.ndarray, theirs: StepArray) -> float:
    """Compute the loss as if the sum had used the dump's token losses."""
    assert theirs.rows is not None
    learned = ~np.isnan(ours)
    both = learned & theirs.rows
    return loss + float((theirs.array[both] - ours[both]).sum()) / int(learned.sum())


def _answering(given: _Given, answer: tuple[float, Named]) -> Replacement:
    """Replace a function by one that returns a known answer if its arguments are exactly the given objects."""
    asked = [*given[0], *given[1].values()]

    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def answering(weights: Weights, *now: object, **how: object) -> tuple[float, Named]:
            now_asked = [*now, *(how.get(name) for name in given[1])]
            is_same = all(one is other for one, other in zip(asked, now_asked, strict=True))
            return answer if is_same else right(weights, *now, **how)

        return answering

    return make


def _inside(mistakes: tuple[InjectedMistake, ...], where: str) -> AbstractContextManager[None]:
    """Plant those that are made in a part of the step."""
    return replaced_all(change for one in mistakes if one.is_made_in(where) for change in one.changes)
