"""Lesson 19: many steps. A step of several micro-batches is one batch that did not fit into memory.

Write the body of `accumulated`, save, and check it: llorch learn check 19
With your parts of 15 to 18 it runs thirty steps: llorch learn check 19 --chain
"""

import numpy as np


def accumulated(loss_sums: np.ndarray, n_trained: np.ndarray, grad_sums: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss and gradient of one optimizer step.

    Args:
        loss_sums: Of every micro-batch the losses of its learned tokens, added up, (batches,), float64.
        n_trained: Of every micro-batch how many learned tokens that is, (batches,), int64.
        grad_sums: The gradient of every such sum, all tensors in one row, (batches, parameters), float32.

    Returns:
        The mean loss of a learned token of the step, and its gradient (parameters,), float32.
    """
    raise NotImplementedError
