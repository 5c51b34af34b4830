"""Exercises of training: lessons 15 to 20. A function that returns all gradients returns them as one flat array.

As in `forward`, `our_x` is llorch's function, and adapters get `call` (the learner's function) and `right` (llorch's).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llorch.apps.learn.exercise import Call, Exercise, by_keyword
from llorch.apps.learn.exercises.forward import dense
from llorch.files import Weights
from llorch.files.tensor_names import interleave as our_interleave
from llorch.lora.adapter import Adapter
from llorch.lora.config import LoraConfig
from llorch.lora.targets import LoraTarget
from llorch.ops.attention import attention_context_backward as our_context_backward
from llorch.ops.attention import attention_probs_backward as our_probs_backward
from llorch.ops.attention import attention_scores_backward as our_scores_backward
from llorch.ops.cross_entropy import IGNORED
from llorch.ops.cross_entropy import cross_entropy as our_cross_entropy
from llorch.ops.cross_entropy import cross_entropy_backward as our_cross_entropy_backward
from llorch.ops.cross_entropy import shifted as our_shifted
from llorch.ops.linear import linear_backward as our_linear_backward
from llorch.ops.lora import LoraMatrix
from llorch.ops.lora import lora_backward as our_lora_backward
from llorch.ops.lora import lora_delta as our_lora_delta
from llorch.ops.rms_norm import rms_norm_backward as our_rms_norm_backward
from llorch.ops.rope import rope_backward as our_rope_backward
from llorch.ops.swiglu import swiglu_backward as our_swiglu_backward
from llorch.training.adamw import adamw_step as our_adamw_step
from llorch.training.adamw import clip_by_norm as our_clip_by_norm
from llorch.training.adamw import learning_rate as our_learning_rate
from llorch.training.batch import Batch

Array = np.ndarray
Arrays = Mapping[str, Array]
STATE = ("parameters", "first_moment", "second_moment")  # stages of an optimizer step


def lora_scaling(r: int, lora_alpha: float, own_r: int | None, own_alpha: float | None, use_rslora: bool) -> float:
    """Compute the LoRA scaling of one matrix; own_r and own_alpha override r and lora_alpha."""
    rank, alpha = r if own_r is None else own_r, lora_alpha if own_alpha is None else own_alpha
    return alpha / (rank**0.5 if use_rslora else rank)


def masked_labels(ids: Array, learned: Array) -> Array:
    """Label every token, (seq,): with its own id if it is in the loss, else with -100."""
    return np.where(learned, ids, IGNORED)


def lora_backward(
    grad: Array, x: Array, weight: Array, lora_A: Array, lora_B: Array, scaling: float
) -> tuple[Array, Array, Array]:
    """Compute the backward pass of W x + s B A x: gradients with respect to x, A and B."""
    d_x, d_A, d_B = our_lora_backward(grad, x, lora_A, lora_B, scaling=scaling)
    return our_linear_backward(grad, weight) + d_x, d_A, d_B


def clip_by_norm(grads: Arrays, max_norm: float) -> tuple[Array, float]:
    """Clip all gradients; return them as one flat array, and their norm before clipping."""
    clipped, norm = our_clip_by_norm(grads, max_norm=max_norm)
    return in_one_row(clipped), norm


def adamw_step(
    param: Array, grad: Array, m: Array, v: Array, step: int, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Compute one AdamW step of one tensor; return the new tensor, m and v."""
    settings: dict[str, Any] = {"step": step, "lr": lr, "eps": eps, "weight_decay": weight_decay}
    return our_adamw_step(param, grad, m, v, betas=(beta1, beta2), **settings)


