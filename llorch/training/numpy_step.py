"""Loss and gradients of one optimizer step in NumPy: the reference for faster code.

Each document has its own forward and backward pass, so rows need no padding and no mask that separates documents.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from llorch.files import Weights
from llorch.lora.adapted_weights import AdaptedWeights
from llorch.lora.adapter import Adapter
from llorch.model.backward import as_is, recorder
from llorch.model.blocks import forward
from llorch.model.blocks.backward import backward
from llorch.model.cache import KVCache
from llorch.model.forward import Keep
from llorch.ops.cross_entropy import IGNORED, cross_entropy, cross_entropy_backward, shifted
from llorch.training.batch import Batch

Gradients = dict[str, np.ndarray]


def loss_and_gradients(
    weights: Weights,
    adapter: Adapter,
    batches: Sequence[Batch],
    *,
    label_smoothing: float,
    parameters: Mapping[str, Float[np.ndarray, "..."]] | None = None,
) -> tuple[float, Gradients]:
    """Run forward and backward over all batches of one optimizer step, without dropout.

    Return the mean loss over the tokens in the loss of all batches, and its gradient for every tensor of the adapter,
    in the dtype of the weights. `parameters` replace all tensors of the adapter, for example by float64 copies; names
    as in `Adapter.flat`. UserError, by `cross_entropy`, if a document has no token in the loss.
    """
    adapted = AdaptedWeights(weights, adapter, parameters=parameters)
    n_trained = sum(int((targets != IGNORED).sum()) for _, targets in _documents(batches))
    loss, total = 0.0, {name: np.zeros(array.shape, weights.dtype) for name, array in adapter.flat().items()}
    for ids, targets in _documents(batches):
        loss_sum, grads = document_gradients(
            ids, targets, adapted, label_smoothing=label_smoothing, n_trained=n_trained
        )
        loss += loss_sum / n_trained
        total = {name: array + grads[name] for name, array in total.items()}
    return loss, total


def mean_loss(
    weights: Weights,
    adapter: Adapter,
    batches: Iterable[Batch],
    *,
    parameters: Mapping[str, Float[np.ndarray, "..."]] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Compute the mean loss over all tokens in the loss, without smoothing; None if `stop` returned True.

    `parameters`: see `loss_and_gradients`.
    """
    adapted, total, n_trained = AdaptedWeights(weights, adapter, parameters=parameters), 0.0, 0
    for ids, targets in _documents(batches):
        if stop():
            return None
        logits = forward(ids, adapted, KVCache(adapted.config, adapted.dtype))
        loss_sum, n_tokens = cross_entropy(logits, targets, label_smoothing=0.0)
        total, n_trained = total + loss_sum, n_trained + n_tokens
    return total / n_trained


def _documents(batches: Iterable[Batch]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids of every document, and the label of each row of its logits."""
    return ((ids, shifted(labels)) for batch in batches for ids, labels in batch.each_document())


def document_gradients(
    ids: np.ndarray,
    targets: np.ndarray,
    weights: Weights,
    *,
    label_smoothing: float,
    n_trained: int,
    keep: Keep = as_is,
    keep_gradient: Keep = as_is,
) -> tuple[float, Gradients]:
    """Compute the summed loss of one document, and the gradients of its share of the step's mean loss, see `backward`.

    `targets` has the label of each row of logits, see `shifted`; `n_trained` counts the tokens in the loss of the step.
    `keep(name, array)` returns the activation to record and to go on with; `keep_gradient` does so for gradients.
    """
    trace: dict[str, np.ndarray] = {}
    logits = forward(ids, weights, KVCache(weights.config, weights.dtype), keep=recorder(trace, keep))
    loss_sum, _ = cross_entropy(logits, targets, label_smoothing=label_smoothing)
    d_logits = cross_entropy_backward(logits, targets, label_smoothing=label_smoothing, n_trained=n_trained)
    return loss_sum, backward(d_logits, ids, trace, weights, keep=keep_gradient)
