"""Checkpoints 15 to 20, but for files, on the torch path: the modules, leaves, loss and optimizer that training uses.

Isolated and chained are as in `runner`. The trainer's own `Stepper` makes gradients and steps; isolated, hooks put the
golden's numbers in where a block begins, and its gradient in where one ends. In half precision the base and its
activations are, the adapter, its gradients and the optimizer stay float32. `-trainer` is how `llorch lora train` runs
when it saves memory: fused attention, products of frozen weights by oneDNN, blocks that run again for their gradients,
logits that never exist all at once.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llorch.files import Weights
from llorch.lora.adapter import Adapter
from llorch.lora.merge import MergedWeights
from llorch.numerics import DtypeName
from llorch.pytorch.causal_lm import CausalLM, widened
from llorch.pytorch.device import Target
from llorch.pytorch.load import load_dense
from llorch.pytorch.lora.adapters import attach, lora_leaves, trainable_parameters
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.forward import checkpoint_gradients, hidden_states
from llorch.pytorch.train.loading import load_for_training
from llorch.pytorch.train.loss import loss_sum
from llorch.pytorch.train.step import Stepper
from llorch.pytorch.train.worker import Alone
from llorch.train.batch import IGNORED
from llorch.verify.judge import Row
from llorch.verify.places import Place
from llorch.verify.training.claims import claims, routed, rows, stored
from llorch.verify.training.goldens import HALF_DTYPES, TrainingGolden
from llorch.verify.training.limits import NUMPY_ALONE
from llorch.verify.training.places import (
    CHAINED,
    INPUT_OF,
    ISOLATED,
    after,
    at,
    before,
    borders,
    of_matrices,
    of_tensors,
    shared_input,
)
from llorch.verify.training.recipe import (
    CURVE,
    OPTIMIZER,
    RSLORA,
    SMOOTHING,
    SMOOTHINGS,
    STEPS_ALONE,
    STEPS_SHOWN,
    OptimizerRecipe,
    step_batches,
    with_zero_b,
)
from llorch.verify.training.runner import Results

VARIANTS = {"": False, "-trainer": True}  # suffix of the backend's name -> whether it runs as the trainer does
DTYPES = ("float32", "float64", *HALF_DTYPES)  # in which training is judged
NAME = "default"  # of the adapter
CHUNK = 3  # rows of logits at once, fewer than any batch has
MOMENTS = {"first_moment": "m", "second_moment": "v"}  # stage -> in the state of the optimizer


def verify_training_torch(name: str, target: Target) -> Iterator[Row]:
    """Judge the torch path in each of `VARIANTS` and one of `DTYPES` on one of `MODELS` against its stored goldens."""
    if target.dtype_name not in DTYPES:
        raise ValueError(f"training: judged in {', '.join(DTYPES)}, got {target}; leave it out or choose one of these")
    yield from torch_rows(name, *stored(name), target)


def torch_rows(name: str, weights: Weights, golden: TrainingGolden, target: Target) -> Iterator[Row]:
    """Likewise, of goldens that are at hand."""
    dtype: DtypeName = target.dtype_name  # pyright: ignore[reportAssignmentType]
    for suffix, as_trainer in VARIANTS.items():
        runner = TorchRunner(weights, golden, target, as_trainer=as_trainer)
        ours = {ISOLATED: dict(runner.isolated()), CHAINED: dict(runner.chained())}
        claimed = claims(golden, weights.config, dtype)
        yield from routed(rows(name, claimed, ours, f"{target}{suffix}", left_out=NUMPY_ALONE), golden)


class TorchRunner:
    """What torch makes of one golden on one device, in one dtype, as it is written or as the trainer saves memory."""

    def __init__(self, weights: Weights, golden: TrainingGolden, target: Target, *, as_trainer: bool) -> None:
        """Prepare; nothing is loaded yet."""
        self.weights = weights.astype(np.float64) if target.dtype == torch.float64 else weights
        self.target, self.n_layers = target, weights.config.n_layers
        self.as_trainer, self.chunk = as_trainer, CHUNK if as_trainer else None
        self.batches = golden.batches
        self.adapter = golden.adapter_for(weights.config)
        self.rslora = golden.adapter_for(weights.config, RSLORA)
        self._golden = golden

    def isolated(self) -> Results:
        """Every stage that can be fed what the golden was fed."""
        yield from self._deltas(self.adapter, of_matrices("lora_delta", self.n_layers))
        yield from self._deltas(self.rslora, shared_input("rslora"))
        yield from self._losses(self._padded(at("adapted_logits")), nn.Identity())
        yield from self._gradients(self.adapter, fed=True)
        for step in STEPS_ALONE:
            yield from self._optimizer_step(step)

    def chained(self) -> Results:
        """Every run from its beginning."""
        yield from self._forward()
        module = self._module(self.rslora)
        yield at("adapted_logits", case="rslora"), self._tokens(module.lm_head(self._hidden(module)))
        yield from self._gradients(self.adapter)
        stepper = self._stepper(with_zero_b(self.adapter), OPTIMIZER, 0.0)
        stepper.backward(self.batches[:1])
        yield from self._of_parameters(stepper, "zero_b")
        yield from self._steps()
        yield from self._curve()
        yield at("merged_logits"), self._merged_logits()

    def _module(self, adapter: Adapter) -> CausalLM:
        if self.as_trainer:
            width = max(batch.ids.shape[1] for batch in self.batches)
            module = load_for_training(self.weights, self.target, residency="decoded", batch=2, n_tokens=width)
        else:
            module = load_dense(self.weights, dtype=self.target.dtype, device=self.target.device)
        attach(module, adapter, name=NAME, trainable=True)
        if self.as_trainer:
            checkpoint_gradients(module)
        return module.train()

    def _hidden(self, module: CausalLM) -> Tensor:
        return hidden_states(module, self.batches[0], self.target.device)

    def _given(self, place: Place, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(self._golden.shown(place), device=self.target.device, dtype=dtype or self.target.dtype)

    def _padded(self, place: Place) -> Tensor:
        """The golden's tokens as rows of the first batch; 0 where there is padding."""
        tokens = self._given(place)
        held = torch.from_numpy(self.batches[0].documents >= 0)
        rows = tokens.new_zeros((*held.shape, tokens.shape[-1]))
        rows[held.to(rows.device)] = tokens
        return rows

    def _tokens(self, rows: Tensor) -> np.ndarray:
        return widened(rows.detach()).cpu().numpy()[self.batches[0].documents >= 0]

    def _deltas(self, adapter: Adapter, where: Mapping[str, Place]) -> Results:
        leaves = {target.name: leaf for _, target, leaf in lora_leaves(self._module(adapter))}
        for name, place in where.items():
            yield place, array_of(_delta(leaves[name], self._given(at(INPUT_OF[place.part], place.layer))))

    def _forward(self) -> Results:
        """Deltas on our own activations, logits, and losses made from our hidden states."""
        module, deltas = self._module(self.adapter), dict[str, Tensor]()
        for _, target, leaf in lora_leaves(module):

            def note(leaf: Any, inputs: tuple, name: str = target.name) -> None:
                deltas[name] = _delta(leaf, inputs[0])

            leaf.register_forward_pre_hook(note)
        hidden = self._hidden(module)
        for name, place in of_matrices("lora_delta", self.n_layers).items():
            yield place, self._tokens(deltas[name])
        yield at("adapted_logits"), self._tokens(module.lm_head(hidden))
        yield from self._losses(hidden.detach(), module.lm_head)

    def _losses(self, hidden: Tensor, lm_head: nn.Module) -> Results:
        batch = self.batches[0]
        for case, smoothing in SMOOTHINGS.items():
            losses = [self._loss(hidden, lm_head, labels, smoothing) for labels in _one_by_one(batch.labels)]
            yield at("token_losses", case=case), array_of(torch.stack(losses))
            yield (
                at("loss", case=case),
                array_of(self._loss(hidden, lm_head, batch.labels, smoothing) / batch.n_trained),
            )

    def _loss(self, hidden: Tensor, lm_head: nn.Module, labels: np.ndarray, smoothing: float) -> Tensor:
        return loss_sum(hidden, lm_head, torch.from_numpy(labels), label_smoothing=smoothing, chunk=self.chunk)

    def _gradients(self, adapter: Adapter, *, fed: bool = False) -> Results:
        """Of every trained tensor and of block inputs, in one backward pass.

        Fed, each block is alone: what goes in and the gradient of what comes out are the golden's.
        """
        stepper, inputs, outputs = self._stepper(adapter, OPTIMIZER, 0.0), dict[Place, Tensor](), list[Any]()
        model, ends = stepper.worker.module.model, borders(self.n_layers)
        for module, (x, d_x) in zip((*model.layers, model.norm), ends.items(), strict=True):
            module.register_forward_pre_hook(_noting(inputs, d_x, self._padded(x) if fed else None))
        for layer in model.layers:
            layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        stepper.backward(self.batches[:1])
        if fed:
            torch.autograd.backward(outputs, [self._padded(d_x) for d_x in [*ends.values()][1:]])
        yield from self._of_parameters(stepper, "plain")
        for place, tensor in inputs.items():
            yield place, self._tokens(_gradient(tensor))

    def _of_parameters(self, stepper: Stepper, case: str) -> Results:
        for name, place in of_tensors("gradient", self.n_layers, case).items():
            yield place, array_of(_gradient(stepper.optimizer.params[name]))

    def _stepper(self, adapter: Adapter, recipe: OptimizerRecipe, smoothing: float) -> Stepper:
        """What the trainer makes its steps with."""
        module = self._module(adapter)
        optimizer = AdamW(
            trainable_parameters(module, NAME), betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay,
            lr_ratio=1.0, eight_bit=False,
        )  # fmt: skip
        return Stepper(
            Alone(module),
            optimizer,
            self.target.device,
            label_smoothing=smoothing,
            chunk=self.chunk,
            max_norm=recipe.max_norm,
        )

    def _optimizer_step(self, step: int) -> Results:
        """One step from the golden's gradients, moments and parameters."""
        optimizer, start = self._stepper(self.adapter, OPTIMIZER, 0.0).optimizer, before(step, self.n_layers)
        state: dict[str, Tensor] = {"step": torch.tensor(step - 1)}
        for name, parameter in optimizer.params.items():
            given = {stage: self._given(where[name], parameter.dtype) for stage, where in start.items()}
            parameter.grad = given["gradient"]
            if step > 1:
                parameter.data.copy_(given["parameters"])
                state |= {f"{name}.{kind}": given[stage] for stage, kind in MOMENTS.items()}
        if step > 1:
            optimizer.load(state)
        norm = optimizer.clip(OPTIMIZER.max_norm)
        optimizer.step(OPTIMIZER.learning_rate)
        yield from self._shown(optimizer, step, norm)

    def _steps(self) -> Results:
        stepper = self._stepper(self.adapter, OPTIMIZER, 0.0)
        for step in range(1, max(STEPS_SHOWN) + 1):
            _, norm = stepper.step(step_batches(self.batches, step, 1), OPTIMIZER.learning_rate)
            if step in STEPS_SHOWN:
                yield from self._shown(stepper.optimizer, step, norm)

    def _shown(self, optimizer: AdamW, step: int, norm: float) -> Results:
        state, wide = optimizer.state(), np.float64 if self.target.dtype == torch.float64 else np.float32
        yield at("grad_norm", case=f"step {step}"), np.asarray(norm, wide)
        for stage, where in after(step, self.n_layers).items():
            for name, place in where.items():
                kept = optimizer.params[name] if stage == "parameters" else state[f"{name}.{MOMENTS[stage]}"]
                yield place, array_of(kept).copy()

    def _curve(self) -> Results:
        stepper, found = self._stepper(self.adapter, CURVE.optimizer, SMOOTHING), []
        for step in range(1, CURVE.n_steps + 1):
            found.append(stepper.step(step_batches(self.batches, step, CURVE.accumulation), CURVE.rate(step)))
        losses, norms = zip(*found, strict=True)
        yield at("loss_curve", case="curve"), np.asarray(losses)
        yield at("norm_curve", case="curve"), np.asarray(norms)

    @torch.no_grad()
    def _merged_logits(self) -> np.ndarray:
        """Those of a model that is loaded with the adapter merged in, rounded to float32 once."""
        merged = MergedWeights(self.weights, self.adapter)
        module = load_dense(merged, dtype=self.target.dtype, device=self.target.device)
        return self._tokens(module.lm_head(self._hidden(module)))


