"""What the training goldens are made of: the adapter, the rows, and every setting of the runs.

Both sides start from these: PEFT when goldens are made, ours when they are judged. Ranks and scales differ from matrix
to matrix, and one matrix of one layer from the others, so that no mix-up stays hidden. Rows differ in length, and so
do the numbers of learned tokens, so that a mean of means is not the mean.
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
STEPS_SHOWN = (1, 2, 10)  # of the optimizer
STEPS_ALONE = (1, 2)  # that are also judged alone
STATE = ("first_moment", "second_moment", "parameters")  # that a step starts from and leaves


@dataclass(frozen=True)
class OptimizerRecipe:
    """Settings of AdamW and clipping."""

    learning_rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 0.05  # below the norm of every step, so that clipping shows


@dataclass(frozen=True)
class CurveRecipe:
    """Settings of the run of N steps."""

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
SCHEDULE_STEPS, SCHEDULE_WARMUP = 12, 3

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
SHARED_INPUT = ("q_proj", "k_proj", "v_proj")  # of layer 0: what goes into them does not depend on the adapter
MERGED = "layers.0.k_proj"  # the matrix that is stored merged


def make_adapter(config: ModelConfig) -> Adapter:
    """Make the adapter that every run starts from, the same numbers on every machine: neither A nor B is zero."""
    bits = np.random.Philox(key=config.vocab_size)
    targets = LORA.targets(config).items()
    tensors = {name: _initial_tensors(bits, target, LORA.rank_of(target)) for name, target in targets}
    return checked(LORA, tensors, config)


def with_zero_b(adapter: Adapter) -> Adapter:
    """Copy the adapter as training starts it: A as it is, B zero."""
    tensors = {name: LoraTensors(t.lora_A, np.zeros_like(t.lora_B)) for name, t in adapter.tensors.items()}
    return replace(adapter, tensors=tensors)


@dataclass(frozen=True)
class StoredBatch:
    """One batch as it is stored: ids of every row, and how many tokens at its beginning (1 or more) are a prompt."""

    ids: Sequence[Sequence[int]]
    prompts: Sequence[int]

    def batch(self) -> Batch:
        """Build the batch as it is run: rows of one document each, padded at the end."""
        shape = len(self.ids), max(map(len, self.ids))
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions, documents = np.full(shape, PADDING, np.int64), np.full(shape, PADDING, np.int64)
        for i, (row, prompt) in enumerate(zip(self.ids, self.prompts, strict=True)):
            ids[i, : len(row)] = row
            labels[i, prompt : len(row)] = row[prompt:]
            positions[i, : len(row)] = np.arange(len(row))
            documents[i, : len(row)] = 0
        return Batch(ids, labels, positions, documents, np.arange(len(ids)))


def step_batches(batches: Sequence[Batch], step: int, accumulation: int) -> list[Batch]:
    """Select the micro-batches of an optimizer step, counted from 1; the steps use all batches in turn."""
    first = (step - 1) * accumulation
    return [batches[(first + i) % len(batches)] for i in range(accumulation)]


def _initial_tensors(bits: np.random.Philox, target: LoraTarget, rank: int) -> LoraTensors:
    """Draw both factors, neither of them zero."""
    lora_A = _signed(bits, rank, target.n_in) * np.float32(target.n_in**-0.5)
    return LoraTensors(lora_A, _signed(bits, target.n_out, rank) * np.float32(0.25))


def _signed(bits: np.random.Philox, *shape: int) -> np.ndarray:
    """Draw numbers between -1 and 1, exact in float32, from bits that NumPy promises never to change."""
    raw = bits.random_raw(int(np.prod(shape))) >> 40
    return (raw / 2.0**23 - 1).reshape(shape).astype(np.float32)
