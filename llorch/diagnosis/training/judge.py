"""Compare every quantity of a training dump with llorch's: its error, its tolerance, and its inputs.

`TrainingStep.shown` has the dump's arrays of a step. In the mode ISOLATED llorch computes a quantity from such arrays,
in the mode CHAINED from its own arrays.
"""

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
from llorch.judging.expectations.training_refs import CHAINED, ISOLATED
from llorch.judging.goldens.training_recipe import OptimizerRecipe
from llorch.judging.runners.numpy import FLOAT64
from llorch.judging.tolerances import training as tolerances
from llorch.ops.numerics import DtypeName
from llorch.stages.comparison import FLOORS, Difference, Tolerance, measure, measure_in
from llorch.stages.stage_ref import StageRef
from llorch.stages.training import BY_GROUP

MOMENTS = ("first_moment", "second_moment")


class TrainingJudge:
    """Checker of a training dump's replays, with the tolerances of one dtype."""

    def __init__(
        self, dump: TrainingDump, config: ModelConfig, tensors: Iterable[str], dtype: DtypeName, *, model: str = ""
    ) -> None:
        """Store the dump; `tensors` are all trained tensors, `model` is the name of the model."""
        self.dump, self.config = dump, config
        self._compare = partial(judge_difference, engine="dump", model=model, backend=FLOAT64)
        self.dtype: DtypeName = dtype
        self._gradients = [("gradient", name) for name in tensors]
        self.steps = {step.number: step for step in dump.steps}
        self._tolerances: dict[tuple[Key, str], Tolerance] = {}

    def checks(self, run: ReplayedRun, *, fed: bool = True) -> list[StageCheck]:
        """Compare all arrays of the dump that can be checked, in the order of the run; all CHAINED if not `fed`."""
        compared = self._compared
        return [self._check(step, group, name, run, mode if fed else CHAINED) for step, group, name, mode in compared]

    @cached_property
    def _compared(self) -> list[tuple[TrainingStep, str, str, str]]:
        """Step, group, name and mode of each array that can be checked, in the order of the run."""
        comparable = []
        for step in self.dump.steps:
            names = sorted(step.shown, key=lambda array_key: (FLOW.index(array_key[0]), _backward(array_key[1])))
            checked_names = [name for name in names if step.batches and self._is_checkable(step, *name)]
            comparable += [(step, *name, self.mode(step, *name)) for name in checked_names]
        return comparable

    def _check(self, step: TrainingStep, group: str, name: str, run: ReplayedRun, mode: str) -> StageCheck:
        """Compare one array with llorch's; its tolerance comes from the first run that was checked."""
        array_ref, key = (step, group, name), (step.number, group, name)
        dumped, expected = step.shown[group, name], run.arrays[step.number, group, name]
        if (key, mode) not in self._tolerances:
            self._tolerances[key, mode] = self._tolerance(step, group, name, mode, run)
        difference = self.difference(step, group, dumped, expected)
        isolated = self._compare(difference, self._tolerances[key, mode], _stage_ref(*array_ref), mode)
        return StageCheck(isolated, None, (group,), dumped.name, "float32" if mode == ISOLATED else self.dtype)

    def difference(self, step: TrainingStep, group: str, dumped: StepArray, expected: np.ndarray) -> Difference:
        """Measure the difference between an array of the dump and llorch's."""
        actual = dumped.array
        if dumped.rows is not None:
            common_rows = dumped.rows & ~np.isnan(expected.reshape(len(expected), -1)[:, 0])
            actual, expected = actual[common_rows], expected[common_rows]
        if group == "parameters":
            return measure_in(actual, expected, unit=self.rate(step))
        return measure(actual, expected)

    def distance(self, check: StageCheck, actual: np.ndarray, expected: np.ndarray) -> float:
        """Measure the difference between two of llorch's arrays, in tolerances, at the rows that the dump has."""
        dumped = replace(self.dumped_array(check), array=actual)
        difference = self.difference(self.steps[check.n_pass], check.stage, dumped, expected)
        return difference.over(check.isolated.tolerance)

    def count_moved(self, check: StageCheck, actual: np.ndarray, expected: np.ndarray) -> int:
        """Count the elements that differ between two of llorch's arrays by more than the tolerance, of the dumped."""
        rows = self.dumped_array(check).rows
        actual, expected = (array if rows is None else array[rows] for array in (actual, expected))
        is_parameter = check.stage == "parameters"
        unit = self.rate(self.steps[check.n_pass]) if is_parameter else math.sqrt(np.nanmean(np.square(expected)))
        return int((np.abs(actual - expected) > check.isolated.tolerance.error * unit).sum())

    def dumped_array(self, check: StageCheck) -> StepArray:
        """Return the array of the dump."""
        n_step, group, name = key_of(check)
        return self.steps[n_step].shown[group, name]

    def rate(self, step: TrainingStep) -> float:
        """Return the unit of parameters: the learning rate of the step, or of the settings if that is 0."""
        return step.lr or self.dump.settings.lr

    def mode(self, step: TrainingStep, group: str, name: str) -> str:
        """Return ISOLATED if the dump has the inputs of a quantity; else CHAINED: llorch computed them."""
        dumped = step.shown
        inputs = {
            "token_losses": [("adapted_logits", "")],
            "loss": [("token_losses", "")],
            "grad_norm": self._gradients,
            "clipped": self._gradients,
            "parameters": [(moment, name) for moment in MOMENTS],
        }.get(group, [])
        if group in MOMENTS:
            inputs = [("clipped", name)] if ("clipped", name) in dumped else self._gradients
        has_inputs = bool(inputs) and all(key in dumped and np.isfinite(dumped[key].array).all() for key in inputs)
        start_groups = ["parameters"] if group == "parameters" else [group] if group in MOMENTS else []
        return ISOLATED if has_inputs and all(self._starts(step, g, name) for g in start_groups) else CHAINED

    def _starts(self, step: TrainingStep, group: str, name: str) -> bool:
        """Tell if values before a step are known: from the dump, the start of the run, or the adapter (parameters)."""
        previous = self.steps.get(step.number - 1)
        if previous is None:
            return step.number == 1 or group == "parameters"
        return (group, name) in previous.shown

    def _is_checkable(self, step: TrainingStep, group: str, name: str) -> bool:
        """Tell if a quantity can be checked.

        It cannot if it depends on moments before the dump, or if half precision hides it in a chain.
        """
        is_chained = self.mode(step, group, name) == CHAINED
        first = min(number for number, s in self.steps.items() if s.batches)
        has_lost_moments = first > 1 and not any(g in MOMENTS for g, _ in self.steps.get(first - 1, step).shown)
        before = self.steps.get(step.number - 1, step).shown
        has_start = step.number == first or all(("parameters", name) in before for _, name in self._gradients)
        if has_lost_moments and is_chained and (group in (*MOMENTS, "parameters") or not has_start):
            return False
        return not (self.dtype != "float32" and is_chained and group == "parameters")

    def _tolerance(self, step: TrainingStep, group: str, name: str, mode: str, run: ReplayedRun) -> Tolerance:
        """Derive a tolerance; that of chained parameters is the gradients', amplified, up to float32's ceiling."""
        stage = "gradient" if group == "clipped" else group
        tolerance = tolerances.of_dump(self.config, stage, mode, self.dtype, self.dump.last_position)
        if group == "parameters":
            if mode == CHAINED:
                ceiling = tolerances.ceiling(self.config, group, CHAINED, "float32")
                tolerance = tolerances.ceiling(self.config, group, ISOLATED, "float32")
                tolerance = tolerance.at_least(self._amplify(step, name, run)).at_most(ceiling)
            tolerance = tolerances.of_parameters(run.arrays[step.number, "start", name], self.rate(step), tolerance)
        floor = FLOORS.get(step.shown[group, name].stored, 0.0)
        return tolerance.at_least(Tolerance(floor, floor)) if floor > FLOORS["float32"] else tolerance

    def _amplify(self, step: TrainingStep, name: str, run: ReplayedRun) -> Tolerance:
        """Bound the errors in parameters that come from gradients missing in the dump."""
        settings = self.dump.settings
        gradient_tolerance = tolerances.of_dump(self.config, "gradient", CHAINED, self.dtype, self.dump.last_position)
        step_numbers = [number for number, s in self.steps.items() if s.batches and number <= step.number]
        updates = [tuple({name: run.arrays[n, group, name]} for group in ("clipped", *MOMENTS)) for n in step_numbers]
        recipe = OptimizerRecipe(step.lr, settings.betas, settings.eps, settings.weight_decay, math.inf)
        total, worst = tolerances.amplification(updates, [1.0] * len(updates), recipe)[-1][name]
        return Tolerance(gradient_tolerance.worst * float(total), gradient_tolerance.worst * float(worst))


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
