"""Every quantity of a training dump compared with llorch's: its error, its tolerance, and its inputs."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from llorch.diagnosis.training.replay import FLOW, Key, ReplayedRun
from llorch.diagnosis.verdict import StageCheck
from llorch.engines.dumps.training_dump import StepArray, TrainingDump, TrainingStep
from llorch.families.config import ModelConfig
from llorch.judging.compare import judge_difference
from llorch.judging.expectations.training_places import CHAINED, ISOLATED
from llorch.judging.goldens.training_recipe import OptimizerRecipe
from llorch.judging.runners.numpy import FLOAT64
from llorch.judging.tolerances import training as limits
from llorch.ops.numerics import DtypeName
from llorch.stages.comparison import FLOORS, Difference, Tolerance, measure, measure_in
from llorch.stages.stage_ref import StageRef
from llorch.stages.training import BY_GROUP

MOMENTS = ("first_moment", "second_moment")


class TrainingJudge:
    """Judges replays of one dump in one arithmetic."""

    def __init__(
        self, dump: TrainingDump, config: ModelConfig, tensors: Iterable[str], dtype: DtypeName, *, model: str = ""
    ) -> None:
        """Prepare; `tensors` are all that are trained, `model` is the name of the model."""
        self.dump, self.config = dump, config
        self._compare = partial(judge_difference, engine="dump", model=model, backend=FLOAT64)
        self.dtype: DtypeName = dtype
        self._gradients = [("gradient", name) for name in tensors]
        self.last_position = max(
            (int(batch.positions.max()) for step in dump.steps for batch in step.batches), default=0
        )
        self.steps = {step.number: step for step in dump.steps}
        self._tolerances: dict[tuple[Key, str], Tolerance] = {}

    def checks(self, run: ReplayedRun, *, fed: bool = True) -> list[StageCheck]:
        """Compare all arrays of the dump that a run also made, in the order in which they are made.

        The mode is isolated if llorch's array was made from the dump's inputs.
        """
        compared = self._compared
        return [self._check(step, group, name, run, mode if fed else CHAINED) for step, group, name, mode in compared]

    @cached_property
    def _compared(self) -> list[tuple[TrainingStep, str, str, str]]:
        """Each array that can be judged: its step, group, name and mode, in the order in which they are made."""
        found = []
        for step in self.dump.steps:
            names = sorted(step.shown, key=lambda shown: (FLOW.index(shown[0]), _backward(shown[1])))
            checked_names = [name for name in names if step.batches and self._may_judge(step, *name)]
            found += [(step, *name, self.mode(step, *name)) for name in checked_names]
        return found

    def _check(self, step: TrainingStep, group: str, name: str, run: ReplayedRun, mode: str) -> StageCheck:
        """Compare one array with llorch's; tolerances come from the first run that was judged."""
        place, key = (step, group, name), (step.number, group, name)
        shown, expected = step.shown[group, name], run.arrays[step.number, group, name]
        if (key, mode) not in self._tolerances:
            self._tolerances[key, mode] = self._limit(step, group, name, mode, run)
        difference = self.difference(step, group, shown, expected)
        isolated = self._compare(difference, self._tolerances[key, mode], _stage_ref(*place), mode)
        return StageCheck(isolated, None, (group,), shown.name, "float32" if mode == ISOLATED else self.dtype)

    def difference(self, step: TrainingStep, group: str, shown: StepArray, expected: np.ndarray) -> Difference:
        """Measure the difference between an array of the dump and llorch's."""
        actual = shown.array
        if shown.rows is not None:
            both = shown.rows & ~np.isnan(expected.reshape(len(expected), -1)[:, 0])
            actual, expected = actual[both], expected[both]
        if group == "parameters":
            return measure_in(actual, expected, unit=self.rate(step))
        return measure(actual, expected)

    def apart(self, check: StageCheck, one: np.ndarray, other: np.ndarray) -> float:
        """Measure the difference between two of llorch's arrays, in tolerances, at the rows that the dump has."""
        shown = replace(self.shown(check), array=one)
        difference = self.difference(self.steps[check.n_pass], check.stage, shown, other)
        return difference.over(check.isolated.tolerance)

    def shown(self, check: StageCheck) -> StepArray:
        """Return the array of the dump."""
        number, group, name = key_of(check)
        return self.steps[number].shown[group, name]

    def rate(self, step: TrainingStep) -> float:
        """Return the unit of parameters: the learning rate of the step, or of the settings if that is 0."""
        return step.lr or self.dump.settings.lr

    def mode(self, step: TrainingStep, group: str, name: str) -> str:
        """Return ISOLATED if the dump shows the inputs of a quantity, else CHAINED."""
        shown = step.shown
        inputs = {
            "token_losses": [("adapted_logits", "")],
            "loss": [("token_losses", "")],
            "grad_norm": self._gradients,
            "clipped": self._gradients,
            "parameters": [(moment, name) for moment in MOMENTS],
        }.get(group, [])
        if group in MOMENTS:
            inputs = [("clipped", name)] if ("clipped", name) in shown else self._gradients
        alone = bool(inputs) and all(place in shown and np.isfinite(shown[place].array).all() for place in inputs)
        before = ["parameters"] if group == "parameters" else [group] if group in MOMENTS else []
        return ISOLATED if alone and all(self._starts(step, of, name) for of in before) else CHAINED

    def _starts(self, step: TrainingStep, group: str, name: str) -> bool:
        """Tell if the start of a step is known: the start of the run, or the dump's previous step."""
        before = self.steps.get(step.number - 1)
        if before is None:
            return step.number == 1 or group == "parameters"
        return (group, name) in before.shown

    def _may_judge(self, step: TrainingStep, group: str, name: str) -> bool:
        """Tell if a quantity can be judged.

        It cannot if it follows from moments before the dump, or if half precision hides it in a chain.
        """
        chained = self.mode(step, group, name) == CHAINED
        first = min(number for number, one in self.steps.items() if one.batches)
        lost = first > 1 and not any(group in MOMENTS for group, _ in self.steps.get(first - 1, step).shown)
        if lost and chained and (group in (*MOMENTS, "parameters") or step.number > first):
            return False
        return not (self.dtype != "float32" and chained and group == "parameters")

    def _limit(self, step: TrainingStep, group: str, name: str, mode: str, run: ReplayedRun) -> Tolerance:
        stage = "gradient" if group == "clipped" else group
        tolerance = limits.of_dump(self.config, stage, mode, self.dtype, self.last_position)
        if group == "parameters":
            if mode == CHAINED:
                most = limits.ceiling(self.config, group, CHAINED, "float32")
                tolerance = limits.ceiling(self.config, group, ISOLATED, "float32")
                tolerance = tolerance.at_least(self._amplified(step, name, run)).at_most(most)
            tolerance = limits.of_parameters(run.arrays[step.number, "start", name], self.rate(step), tolerance)
        stored = FLOORS.get(step.shown[group, name].stored, 0.0)
        return tolerance.at_least(Tolerance(stored, stored)) if stored > FLOORS["float32"] else tolerance

    def _amplified(self, step: TrainingStep, name: str, run: ReplayedRun) -> Tolerance:
        """Bound the errors that gradients, which the dump does not show, may cause in parameters."""
        settings = self.dump.settings
        own = limits.of_dump(self.config, "gradient", CHAINED, self.dtype, self.last_position)
        numbers = [number for number, one in self.steps.items() if one.batches and number <= step.number]
        made = [tuple({name: run.arrays[n, group, name]} for group in ("clipped", *MOMENTS)) for n in numbers]
        recipe = OptimizerRecipe(step.lr, settings.betas, settings.eps, settings.weight_decay, math.inf)
        whole, worst = limits.amplification(made, [1.0] * len(made), recipe)[-1][name]
        return Tolerance(own.worst * float(whole), own.worst * float(worst))


