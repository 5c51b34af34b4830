"""Mistakes of training on several ranks, injected into a step of one process: wrong sums, counts and divisors.

A dump does not tell the number of ranks and the rows of each. Therefore the usual numbers and both usual ways to
deal rows out are tried. They belong to the checkpoints of their stages, whose runs have one process.

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
from llorch.diagnosis.mistakes.training_gradients import GRADIENT
from llorch.diagnosis.mistakes.training_loss import STEP, divided_by_share
from llorch.diagnosis.mistakes.training_optimizer import CLIP
from llorch.files import Weights
from llorch.lora.adapter import LORA_A, LORA_B, Adapter
from llorch.model.forward import Keep
from llorch.ops.lora import Lora, lora_backward
from llorch.training.batch import Batch

Function = Callable[..., Any]
Deal = Callable[[int, int, int], Sequence[int]]  # rows, number of ranks, rank -> the rows that the rank has
N_RANKS = (2, 4, 8)
PROJECTION = "llorch.model.backward.projection_backward"
WHOLE = {  # matrix -> the factor that is not cut with it
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), LORA_A),
    **dict.fromkeys(("o_proj", "down_proj"), LORA_B),
}
DEALS: Mapping[str, Deal] = {
    "dealt in turn": lambda n_rows, n_ranks, rank: range(n_rows)[rank::n_ranks],
    "in consecutive blocks": lambda n_rows, n_ranks, rank: np.array_split(np.arange(n_rows), n_ranks)[rank].tolist(),
}


def gradient_of_one_rank(n_ranks: int, deal: Deal, rank: int) -> Function:
    """Use only the gradient of one rank's rows, divided by the number of tokens of all ranks."""

    def make(right: Function) -> Function:
        def wrong(weights: Weights, adapter: Adapter, batches: Sequence[Batch], **how: object) -> tuple[float, Mapping]:
            loss, whole = right(weights, adapter, batches, **how)
            shares = dealt(batches, n_ranks, deal)
            if rank >= len(shares):
                return loss, whole
            _, grads = right(weights, adapter, shares[rank], **how)
            share = _n_trained(shares[rank]) / _n_trained(batches)
            return loss, {name: grad * share for name, grad in grads.items()}

        return wrong

    return make


def divided_by_ranks(n_ranks: int) -> Function:
    """Average gradients over ranks whose losses were divided by the tokens of all ranks."""

    def make(right: Function) -> Function:
        def wrong(*given: object, **how: object) -> tuple[float, Mapping]:
            loss, grads = right(*given, **how)
            return loss, {name: grad / n_ranks for name, grad in grads.items()}

        return wrong

    return make


def norm_of_copies(n_ranks: int) -> Function:
    """Add up the squares of every rank's copy of a gradient."""

    def make(right: Function) -> Function:
        def wrong(grads: Mapping[str, np.ndarray], *, max_norm: float) -> tuple[dict[str, np.ndarray], float]:
            norm = right(grads, max_norm=math.inf)[1] * math.sqrt(n_ranks)
            factor = min(1.0, max_norm / (norm + 1e-6))
            return {name: grad * grad.dtype.type(factor) for name, grad in grads.items()}, norm

        return wrong

    return make


def factor_of_one_rank(n_ranks: int, rank: int) -> Function:
    """Use one rank's part of the gradient of a LoRA factor that all ranks of a sharded layer hold."""

    def make(right: Function) -> Function:
        def wrong(d_y: np.ndarray, name: str, x: np.ndarray, weight: Any, keep: Keep) -> np.ndarray:
            def kept(key: str, whole: np.ndarray) -> np.ndarray:
                lora, kind = weight.lora, key.rpartition(".")[2]
                given = (d_y, lora.kept(x), lora.lora_A, lora.lora_B)
                return keep(key, whole if WHOLE.get(name) != kind else _rank_gradient(kind, given, lora, n_ranks, rank))

            return right(d_y, name, x, weight, kept)

        return wrong

    return make


def _rank_gradient(kind: str, given: tuple[np.ndarray, ...], lora: Lora, n_ranks: int, rank: int) -> np.ndarray:
    d_y, x, lora_A, lora_B = given
    if kind == LORA_A:
        mine = np.array_split(np.arange(len(lora_B)), n_ranks)[rank]
        return lora_backward(d_y[:, mine], x, lora_A, lora_B[mine], scaling=lora.scaling)[1]
    mine = np.array_split(np.arange(lora_A.shape[1]), n_ranks)[rank]
    return lora_backward(d_y, x[:, mine], lora_A[:, mine], lora_B, scaling=lora.scaling)[2]


def dealt(batches: Sequence[Batch], n_ranks: int, deal: Deal) -> list[list[Batch]]:
    """Split the batches into the rows of each rank; ranks without a row to learn from are left out."""
    shares = ([rows_of_batch(b, deal(len(b.ids), n_ranks, rank)) for b in batches] for rank in range(n_ranks))
    learned = ([batch for batch in share if batch.n_trained] for share in shares)
    return [share for share in learned if share]


def rows_of_batch(batch: Batch, rows: Sequence[int]) -> Batch:
    """Select some rows of a batch."""
    return Batch(**{field.name: getattr(batch, field.name)[list(rows)] for field in fields(Batch)})


def _n_trained(batches: Sequence[Batch]) -> int:
    return sum(batch.n_trained for batch in batches)


def _loss_mistakes(n_ranks: int) -> Iterator[Mistake[Any]]:
    """Yield the mistakes in the loss of a mesh, one for each way to deal out the rows."""
    for how, deal in DEALS.items():
        yield training_mistake(
            "mesh-mean-of-rank-means", ("loss",), STEP, divided_by_share(partial(dealt, n_ranks=n_ranks, deal=deal)),
            f"Each of {n_ranks} ranks (rows {how}) divided its loss by its own number of tokens, and the means were "
            "averaged; the sum over all ranks is divided once, by the number of trained tokens on all ranks.",
        )  # fmt: skip


def _gradient_mistakes(n_ranks: int) -> Iterator[Mistake[Any]]:
    """Yield the mistakes in the sum of gradients over the ranks of a mesh, and in the norm of this sum."""
    for rank, (how, deal) in product(range(n_ranks), DEALS.items()):
        yield training_mistake(
            "mesh-gradient-not-summed", GRADIENT, STEP, gradient_of_one_rank(n_ranks, deal, rank),
            f"This is the gradient of rank {rank} alone ({n_ranks} ranks, rows {how}); the gradients of all ranks must "
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
    mistake for n_ranks in N_RANKS for of in (_loss_mistakes, _gradient_mistakes) for mistake in of(n_ranks)
)
