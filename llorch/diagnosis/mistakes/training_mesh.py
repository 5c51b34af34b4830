"""Mistakes of training on several ranks, injected into a step of one process: wrong sums, counts and divisors.

A dump does not have the number of ranks or the rows of each rank. So the diagnosis tries the usual numbers and both
usual distributions of rows. The runs of llorch that these mistakes change have one process.

Source: huggingface/transformers#48792 (attached after sharding), NVIDIA-NeMo/RL#3788 (norm),
meta-pytorch/torchtune#2172 (means of ranks), and modelscope/mcore-bridge#173 (a factor that all ranks have).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake, training_mistake
from llorch.diagnosis.mistakes.planting import Function
from llorch.diagnosis.mistakes.training_gradients import GRADIENT
from llorch.diagnosis.mistakes.training_loss import STEP, divided_by_share
from llorch.diagnosis.mistakes.training_optimizer import CLIP
from llorch.files import Weights
from llorch.lora.adapter import LORA_A, LORA_B, Adapter
from llorch.model.forward import Keep
from llorch.ops.lora import Lora, lora_backward
from llorch.training.batch import Batch

Deal = Callable[[int, int, int], Sequence[int]]  # (number of rows, number of ranks, rank) to the rank's rows
N_RANKS = (2, 4, 8)
PROJECTION = "llorch.model.backward.projection_backward"
COPIED = {  # matrix -> LoRA factor that tensor parallelism does not shard
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), LORA_A),
    **dict.fromkeys(("o_proj", "down_proj"), LORA_B),
}
DEALS: Mapping[str, Deal] = {
    "dealt in turn": lambda n_rows, n_ranks, rank: range(n_rows)[rank::n_ranks],
    "in consecutive blocks": lambda n_rows, n_ranks, rank: np.array_split(np.arange(n_rows), n_ranks)[rank].tolist(),
}


def gradient_of_one_rank(n_ranks: int, deal: Deal, rank: int) -> Function:
    """Use only the gradient of one rank's rows (`deal` distributes the rows), divided by the tokens on all ranks."""

    def make(right: Function) -> Function:
        def wrong(weights: Weights, adapter: Adapter, batches: Sequence[Batch], **kw: object) -> tuple[float, Mapping]:
            loss, all_grads = right(weights, adapter, batches, **kw)
            shares = by_rank(batches, n_ranks, deal)
            if rank >= len(shares):  # this rank has no token in the loss: no mistake
                return loss, all_grads
            _, grads = right(weights, adapter, shares[rank], **kw)
            weight = _n_trained(shares[rank]) / _n_trained(batches)
            return loss, {name: grad * weight for name, grad in grads.items()}

        return wrong

    return make


def divided_by_ranks(n_ranks: int) -> Function:
    """Average gradients over ranks although their losses were divided by the tokens of all ranks."""

    def make(right: Function) -> Function:
        def wrong(*args: object, **kw: object) -> tuple[float, Mapping]:
            loss, grads = right(*args, **kw)
            return loss, {name: grad / n_ranks for name, grad in grads.items()}

        return wrong

    return make


def norm_of_copies(n_ranks: int) -> Function:
    """Count each squared gradient once for every rank, which has a copy; clip by that norm."""

    def make(right: Function) -> Function:
        def wrong(grads: Mapping[str, np.ndarray], *, max_norm: float) -> tuple[dict[str, np.ndarray], float]:
            norm = right(grads, max_norm=math.inf)[1] * math.sqrt(n_ranks)
            factor = min(1.0, max_norm / (norm + 1e-6))
            return {name: grad * grad.dtype.type(factor) for name, grad in grads.items()}, norm

        return wrong

    return make


def factor_of_one_rank(n_ranks: int, rank: int) -> Function:
    """Use one rank's part of the gradient of a LoRA factor that is replicated in a sharded layer."""

    def make(right: Function) -> Function:
        def wrong(d_y: np.ndarray, name: str, x: np.ndarray, weight: Any, keep: Keep) -> np.ndarray:
            def keep_rank_part(key: str, grad: np.ndarray) -> np.ndarray:
                lora, kind = weight.lora, key.rpartition(".")[2]
                args = (d_y, lora.apply_dropout(x), lora.lora_A, lora.lora_B)
                return keep(key, grad if COPIED.get(name) != kind else _rank_gradient(kind, args, lora, n_ranks, rank))

            return right(d_y, name, x, weight, keep_rank_part)

        return wrong

    return make