def learning_rate(step: int, schedule: str, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Compute the learning rate of a step; `step` counts from 0."""
    settings: dict[str, Any] = {"schedule": schedule, "peak": peak}
    return our_learning_rate(step, warmup_steps=warmup_steps, total_steps=total_steps, **settings)


def accumulated(loss_sums: Array, n_trained: Array, grad_sums: Array) -> tuple[float, Array]:
    """Compute loss and gradient (parameters,) of a step from the sums over each micro-batch."""
    n = n_trained.sum()
    return loss_sums.sum() / n, grad_sums.sum(axis=0) / grad_sums.dtype.type(n)


def merged(weight: Array, lora_A: Array, lora_B: Array, scaling: float) -> Array:
    """Merge the adapter into the matrix, and round once."""
    return (weight + scaling * lora_B.astype(np.float64) @ lora_A).astype(weight.dtype)


def gguf_alpha(lora_alpha: float, scalings: Array, ranks: Array) -> float:
    """Find one alpha such that alpha / r is the scaling of every matrix; return 0 if there is none."""
    alphas = {float(np.float32(scale * rank)) for scale, rank in zip(scalings, ranks, strict=True)}
    return alphas.pop() if len(alphas) == 1 else 0.0


def in_one_row(arrays: Arrays) -> Array:
    """Concatenate the numbers of all arrays in a flat array."""
    return np.concatenate([array.ravel() for array in arrays.values()])


def _split_row(row: Array, like: Arrays) -> dict[str, Array]:
    """Split a flat array into arrays with the names and shapes of `like`."""
    ends = np.cumsum([array.size for array in like.values()])[:-1]
    pairs = zip(like.items(), np.split(row, ends), strict=True)
    return {name: chunk.reshape(array.shape) for (name, array), chunk in pairs}


def _scaling_adapted(call: Call, right: Call) -> Call:
    def adapted(config: LoraConfig, target: LoraTarget) -> float:
        rank, alpha = config.rank_of(target), config.alpha_of(target)
        return float(call(
            r=config.r, lora_alpha=config.lora_alpha, own_r=None if rank == config.r else rank,
            own_alpha=None if alpha == config.lora_alpha else alpha, use_rslora=config.use_rslora,
        ))  # fmt: skip

    return adapted


def _labels_adapted(call: Call, right: Call) -> Call:
    def adapted(batch: Batch) -> Iterator[tuple[Array, Array]]:
        for ids, labels in right(batch):
            yield ids, call(ids=ids, learned=labels != IGNORED)

    return adapted


def _cross_entropy_adapted(call: Call, right: Call) -> Call:
    def adapted(logits: Array, labels: Array, *, label_smoothing: float) -> tuple[float, int]:
        loss_sum, n_trained = call(logits=logits, labels=labels, label_smoothing=label_smoothing)
        return float(loss_sum), int(n_trained)

    return adapted


def _lora_backward_adapted(call: Call, right: Call) -> Call:
    """Let llorch call the learner's function for LoRA without DoRA and dropout, and `right` for other matrices."""

    def adapted(matrix: LoraMatrix, grad: Array, x: Array) -> tuple[Array, dict[str, Array]]:
        lora = matrix.lora
        if lora is None or lora.magnitude is not None or lora.mask is not None:
            return right(matrix, grad, x)
        d_x, d_A, d_B = call(
            grad=grad, x=x, weight=dense(matrix.base), lora_A=lora.lora_A, lora_B=lora.lora_B, scaling=lora.scaling
        )
        return d_x, {"lora_A": d_A, "lora_B": d_B}

    return adapted


def _residual_adapted(call: Call, right: Call) -> Call:
    """Let llorch call the learner's function with the gradient at the output and that through the block's branches."""
    return lambda d_out, *args, **kwargs: call(grad=d_out, through=right(d_out, *args, **kwargs) - d_out)


def _clip_adapted(call: Call, right: Call) -> Call:
    def adapted(grads: Arrays, *, max_norm: float) -> tuple[dict[str, Array], float]:
        clipped, norm = call(grads=grads, max_norm=max_norm)
        return _split_row(clipped, grads), float(norm)

    return adapted


def _adamw_adapted(call: Call, right: Call) -> Call:
    return lambda param, grad, m, v, *, betas, **settings: call(
        param=param, grad=grad, m=m, v=v, beta1=betas[0], beta2=betas[1], **settings
    )


def _accumulated_adapted(call: Call, right: Call) -> Call:
    """Let llorch call the learner's function with sums of each batch, llorch's means times the token count."""

    def adapted(weights: Weights, adapter: Adapter, batches: Sequence[Batch], **kwargs: object) -> tuple[float, Arrays]:
        means = [right(weights, adapter, [batch], **kwargs) for batch in batches]
        counts = np.array([batch.n_trained for batch in batches])
        losses = np.array([loss for loss, _ in means]) * counts
        rows = np.stack([in_one_row(grads) for _, grads in means])
        loss, row = call(loss_sums=losses, n_trained=counts, grad_sums=rows * counts[:, None].astype(rows.dtype))
        return float(loss), _split_row(row, means[0][1])

    return adapted


def _merged_adapted(call: Call, right: Call) -> Call:
    """Let llorch call the learner's function for LoRA without DoRA on matrices other than embeddings."""

    def adapted(weight: Array, adapter: Adapter, name: str, **kwargs: object) -> Array:
        tensors = adapter.tensors[name]
        if tensors.magnitude is not None or adapter.targets[name].is_embedding:
            return right(weight, adapter, name, **kwargs)
        return call(weight=weight, lora_A=tensors.lora_A, lora_B=tensors.lora_B, scaling=adapter.scaling(name))

    return adapted


def _alpha_adapted(call: Call, right: Call) -> Call:
    def adapted(adapter: Adapter) -> float | None:
        scalings = np.array([adapter.scaling(name) for name in adapter.targets])
        ranks = np.array([adapter.config.rank_of(target) for target in adapter.targets.values()])
        return float(call(lora_alpha=adapter.config.lora_alpha, scalings=scalings, ranks=ranks)) or None

    return adapted


def _backward(name: str, reference: Call, returns: tuple[str, ...], module: str, *parameters: str) -> Exercise:
    replaces = f"llorch.ops.{module}.{name}"
    return Exercise(
        name=name, reference=reference, returns=returns, replaces=replaces, adapt=by_keyword(*parameters),
        stages=("gradient",),
    )  # fmt: skip


LORA_SCALING = Exercise(
    name="lora_scaling", reference=lora_scaling, returns=("scaling",), stages=("lora_delta", "adapted_logits"),
    replaces="llorch.lora.config.LoraConfig.scaling_of", adapt=_scaling_adapted,
)  # fmt: skip
LORA_DELTA = Exercise(
    name="lora_delta", returns=("delta",), stages=("lora_delta", "adapted_logits"),
    reference=lambda x, lora_A, lora_B, scaling: our_lora_delta(x, lora_A, lora_B, scaling=scaling),
    replaces="llorch.ops.lora.lora_delta", adapt=by_keyword("x", "lora_A", "lora_B"),
)  # fmt: skip
MASKED_LABELS = Exercise(
    name="masked_labels", reference=masked_labels, returns=("labels",), stages=("token_losses", "loss"),
    replaces="llorch.training.batch.Batch.each_document", adapt=_labels_adapted,
)  # fmt: skip
SHIFTED = Exercise(
    name="shifted", reference=lambda labels: our_shifted(labels), returns=("wanted",), stages=("token_losses", "loss"),
    replaces="llorch.ops.cross_entropy.shifted", adapt=by_keyword("labels"),
)  # fmt: skip
CROSS_ENTROPY = Exercise(
    name="cross_entropy", returns=("loss_sum", "n_trained"), stages=("token_losses", "loss"),
    reference=lambda logits, labels, label_smoothing: our_cross_entropy(
        logits, labels, label_smoothing=label_smoothing
    ),
    replaces="llorch.ops.cross_entropy.cross_entropy", adapt=_cross_entropy_adapted,
)  # fmt: skip
CROSS_ENTROPY_BACKWARD = _backward(
    "cross_entropy_backward",
    lambda logits, labels, label_smoothing, n_trained: our_cross_entropy_backward(
        logits, labels, label_smoothing=label_smoothing, n_trained=n_trained
    ),
    ("d_logits",), "cross_entropy", "logits", "labels",
)  # fmt: skip
LORA_BACKWARD = Exercise(
    name="lora_backward", reference=lora_backward, returns=("d_x", "d_A", "d_B"), stages=("gradient",),
    replaces="llorch.ops.lora.LoraMatrix.backward", adapt=_lora_backward_adapted,
)  # fmt: skip
SWIGLU_BACKWARD = _backward(
    "swiglu_backward", lambda grad, gate, up: our_swiglu_backward(grad, gate, up), ("d_gate", "d_up"), "swiglu",
    "grad", "gate", "up",
)  # fmt: skip
RMS_NORM_BACKWARD = _backward(
    "rms_norm_backward", lambda grad, x, weight, eps: our_rms_norm_backward(grad, x, weight, eps=eps), ("d_x",),
    "rms_norm", "grad", "x", "weight",
)  # fmt: skip
ATTENTION_CONTEXT_BACKWARD = _backward(
    "attention_context_backward", lambda grad, probs, v: our_context_backward(grad, probs, v), ("d_probs", "d_v"),
    "attention", "grad", "probs", "v",
)  # fmt: skip
ATTENTION_PROBS_BACKWARD = _backward(
    "attention_probs_backward", lambda grad, probs: our_probs_backward(grad, probs), ("d_scores",), "attention",
    "grad", "probs",
)  # fmt: skip
ATTENTION_SCORES_BACKWARD = _backward(
    "attention_scores_backward", lambda grad, q, k: our_scores_backward(grad, q, k), ("d_q", "d_k"), "attention",
    "grad", "q", "k",
)  # fmt: skip
ROPE_BACKWARD = _backward(
    "rope_backward", lambda grad, cos, sin: our_rope_backward(grad, cos, sin), ("d_x",), "rope", "grad", "cos", "sin"
)
RESIDUAL_BACKWARD = Exercise(
    name="residual_backward", reference=lambda grad, through: grad + through, returns=("d_x",), stages=("gradient",),
    replaces="llorch.model.backward.block_backward", adapt=_residual_adapted,
)  # fmt: skip
BACKWARD = (  # in the order of the backward pass
    CROSS_ENTROPY_BACKWARD, LORA_BACKWARD, SWIGLU_BACKWARD, RMS_NORM_BACKWARD, ATTENTION_CONTEXT_BACKWARD,
    ATTENTION_PROBS_BACKWARD, ATTENTION_SCORES_BACKWARD, ROPE_BACKWARD, RESIDUAL_BACKWARD,
)  # fmt: skip
CLIP_BY_NORM = Exercise(
    name="clip_by_norm", reference=clip_by_norm, returns=("clipped", "norm"), stages=("grad_norm", *STATE),
    replaces="llorch.training.adamw.clip_by_norm", adapt=_clip_adapted,
)  # fmt: skip
ADAMW_STEP = Exercise(
    name="adamw_step", reference=adamw_step, returns=("param", "m", "v"), stages=STATE,
    replaces="llorch.training.adamw.adamw_step", adapt=_adamw_adapted,
)  # fmt: skip
LEARNING_RATE = Exercise(
    name="learning_rate", reference=learning_rate, returns=("rate",), stages=("learning_rate",),
    replaces="llorch.training.adamw.learning_rate",
    adapt=lambda call, right: lambda step, **settings: float(call(step=step, **settings)),
)  # fmt: skip
ACCUMULATED = Exercise(
    name="accumulated", reference=accumulated, returns=("loss", "gradient"), stages=("loss_curve", "norm_curve"),
    replaces="llorch.training.numpy_step.loss_and_gradients", adapt=_accumulated_adapted,
)  # fmt: skip
MERGED = Exercise(
    name="merged", reference=merged, returns=("weight",), stages=("merged_weight", "merged_logits", "exported_logits"),
    replaces="llorch.lora.merge.merged_matrix", adapt=_merged_adapted,
)  # fmt: skip
INTERLEAVE = Exercise(
    name="interleave", reference=lambda rows, n_heads: our_interleave(rows, n_heads), returns=("rows",),
    stages=("adapter_file", "exported_logits"), replaces="llorch.files.tensor_names.interleave",
    adapt=by_keyword("rows", "n_heads"),
)  # fmt: skip
GGUF_ALPHA = Exercise(
    name="gguf_alpha", reference=gguf_alpha, returns=("alpha",), stages=("adapter_file", "exported_logits"),
    replaces="llorch.lora.gguf_format.common_alpha", adapt=_alpha_adapted,
)  # fmt: skip
