"""Lesson 19: many steps. A step of several micro-batches is one batch that did not fit into memory.

Write the body of `accumulated`, save, and check it: llorch learn check 19
With your functions of 15 to 18 it runs thirty steps: llorch learn check 19 --chain
"""

import numpy as np


def accumulated(loss_sums: np.ndarray, n_trained: np.ndarray, grad_sums: np.ndarray) -> tuple[float, np.ndarray]:
    """Compute loss and gradient of one optimizer step.

    Args:
        loss_sums: Sum of the losses of the learned tokens, for every micro-batch, (batches,), float64.
        n_trained: Number of learned tokens of every micro-batch, (batches,), int64.
        grad_sums: The gradient of every such sum, all tensors in one row, (batches, parameters), float32.

    Returns:
        The mean loss per learned token of the step, and its gradient (parameters,), float32.
    """
    raise NotImplementedError