def _rank_gradient(kind: str, arrays: tuple[np.ndarray, ...], lora: Lora, n_ranks: int, rank: int) -> np.ndarray:
    d_y, x, lora_A, lora_B = arrays
    if kind == LORA_A:
        rank_indices = np.array_split(np.arange(len(lora_B)), n_ranks)[rank]
        return lora_backward(d_y[:, rank_indices], x, lora_A, lora_B[rank_indices], scaling=lora.scaling)[1]
    rank_indices = np.array_split(np.arange(lora_A.shape[1]), n_ranks)[rank]
    return lora_backward(d_y, x[:, rank_indices], lora_A[:, rank_indices], lora_B, scaling=lora.scaling)[2]


def by_rank(batches: Sequence[Batch], n_ranks: int, deal: Deal) -> list[list[Batch]]:
    """Split the batches into the rows of each rank; omit ranks without a token in the loss."""
    shares = ([rows_of_batch(b, deal(len(b.ids), n_ranks, rank)) for b in batches] for rank in range(n_ranks))
    trained_shares = ([batch for batch in share if batch.n_trained] for share in shares)
    return [share for share in trained_shares if share]


def rows_of_batch(batch: Batch, rows: Sequence[int]) -> Batch:
    """Select some rows of a batch."""
    return Batch(**{field.name: getattr(batch, field.name)[list(rows)] for field in fields(Batch)})


def _n_trained(batches: Sequence[Batch]) -> int:
    return sum(batch.n_trained for batch in batches)


def _loss_mistakes(n_ranks: int) -> Iterator[Mistake[Any]]:
    """Yield the mistakes in the loss of a mesh, one for each distribution of rows."""
    for way, deal in DEALS.items():
        yield training_mistake(
            "mesh-mean-of-rank-means", ("loss",), STEP, divided_by_share(partial(by_rank, n_ranks=n_ranks, deal=deal)),
            f"Each of {n_ranks} ranks (rows {way}) divided its loss by its own number of tokens, and the means were "
            "averaged; the sum over all ranks is divided once, by the number of trained tokens on all ranks.",
        )  # fmt: skip


def _gradient_mistakes(n_ranks: int) -> Iterator[Mistake[Any]]:
    """Yield the mistakes in the sum of gradients over the ranks of a mesh, and in the norm of this sum."""
    for rank, (way, deal) in product(range(n_ranks), DEALS.items()):
        yield training_mistake(
            "mesh-gradient-not-summed", GRADIENT, STEP, gradient_of_one_rank(n_ranks, deal, rank),
            f"This is the gradient of rank {rank} alone ({n_ranks} ranks, rows {way}); the gradients of all ranks must "
            "be summed. They are not if the adapter was attached after the model was sharded.",
        )  # fmt: skip
    for rank in range(n_ranks):
        yield training_mistake(
            "mesh-replicated-factor-not-summed", GRADIENT, PROJECTION, factor_of_one_rank(n_ranks, rank),
            f"A LoRA factor copied to {n_ranks} ranks (A of q, k, v, gate and up, B of o and down) got only the part "
            f"of its gradient that rank {rank} computes; the parts of all ranks are summed.",
        )  # fmt: skip
    yield training_mistake(
        "mesh-divided-by-world-size", GRADIENT, STEP, divided_by_ranks(n_ranks),
        f"Gradients were averaged over {n_ranks} ranks, which is the default; each loss is already divided by the "
        "number of tokens on all ranks, so gradients are summed.",
    )  # fmt: skip
    yield training_mistake(
        "mesh-norm-counts-copies", ("grad_norm",), CLIP, norm_of_copies(n_ranks),
        f"The norm counts every gradient {n_ranks} times, once for each rank that has a copy; a replicated gradient "
        "counts once.",
    )  # fmt: skip


MESH: tuple[Mistake[Any], ...] = tuple(
    mistake for n_ranks in N_RANKS for mistakes in (_loss_mistakes, _gradient_mistakes) for mistake in mistakes(n_ranks)
)
