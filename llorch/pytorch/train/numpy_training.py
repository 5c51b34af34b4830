"""Training with the NumPy reference in place of torch: one optimizer step at a time, behind `Training`'s interface.

`llorch lora train --impl` installs a learner's functions in this code: it calls every function of the training lessons.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llorch.files.tensor_names import count_parameters
from llorch.lora.adapter import Adapter, assembled
from llorch.pytorch.train.plan import TrainingPlan
from llorch.pytorch.train.trainer import BETAS, EPS, ModelSize, StepReport, count_tokens
from llorch.runtime.errors import UserError
from llorch.training.adamw import adamw_step, clip_by_norm, rate_factor
from llorch.training.data import batches
from llorch.training.numpy_step import loss_and_gradients, mean_loss
from llorch.training.settings import TrainSettings

Arrays = dict[str, np.ndarray]
_ONLY: Mapping[str, object] = {  # values of the settings that this training does not implement
    "device": "cpu", "dtype": "float32", "weights": "decoded", "dropout": 0.0, "eight_bit": False,
    "gradient_checkpointing": False,
}  # fmt: skip


class NumpyTraining:
    """State of a training in NumPy: adapter and optimizer after `step` steps; see `Training`."""

    memory = None

    def __init__(self, plan: TrainingPlan) -> None:
        """Decode the base and copy the initial adapter; UserError for a setting that only torch has."""
        _require_supported(plan.settings)
        self.plan, self.settings, self.data = replace(plan, on_numpy=True), plan.settings, plan.data
        self.total_steps, self.step = plan.total_steps, 0
        self._weights = plan.weights.astype(np.float32, keep=True)
        self._parameters: Arrays = {name: array.copy() for name, array in plan.initial.flat().items()}
        self._m, self._v = ({name: np.zeros_like(array) for name, array in self._parameters.items()} for _ in range(2))

    @property
    def adapter(self) -> Adapter:
        """The current adapter."""
        return assembled(self.plan.initial.config, self._parameters, self.plan.weights.config, where=None)

    @property
    def device_name(self) -> str:
        """Description of the device."""
        return "NumPy"

    @property
    def size(self) -> ModelSize:
        """Numbers of trained and frozen parameters, and the bytes of both."""
        n_trained = sum(array.size for array in self._parameters.values())
        n_frozen = count_parameters(self.plan.weights.config)
        return ModelSize(n_trained, n_frozen, (n_trained + n_frozen) * np.dtype(np.float32).itemsize)

    def run_step(self) -> StepReport:
        """Make one optimizer step; if a function fails, nothing changes."""
        settings, step_batches, rate = self.settings, self.plan.order.step(self.step), self.plan.rate(self.step)
        loss, grads = loss_and_gradients(
            self._weights, self.plan.initial, step_batches, label_smoothing=settings.label_smoothing,
            parameters=self._parameters,
        )  # fmt: skip
        grads, norm = clip_by_norm(grads, max_norm=settings.max_grad_norm or math.inf)
        moved = {
            name: adamw_step(
                array, grads[name], self._m[name], self._v[name], step=self.step + 1, betas=BETAS, eps=EPS,
                lr=rate * rate_factor(name, lr_ratio=settings.lora_plus_ratio), weight_decay=settings.weight_decay,
            )
            for name, array in self._parameters.items()
        }  # fmt: skip
        self._parameters, self._m, self._v = (
            {name: arrays[index] for name, arrays in moved.items()} for index in range(3)
        )
        self.step += 1
        n_trained = sum(batch.n_trained for batch in step_batches)
        return StepReport(self.step, loss, norm, rate, n_trained, count_tokens(step_batches))

    def validate(self, *, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean loss over the tokens in the loss of the validation set; None if `stop` returned True."""
        valid_batches = batches(self.data.rows(self.data.valid), self.settings.batch_size)
        return mean_loss(self._weights, self.plan.initial, valid_batches, parameters=self._parameters, stop=stop)

    def tensors(self) -> Arrays:
        """Return every array that the next steps depend on, by name."""
        groups = {"adapter": self._parameters, "first_moment": self._m, "second_moment": self._v}
        return {f"{group}/{name}": array for group, arrays in groups.items() for name, array in arrays.items()}

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the arrays, and a JSON record; see `Training.state`."""
        return self.tensors(), {"step": self.step}

    def load(self, tensors: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        """Restore a saved state; UserError for the state of another adapter, or of a training on torch."""
        shapes = [{name: array.shape for name, array in arrays.items()} for arrays in (tensors, self.tensors())]
        if shapes[0] != shapes[1]:
            raise UserError(
                "snapshot: expected this adapter's arrays of a NumPy run, got others; use the run's settings"
            )
        self._parameters, self._m, self._v = (
            {name.removeprefix(f"{group}/"): array.copy() for name, array in tensors.items() if name.startswith(group)}
            for group in ("adapter", "first_moment", "second_moment")
        )
        self.step = int(record["step"])


def _require_supported(settings: TrainSettings) -> None:
    """Raise UserError for a setting that the NumPy reference does not implement."""
    for name, value in _ONLY.items():
        if (actual := getattr(settings, name)) != value:
            raise UserError(f"settings: training in NumPy (--impl) expects {name} {value}, got {actual}")
    if settings.init == "pissa":
        raise UserError("settings: training in NumPy (--impl) expects another init than pissa, which changes the base")
