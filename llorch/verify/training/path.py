"""Checkpoints 15 to 20 as NumPy computes them: isolated on a golden's arrays, chained on our own.

Everything is returned by the keys of the golden. The dtype of the weights computes: float32 is judged for its
arithmetic, float64 for its mathematics. Chained runs start from the stored adapter and share nothing with the golden
after that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llorch import backward as page
from llorch.cache import KVCache
from llorch.files import Weights
from llorch.forward import forward
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.lora.merge import MergedWeights
from llorch.ops.cross_entropy import IGNORED, cross_entropy, cross_entropy_backward, shifted
from llorch.ops.linear import linear
from llorch.ops.lora import LoraMatrix
from llorch.ops.rms_norm import rms_norm, rms_norm_backward
from llorch.train import adamw, numpy_step, schedules
from llorch.train.batch import Batch
from llorch.verify.training.goldens import TrainingGolden
from llorch.verify.training.recipe import (
    CURVE,
    INPUT_OF,
    MERGED,
    OPTIMIZER,
    RSLORA,
    SCHEDULE_STEPS,
    SCHEDULE_WARMUP,
    SCHEDULES,
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

Arrays = dict[str, np.ndarray]
Parameters = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class OptimizerState:
    """What a step starts from, by flat name of the tensors."""

    parameters: Parameters
    m: Parameters
    v: Parameters


class NumpyPath:
    """What NumPy makes of one golden, in the dtype of its weights."""

    def __init__(self, weights: Weights, golden: TrainingGolden) -> None:
        """Prepare; nothing is computed yet.

        Args:
            weights: The base, in the dtype of the computation.
            golden: Adapter, batches, and inputs of isolated stages.
        """
        self.weights, self.dtype, self.config = weights, weights.dtype, weights.config
        self.batches = golden.batches
        self.adapter = golden.adapter_for(self.config)
        self.rslora = golden.adapter_for(self.config, RSLORA)
        self._golden = golden

    def isolated(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every stage that can be fed what the golden was fed."""
        yield from self._deltas(self.adapter, "plain", self.adapter.targets)
        yield from self._deltas(self.rslora, "rslora", [f"layers.0.{name}" for name in SHARED_INPUT])
        logits = self._split(self._given("plain/adapted_logits"))
        for case, smoothing in SMOOTHINGS.items():
            yield from self._losses(case, logits, smoothing)
        yield from self._block_gradients()
        for step in (1, 2):
            state = self.initial() if step == 1 else self._state_after(step - 1)
            source = "plain/{}.gradient.{}" if step == 1 else f"step {step}/{{}}.given.{{}}"
            grads = {n: self._given(_key(source, n)) for n in self.adapter.flat()}
            yield from self._shown(step, *self.optimizer_step(step, grads, state, OPTIMIZER, OPTIMIZER.learning_rate))
        yield from self._schedules()
        yield f"plain/{with_stage(MERGED, 'merged_weight')}", MergedWeights(self.weights, self.adapter).array(MERGED)

    def chained(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every run from its beginning."""
        batch = self.batches[0]
        traces = [self._run(ids, self.adapter) for ids, _ in batch.each_document()]
        yield from self._chained_deltas(traces)
        logits = [trace["logits"] for trace in traces]
        yield "plain/adapted_logits", np.concatenate(logits)
        of_rslora = [self._run(ids, self.rslora)["logits"] for ids, _ in batch.each_document()]
        yield "rslora/adapted_logits", np.concatenate(of_rslora)
        for case, smoothing in SMOOTHINGS.items():
            yield from self._losses(case, logits, smoothing)
        yield from self._gradients("plain", self.adapter)
        yield from self._gradients("zero_b", with_zero_b(self.adapter))
        yield from self._steps()
        yield from self._curve()
        yield from self.merged()

    def merged(self) -> Iterator[tuple[str, np.ndarray]]:
        """Logits of the model with the adapter merged in."""
        merged, documents = MergedWeights(self.weights, self.adapter), self.batches[0].each_document()
        rows = [forward(ids, merged, KVCache(self.config, self.dtype)) for ids, _ in documents]
        yield "plain/merged_logits", np.concatenate(rows)

    def initial(self) -> OptimizerState:
        """The stored adapter, and moments of zero."""
        flat = {name: array.astype(self.dtype) for name, array in self.adapter.flat().items()}
        return OptimizerState(flat, *({n: np.zeros_like(a) for n, a in flat.items()} for _ in range(2)))

    def optimizer_step(
        self, step: int, grads: Parameters, state: OptimizerState, recipe: OptimizerRecipe, rate: float
    ) -> tuple[float, OptimizerState]:
        """Clip and update.

        Args:
            step: Counted from 1.
            grads: Before clipping.
            state: Before the step.
            recipe: Settings.
            rate: Learning rate of the step.

        Returns:
            The norm before clipping, and the state after the step.
        """
        clipped, norm = adamw.clip_by_norm(grads, max_norm=recipe.max_norm)
        made = {
            name: adamw.adamw_step(
                state.parameters[name], grad, state.m[name], state.v[name],
                step=step, lr=rate, betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay,
            )
            for name, grad in clipped.items()
        }  # fmt: skip
        return norm, OptimizerState(*({name: parts[i] for name, parts in made.items()} for i in range(3)))

    def _given(self, key: str) -> np.ndarray:
        return self._golden.given(key).astype(self.dtype)

    def _split(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Rows of all documents of the first batch, taken apart."""
        lengths = [len(ids) for ids, _ in self.batches[0].each_document()]
        return np.split(tokens, np.cumsum(lengths)[:-1])

    def _adapted(self, adapter: Adapter) -> AdaptedWeights:
        return AdaptedWeights(self.weights, adapter)

    def _run(self, ids: np.ndarray, adapter: Adapter) -> Arrays:
        trace: Arrays = {}

        def keep(name: str, array: np.ndarray) -> np.ndarray:
            trace[name] = array
            return array

        forward(ids, self._adapted(adapter), KVCache(self.config, self.dtype), keep=keep)
        return trace

    def _delta(self, matrix: LoraMatrix, x: np.ndarray) -> np.ndarray:
        return matrix.added(x, linear(x, matrix.base))

    def _deltas(self, adapter: Adapter, case: str, names: Sequence[str] | Mapping) -> Iterator[tuple[str, np.ndarray]]:
        weights = self._adapted(adapter)
        for name in names:
            _, layer, short = name.split(".")
            x = self._given(f"plain/l{layer}.{INPUT_OF[short]}")
            yield f"{case}/l{layer}.lora_delta.{short}", self._delta(weights[name], x)

    def _chained_deltas(self, traces: Sequence[Arrays]) -> Iterator[tuple[str, np.ndarray]]:
        weights = self._adapted(self.adapter)
        for name in self.adapter.targets:
            _, layer, short = name.split(".")
            parts = [self._delta(weights[name], trace[f"l{layer}.{INPUT_OF[short]}"]) for trace in traces]
            yield f"plain/l{layer}.lora_delta.{short}", np.concatenate(parts)

    def _losses(self, case: str, logits: Sequence[np.ndarray], smoothing: float) -> Iterator[tuple[str, np.ndarray]]:
        sums, each = [], []
        for rows, (_, labels) in zip(logits, self.batches[0].each_document(), strict=True):
            wanted = shifted(labels)
            sums.append(cross_entropy(rows, wanted, label_smoothing=smoothing))
            for row in np.flatnonzero(wanted != IGNORED):
                alone = slice(row, row + 1)
                each.append(cross_entropy(rows[alone], wanted[alone], label_smoothing=smoothing)[0])
        yield f"{case}/token_losses", np.asarray(each, self.dtype)
        total, n_trained = map(sum, zip(*sums, strict=True))
        yield f"{case}/loss", np.asarray(total / n_trained, self.dtype)

    def _block_gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each block alone: what goes in and the gradient of what comes out are the golden's."""
        parts = [self._block_gradients_of(i, document) for i, document in enumerate(self.batches[0].each_document())]
        yield from _joined(parts)

    def _block_gradients_of(self, index: int, document: tuple[np.ndarray, np.ndarray]) -> Arrays:
        weights, n_layers = self._adapted(self.adapter), self.config.n_layers
        given = {key: self._split(self._given(f"plain/{key}"))[index] for key in _block_keys(n_layers)}
        grads = {"gradient.last_block_out": self._head_gradient(given["last_block_out"], document[1])}
        for i in range(n_layers):
            above = "gradient.last_block_out" if i == n_layers - 1 else f"l{i + 1}.gradient.block_in"
            found = page.block_gradients(given[above], given[f"l{i}.block_in"], i, weights)
            wanted = {name: array for name, array in found.items() if "layers." in name or name == f"l{i}.block_in"}
            grads |= {with_stage(name, "gradient"): array for name, array in wanted.items()}
        return grads

    def _head_gradient(self, last: np.ndarray, labels: np.ndarray) -> np.ndarray:
        eps, name = self.config.rms_norm_eps, "embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        normed = rms_norm(last, self.weights["final_norm"], eps=eps)
        logits, n_trained = linear(normed, self.weights[name]), self.batches[0].n_trained
        d_logits = cross_entropy_backward(logits, shifted(labels), label_smoothing=0.0, n_trained=n_trained)
        d_normed = page.projection_backward(d_logits, "lm_head", normed, self.weights[name], lambda name, array: array)
        return rms_norm_backward(d_normed, last, self.weights["final_norm"], eps=eps)

    def _gradients(self, case: str, adapter: Adapter) -> Iterator[tuple[str, np.ndarray]]:
        """Of every trained tensor, as a training step has them, and of block inputs."""
        batch, weights = self.batches[0], self._adapted(adapter)
        _, grads = numpy_step.loss_and_gradients(self.weights, adapter, [batch], label_smoothing=0.0)
        for name, grad in grads.items():
            yield f"{case}/{with_stage(name, 'gradient')}", grad
        if case == "plain":
            last = f"l{self.config.n_layers - 1}.block_out"
            names = {last: "last_block_out"} | {f"l{i}.block_in": f"l{i}.block_in" for i in range(self.config.n_layers)}
            parts = []
            for ids, labels in batch.each_document():
                _, found = numpy_step.of_document(
                    ids, shifted(labels), weights, label_smoothing=0.0, n_trained=batch.n_trained
                )
                parts.append({with_stage(key, "gradient"): found[name] for name, key in names.items()})
            yield from _joined(parts)

    def _steps(self) -> Iterator[tuple[str, np.ndarray]]:
        state = self.initial()
        for step in range(1, max(STEPS_SHOWN) + 1):
            batches = step_batches(self.batches, step, 1)
            _, grads = self._step_gradients(batches, state, 0.0)
            norm, state = self.optimizer_step(step, grads, state, OPTIMIZER, OPTIMIZER.learning_rate)
            if step in STEPS_SHOWN:
                yield from self._shown(step, norm, state)

    def _curve(self) -> Iterator[tuple[str, np.ndarray]]:
        state, losses, norms = self.initial(), [], []
        for step in range(1, CURVE.n_steps + 1):
            batches = step_batches(self.batches, step, CURVE.accumulation)
            loss, grads = self._step_gradients(batches, state, SMOOTHING)
            rate = schedules.learning_rate(
                step - 1, schedule="cosine", peak=CURVE.optimizer.learning_rate,
                warmup_steps=CURVE.warmup_steps, total_steps=CURVE.n_steps,
            )  # fmt: skip
            norm, state = self.optimizer_step(step, grads, state, CURVE.optimizer, rate)
            losses.append(loss)
            norms.append(norm)
        yield "curve/loss_curve", np.asarray(losses)
        yield "curve/norm_curve", np.asarray(norms)

    def _step_gradients(
        self, batches: Sequence[Batch], state: OptimizerState, smoothing: float
    ) -> tuple[float, Arrays]:
        return numpy_step.loss_and_gradients(
            self.weights, self.adapter, batches, label_smoothing=smoothing, parameters=state.parameters
        )

    def _shown(self, step: int, norm: float, state: OptimizerState) -> Iterator[tuple[str, np.ndarray]]:
        yield f"step {step}/grad_norm", np.asarray(norm, self.dtype)
        for stage, arrays in zip(STATE, (state.parameters, state.m, state.v), strict=True):
            for name, array in arrays.items():
                yield f"step {step}/{with_stage(name, stage)}", array

    def _state_after(self, step: int) -> OptimizerState:
        """The golden's."""
        names = self.adapter.flat()
        return OptimizerState(
            *({n: self._given(f"step {step}/{with_stage(n, stage)}") for n in names} for stage in STATE)
        )

    def _schedules(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in SCHEDULES:
            rates = [
                schedules.learning_rate(
                    step, schedule=name, peak=OPTIMIZER.learning_rate,
                    warmup_steps=SCHEDULE_WARMUP, total_steps=SCHEDULE_STEPS,
                )
                for step in range(SCHEDULE_STEPS)
            ]  # fmt: skip
            yield f"{name}/learning_rate", np.asarray(rates)


def _block_keys(n_layers: int) -> list[str]:
    keys = [f"l{i}.{name}" for i in range(n_layers) for name in ("block_in", "gradient.block_in")]
    return [*keys, "last_block_out", "gradient.last_block_out"]


def _key(source: str, name: str) -> str:
    _, layer, rest = name.split(".", 2)
    return source.format(f"l{layer}", rest)


def _joined(parts: Sequence[Arrays]) -> Iterator[tuple[str, np.ndarray]]:
    """Documents put together: gradients of tensors add up, those of tokens stand in a row."""
    for key in parts[0]:
        arrays = [part[key] for part in parts]
        of_tokens = key.endswith(("block_in", "last_block_out"))
        yield f"plain/{key}", np.concatenate(arrays) if of_tokens else np.sum(arrays, axis=0)