@torch.no_grad()
def _delta(leaf: Any, x: Tensor) -> Tensor:
    """What the adapter of a leaf adds to a result of zero, in the dtype of the adapter."""
    lora_B = leaf.lora_B[NAME]
    return leaf.adapted(NAME, x, lora_B.new_zeros((*x.shape[:-1], len(lora_B))))


def _one_by_one(labels: np.ndarray) -> Iterator[np.ndarray]:
    """The labels of a batch, all but one ignored."""
    for row, column in zip(*np.nonzero(labels != IGNORED), strict=True):
        alone = np.full_like(labels, IGNORED)
        alone[row, column] = labels[row, column]
        yield alone


def _noting(found: dict[Place, Tensor], place: Place, given: Tensor | None) -> Callable[..., tuple]:
    """A hook that keeps the gradient of what goes into a module, or of what is given to it instead."""

    def note(_module: nn.Module, inputs: tuple) -> tuple:
        x = inputs[0] if given is None else given
        x = x if x.requires_grad else x.detach().requires_grad_()
        x.retain_grad()
        found[place] = x
        return x, *inputs[1:]

    return note


def _gradient(tensor: Tensor) -> Tensor:
    """What flowed back; zero where nothing did, so that a cut graph is a wrong number."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def array_of(tensor: Tensor) -> np.ndarray:
    """On the CPU; not a copy."""
    return tensor.detach().cpu().numpy()
