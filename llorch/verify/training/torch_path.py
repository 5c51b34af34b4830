"""Checkpoints 15 to 20 as the torch path computes them: the modules, leaves, loss and optimizer that training uses.

Isolated and chained are as in `path`; a block alone is one layer of the module, given the golden's
input and the gradient of its output. The trainer's own `Stepper` makes gradients and steps. In half precision the base
and its activations are, the adapter, its gradients and the optimizer stay float32. `-trainer` is how `llorch lora
train` runs when it saves memory: fused attention, products of frozen weights by oneDNN, blocks that run again for their
gradients, logits that never exist all at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llorch.files import Weights
from llorch.lora.adapter import Adapter
from llorch.lora.merge import MergedWeights
from llorch.pytorch.cache import NoCache
from llorch.pytorch.causal_lm import CausalLM, keep_nothing, widened
from llorch.pytorch.device import Target
from llorch.pytorch.load import load_dense
from llorch.pytorch.lora.adapters import attach, lora_leaves, trainable_parameters
from llorch.pytorch.train.adamw import AdamW
from llorch.pytorch.train.forward import checkpoint_gradients, hidden_states, place_of
from llorch.pytorch.train.loading import load_for_training
from llorch.pytorch.train.loss import loss_sum
from llorch.pytorch.train.step import Stepper
from llorch.train.batch import IGNORED, Batch
from llorch.train.schedules import learning_rate
from llorch.verify.training.goldens import TrainingGolden
from llorch.verify.training.recipe import (
    CURVE,
    INPUT_OF,
    OPTIMIZER,
    RSLORA,
    SHARED_INPUT,
    SMOOTHING,
    SMOOTHINGS,
    STATE,
    STEPS_SHOWN,
    OptimizerRecipe,
    step_batches,
    with_stage,
    with_zero_b,
)

NAME = "default"  # of the adapter
CHUNK = 3  # rows of logits at once, fewer than any batch has
Arrays = Iterator[tuple[str, np.ndarray]]


class TorchPath:
    """What torch makes of one golden on one device, in one dtype."""

    def __init__(self, weights: Weights, golden: TrainingGolden, target: Target, *, as_trainer: bool) -> None:
        """Prepare; nothing is loaded yet.

        Args:
            weights: The base in float32.
            golden: Adapter, batches, and inputs of isolated stages.
            target: Device and dtype.
            as_trainer: Whether it runs as the trainer does when it saves memory, or as it is written.
        """
        self.weights, self.target = weights, target
        self.as_trainer, self.chunk = as_trainer, CHUNK if as_trainer else None
        self.batches = golden.batches
        self.adapter = golden.adapter_for(weights.config)
        self.rslora = golden.adapter_for(weights.config, RSLORA)
        self._golden = golden

    def isolated(self) -> Arrays:
        """Every stage that can be fed what the golden was fed."""
        yield from self._deltas(self.adapter, "plain", self.adapter.targets)
        yield from self._deltas(self.rslora, "rslora", [f"layers.0.{name}" for name in SHARED_INPUT])
        yield from self._losses(self._padded("plain/adapted_logits"), nn.Identity())
        yield from self._block_gradients()
        for step in (1, 2):
            yield from self._optimizer_step(step)

    def chained(self) -> Arrays:
        """Every run from its beginning."""
        yield from self._forward()
        module = self._module(self.rslora)
        yield "rslora/adapted_logits", self._tokens(module.lm_head(self._hidden(module, self.batches[0])))
        yield from self._gradients("plain", self.adapter)
        yield from self._gradients("zero_b", with_zero_b(self.adapter))
        yield from self._steps()
        yield from self._curve()
        yield "plain/merged_logits", self._merged_logits()

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

    def _hidden(self, module: CausalLM, batch: Batch) -> Tensor:
        return hidden_states(module, batch, self.target.device)

    def _given(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(self._golden.given(key), device=self.target.device, dtype=dtype or self.target.dtype)

    def _padded(self, key: str) -> Tensor:
        """The golden's tokens as rows of the first batch; 0 where there is padding."""
        tokens = self._given(key)
        held = torch.from_numpy(self.batches[0].documents >= 0)
        rows = tokens.new_zeros((*held.shape, tokens.shape[-1]))
        rows[held.to(rows.device)] = tokens
        return rows

    def _tokens(self, rows: Tensor) -> np.ndarray:
        return widened(rows.detach()).cpu().numpy()[self.batches[0].documents >= 0]

    def _deltas(self, adapter: Adapter, case: str, names: Sequence[str] | Mapping) -> Arrays:
        leaves = {target.name: leaf for target, leaf in lora_leaves(self._module(adapter))}
        for name in names:
            _, layer, short = name.split(".")
            added = _delta(leaves[name], self._given(f"plain/l{layer}.{INPUT_OF[short]}"))
            yield f"{case}/l{layer}.lora_delta.{short}", added.cpu().numpy()

    def _forward(self) -> Arrays:
        """Deltas on our own activations, logits, and losses made from our hidden states."""
        module, batch, deltas = self._module(self.adapter), self.batches[0], {}
        for target, leaf in lora_leaves(module):

            def note(leaf: Any, inputs: tuple, name: str = target.name) -> None:
                deltas[name] = _delta(leaf, inputs[0])

            leaf.register_forward_pre_hook(note)
        hidden = self._hidden(module, batch)
        for name, delta in deltas.items():
            yield f"plain/{with_stage(name, 'lora_delta')}", self._tokens(delta)
        yield "plain/adapted_logits", self._tokens(module.lm_head(hidden))
        yield from self._losses(hidden.detach(), module.lm_head)

    def _losses(self, hidden: Tensor, lm_head: nn.Module) -> Arrays:
        batch = self.batches[0]
        for case, smoothing in SMOOTHINGS.items():
            losses = [self._loss(hidden, lm_head, labels, smoothing) for labels in _one_by_one(batch.labels)]
            yield f"{case}/token_losses", torch.stack(losses).detach().cpu().numpy()
            loss = self._loss(hidden, lm_head, batch.labels, smoothing) / batch.n_trained
            yield f"{case}/loss", loss.detach().cpu().numpy()

    def _loss(self, hidden: Tensor, lm_head: nn.Module, labels: np.ndarray, smoothing: float) -> Tensor:
        return loss_sum(hidden, lm_head, torch.from_numpy(labels), label_smoothing=smoothing, chunk=self.chunk)

    def _block_gradients(self) -> Arrays:
        """Each layer alone: what goes in and the gradient of what comes out are the golden's."""
        module, batch = self._module(self.adapter), self.batches[0]
        parameters, last = trainable_parameters(module, NAME), self._padded("plain/last_block_out").requires_grad_()
        loss = self._loss(module.model.norm(last), module.lm_head, batch.labels, 0.0) / batch.n_trained
        loss.backward()
        yield "plain/gradient.last_block_out", self._tokens(_gradient(last))
        place, n_layers = place_of(module, batch, self.target.device), len(module.model.layers)
        for i, layer in enumerate(module.model.layers):
            above = "gradient.last_block_out" if i == n_layers - 1 else f"l{i + 1}.gradient.block_in"
            x = self._padded(f"plain/l{i}.block_in").requires_grad_()
            layer(x, place, NoCache(self.target.device), keep_nothing).backward(self._padded(f"plain/{above}"))
            yield f"plain/l{i}.gradient.block_in", self._tokens(_gradient(x))
        for name, parameter in parameters.items():
            yield f"plain/{with_stage(name, 'gradient')}", _gradient(parameter).cpu().numpy()

    def _gradients(self, case: str, adapter: Adapter) -> Arrays:
        """Of every trained tensor and of block inputs, in one backward pass."""
        stepper = self._stepper(adapter, OPTIMIZER, 0.0)
        module, blocks = stepper.module, dict[str, Tensor]()
        for i, layer in enumerate(module.model.layers):
            layer.register_forward_pre_hook(_noting(blocks, f"l{i}.gradient.block_in"))
        module.model.norm.register_forward_pre_hook(_noting(blocks, "gradient.last_block_out"))
        stepper.backward(self.batches[:1])
        for name, parameter in stepper.optimizer.params.items():
            yield f"{case}/{with_stage(name, 'gradient')}", _gradient(parameter).cpu().numpy()
        if case == "plain":
            for key, tensor in blocks.items():
                yield f"plain/{key}", self._tokens(_gradient(tensor))

    def _stepper(self, adapter: Adapter, recipe: OptimizerRecipe, smoothing: float) -> Stepper:
        """What the trainer makes its steps with."""
        module = self._module(adapter)
        optimizer = AdamW(
            trainable_parameters(module, NAME), betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay,
            lr_ratio=1.0, eight_bit=False,
        )  # fmt: skip
        return Stepper(
            module, optimizer, self.target.device, label_smoothing=smoothing, chunk=self.chunk, max_norm=recipe.max_norm
        )

    def _optimizer_step(self, step: int) -> Arrays:
        """One step from the golden's gradients, moments and parameters."""
        optimizer = self._stepper(self.adapter, OPTIMIZER, 0.0).optimizer
        wide = next(iter(optimizer.params.values())).dtype
        source, case = ("gradient", "plain") if step == 1 else ("given", f"step {step}")
        state: dict[str, Tensor] = {"step": torch.tensor(step - 1)}
        for name, parameter in optimizer.params.items():
            parameter.grad = self._given(f"{case}/{with_stage(name, source)}", wide)
            if step > 1:
                before = [self._given(f"step {step - 1}/{with_stage(name, stage)}", wide) for stage in STATE]
                parameter.data.copy_(before[0])
                state |= {f"{name}.m": before[1], f"{name}.v": before[2]}
        if step > 1:
            optimizer.load(state)
        norm = optimizer.clip(OPTIMIZER.max_norm)
        optimizer.step(OPTIMIZER.learning_rate)
        yield from self._shown(optimizer, step, norm)

    def _steps(self) -> Arrays:
        stepper = self._stepper(self.adapter, OPTIMIZER, 0.0)
        for step in range(1, max(STEPS_SHOWN) + 1):
            _, norm = stepper.step(step_batches(self.batches, step, 1), OPTIMIZER.learning_rate)
            if step in STEPS_SHOWN:
                yield from self._shown(stepper.optimizer, step, norm)

    def _shown(self, optimizer: AdamW, step: int, norm: float) -> Arrays:
        state = optimizer.state()
        yield f"step {step}/grad_norm", np.asarray(norm, self._numpy_dtype)
        for name, parameter in optimizer.params.items():
            for stage, tensor in zip(STATE, (parameter, state[f"{name}.m"], state[f"{name}.v"]), strict=True):
                yield f"step {step}/{with_stage(name, stage)}", tensor.detach().cpu().numpy().copy()

    def _curve(self) -> Arrays:
        stepper, found = self._stepper(self.adapter, CURVE.optimizer, SMOOTHING), []
        for step in range(1, CURVE.n_steps + 1):
            rate = learning_rate(
                step - 1, schedule="cosine", peak=CURVE.optimizer.learning_rate,
                warmup_steps=CURVE.warmup_steps, total_steps=CURVE.n_steps,
            )  # fmt: skip
            found.append(stepper.step(step_batches(self.batches, step, CURVE.accumulation), rate))
        losses, norms = zip(*found, strict=True)
        yield "curve/loss_curve", np.asarray(losses)
        yield "curve/norm_curve", np.asarray(norms)

    @torch.no_grad()
    def _merged_logits(self) -> np.ndarray:
        """Those of a model that is loaded with the adapter merged in, rounded to float32 once."""
        merged = MergedWeights(self.weights, self.adapter)
        module = load_dense(merged, dtype=self.target.dtype, device=self.target.device)
        return self._tokens(module.lm_head(self._hidden(module, self.batches[0])))

    @property
    def _numpy_dtype(self) -> Any:
        return np.float64 if self.target.dtype == torch.float64 else np.float32


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


def _noting(found: dict[str, Tensor], name: str) -> Callable[..., tuple]:
    """A hook that keeps the gradient of what goes into a module."""

    def note(_module: nn.Module, inputs: tuple) -> tuple:
        x = inputs[0] if inputs[0].requires_grad else inputs[0].detach().requires_grad_()
        x.retain_grad()
        found[name] = x
        return x, *inputs[1:]

    return note


def _gradient(tensor: Tensor) -> Tensor:
    """What flowed back; zero where nothing did, so that a cut graph is a wrong number."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
