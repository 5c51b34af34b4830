"""Wrong code for accumulation, by the name of the known mistake.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def mean_of_means(loss_sums: np.ndarray, n_trained: np.ndarray, grad_sums: np.ndarray) -> tuple[float, np.ndarray]:
    return (loss_sums / n_trained).mean(), (grad_sums / n_trained[:, None].astype(np.float32)).mean(axis=0)


WRONG = {
    "accumulated": {
        "accumulation-mean-of-means": mean_of_means,
    }
}
UNTYPED: dict[str, str] = {}
