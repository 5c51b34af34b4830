"""Inputs of the training goldens: the adapter, the batches, and every setting of the runs.

PEFT uses them to compute the goldens; llorch uses them to reproduce the goldens. Ranks and scales differ between
matrices, and for one matrix also between layers, so that exchanging two of them changes the result. Rows of a batch
differ in length and in the number of tokens in the loss, so that a mean over row means differs from the mean over
tokens. An array is compared isolated, computed from the golden's inputs, or in a complete (chained) run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llorch.families.config import ModelConfig
from llorch.lora.adapter import Adapter, LoraTensors, checked
from llorch.lora.config import LAYER_TARGETS, LoraConfig
from llorch.lora.targets import LoraTarget
from llorch.training.adamw import learning_rate
from llorch.training.batch import IGNORED, PADDING, Batch

SMOOTHING = 0.1
STEPS_SHOWN = (1, 2, 10)  # optimizer steps that are compared after a complete run
STEPS_ALONE = (1, 2)  # optimizer steps that are compared isolated, too: the first has no state before it
STATE = ("first_moment", "second_moment", "parameters")  # stages that an optimizer step updates


@dataclass(frozen=True)
class OptimizerRecipe:
    """Settings of AdamW and clipping."""

    learning_rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 0.05  # below the gradient norm of every step, so that every step is clipped


@dataclass(frozen=True)
class CurveRecipe:
    """Settings of the training curve: losses and gradient norms of a run of `n_steps` optimizer steps."""

    n_steps: int = 30
    accumulation: int = 2
    warmup_steps: int = 5
    optimizer: OptimizerRecipe = OptimizerRecipe(learning_rate=5e-3, max_norm=1.0)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        peak, warmup, total = self.optimizer.learning_rate, self.warmup_steps, self.n_steps
        return learning_rate(step - 1, schedule="cosine", peak=peak, warmup_steps=warmup, total_steps=total)


OPTIMIZER = OptimizerRecipe()
CURVE = CurveRecipe()
SCHEDULES = ("cosine", "linear", "constant")
SCHEDULE_STEPS, SCHEDULE_WARMUP = 12, 3  # steps of each learning-rate schedule that is compared

LORA = LoraConfig(
    r=3,
    lora_alpha=4.0,
    target_modules=LAYER_TARGETS,
    rank_pattern={
        "layers.1.self_attn.v_proj": 2, "q_proj": 2, "k_proj": 4, "gate_proj": 2, "down_proj": 2,
    },
    alpha_pattern={
        "q_proj": 3.0, "k_proj": 2.0, "v_proj": 5.0, "gate_proj": 2.5, "up_proj": 6.0, "down_proj": 1.4,
    },
)  # fmt: skip
RSLORA = replace(LORA, use_rslora=True)
SMOOTHINGS = {"plain": 0.0, "smoothed": SMOOTHING}  # case -> label smoothing
SHARED_INPUT = ("q_proj", "k_proj", "v_proj")  # matrices of layer 0 whose input does not depend on the adapter
MERGED = "layers.0.k_proj"  # the matrix whose merged weight is stored


def make_adapter(config: ModelConfig) -> Adapter:
    """Create the initial adapter of every run, equal on every machine; B is not zero, or dL/dA would be."""
    bits = np.random.Philox(key=config.vocab_size)
    targets = LORA.targets(config).items()
    tensors = {name: _initial_tensors(bits, target, LORA.rank_of(target)) for name, target in targets}
    return checked(LORA, tensors, config)


def with_zero_b(adapter: Adapter) -> Adapter:
    """Copy an adapter and set B to zero, as PEFT does at the start of training."""
    tensors = {name: LoraTensors(lora.lora_A, np.zeros_like(lora.lora_B)) for name, lora in adapter.tensors.items()}
    return replace(adapter, tensors=tensors)


@dataclass(frozen=True)
class StoredBatch:
    """One stored batch: token ids of every row, and the number of prompt tokens (1 or more) at its start."""

    ids: Sequence[Sequence[int]]
    prompts: Sequence[int]

    def batch(self) -> Batch:
        """Build the batch: one document per row, right padding, prompt tokens masked in the labels."""
        shape = len(self.ids), max(map(len, self.ids))
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions, documents = np.full(shape, PADDING, np.int64), np.full(shape, PADDING, np.int64)
        for index, (row, prompt) in enumerate(zip(self.ids, self.prompts, strict=True)):
            ids[index, : len(row)] = row
            labels[index, prompt : len(row)] = row[prompt:]
            positions[index, : len(row)] = np.arange(len(row))
            documents[index, : len(row)] = 0
        return Batch(ids, labels, positions, documents, np.arange(len(ids)))


def step_batches(batches: Sequence[Batch], step: int, accumulation: int) -> list[Batch]:
    """Select the micro-batches of optimizer step `step`, counted from 1; the steps use all batches in turn."""
    first = (step - 1) * accumulation
    return [batches[(first + index) % len(batches)] for index in range(accumulation)]


def _initial_tensors(bits: np.random.Philox, target: LoraTarget, rank: int) -> LoraTensors:
    """Draw both factors A and B, neither of them zero."""
    lora_A = _signed(bits, rank, target.n_in) * np.float32(target.n_in**-0.5)
    return LoraTensors(lora_A, _signed(bits, target.n_out, rank) * np.float32(0.25))


def _signed(bits: np.random.Philox, *shape: int) -> np.ndarray:
    """Draw numbers between -1 and 1, exact in float32, from a bit stream that NumPy guarantees to be stable."""
    raw = bits.random_raw(int(np.prod(shape))) >> 40  # 24 of 64 bits, as many as float32 has digits
    return (raw / 2.0**23 - 1).reshape(shape).astype(np.float32)
