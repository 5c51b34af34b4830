"""Loss and gradients of one optimizer step in NumPy: the reference that faster paths are compared with.

Documents run one after the other, so nothing is masked or padded, and nothing can be seen that should not be.
"""

from collections.abc import Mapping, Sequence

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
    """Run forward and backward over all batches of one optimizer step; nothing is dropped out.

    Returns the mean loss of the trained tokens of all batches together, and its gradient by every tensor of the
    adapter, in the dtype of the weights. `parameters` are used in place of the adapter's own, named as in
    `Adapter.flat`. ValueError where a document has no token to train on.
    """
    adapted = AdaptedWeights(weights, adapter, parameters=parameters)
    documents = [(ids, shifted(labels)) for batch in batches for ids, labels in batch.each_document()]
    n_trained = sum(int((wanted != IGNORED).sum()) for _, wanted in documents)
    loss, total = 0.0, {name: np.zeros(array.shape, weights.dtype) for name, array in adapter.flat().items()}
    for ids, wanted in documents:
        part, grads = of_document(ids, wanted, adapted, label_smoothing=label_smoothing, n_trained=n_trained)
        loss += part / n_trained
        total = {name: array + grads[name] for name, array in total.items()}
    return loss, total


def of_document(
    ids: np.ndarray,
    wanted: np.ndarray,
    weights: Weights,
    *,
    label_smoothing: float,
    n_trained: int,
    keep: Keep = as_is,
    keep_gradient: Keep = as_is,
) -> tuple[float, Gradients]:
    """Sum of the losses of one document's trained tokens, and the gradient of their share of the step's mean.

    `wanted` is what each row of logits should predict, see `shifted`; `n_trained` counts the tokens of the whole step.
    The `keep` of `forward` and that of `backward` may replace the numbers.
    """
    trace: dict[str, np.ndarray] = {}
    logits = forward(ids, weights, KVCache(weights.config, weights.dtype), keep=recorder(trace, keep))
    loss_sum, _ = cross_entropy(logits, wanted, label_smoothing=label_smoothing)
    d_logits = cross_entropy_backward(logits, wanted, label_smoothing=label_smoothing, n_trained=n_trained)
    return loss_sum, backward(d_logits, ids, trace, weights, keep=keep_gradient)
