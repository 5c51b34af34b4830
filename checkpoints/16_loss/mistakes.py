"""Wrong code for the loss, by the name of the known mistake. Each must fail under its name.

The page shows one of them, and llorch cannot make the rest. It makes all others from `llorch.diagnosis.mistakes`.
"""

import numpy as np


def labels_as_they_are(labels: np.ndarray) -> np.ndarray:
    return labels.copy()


WRONG = {"shifted": {"loss-labels-not-shifted": labels_as_they_are}}
UNTYPED: dict[str, str] = {}
