"""Wrong code for accumulation, by the name of the known mistake."""

import numpy as np


def mean_of_means(loss_sums: np.ndarray, n_trained: np.ndarray, grad_sums: np.ndarray) -> tuple[float, np.ndarray]:
    return (loss_sums / n_trained).mean(), (grad_sums / n_trained[:, None].astype(np.float32)).mean(axis=0)


def sum_of_means(loss_sums: np.ndarray, n_trained: np.ndarray, grad_sums: np.ndarray) -> tuple[float, np.ndarray]:
    loss, grad = 0.0, np.zeros_like(grad_sums[0])
    for batch_loss, n, batch_grad in zip(loss_sums, n_trained, grad_sums, strict=True):  # loss.backward() for each
        loss += batch_loss / n
        grad += batch_grad / np.float32(n)
    return loss, grad


def zero_grad_inside(loss_sums: np.ndarray, n_trained: np.ndarray, grad_sums: np.ndarray) -> tuple[float, np.ndarray]:
    loss, grad = 0.0, np.zeros_like(grad_sums[0])
    for batch_loss, n, batch_grad in zip(loss_sums, n_trained, grad_sums, strict=True):
        loss, grad = batch_loss / n, batch_grad / np.float32(n)
    return loss, grad


WRONG = {
    "accumulated": {
        "accumulation-mean-of-means": mean_of_means,
        "accumulation-not-divided": sum_of_means,
        "accumulation-last-batch-only": zero_grad_inside,
    }
}
UNTYPED: dict[str, str] = {}