def _backward(name: str) -> tuple[int, int, str]:
    """Return a sort key for tensors in the order of the backward pass: last layer first, down_proj before q_proj."""
    order = ("lm_head", "down_proj", "up_proj", "gate_proj", "o_proj", "v_proj", "k_proj", "q_proj", "embed_tokens")
    parts = name.split(".")
    target = parts[-2] if len(parts) > 1 else ""
    layer = int(parts[1]) if parts[0] == "layers" else (-1 if target == "embed_tokens" else 1 << 30)
    return -layer, order.index(target) if target in order else 0, parts[-1]


def key_of(check: StageCheck) -> Key:
    """Return the key of a quantity's array in a run."""
    stage_ref = check.isolated.stage_ref
    in_layer = "" if stage_ref.layer is None else f"layers.{stage_ref.layer}."
    return stage_ref.n_pass, stage_ref.stage, f"{in_layer}{stage_ref.part}"


def _stage_ref(step: TrainingStep, group: str, name: str) -> StageRef:
    layer, part = (int(name.split(".")[1]), name.split(".", 2)[2]) if name.startswith("layers.") else (None, name)
    checkpoint = BY_GROUP["gradient" if group == "clipped" else group].checkpoint
    return StageRef(checkpoint, group, layer, f"step {step.number}", part, n_pass=step.number)
