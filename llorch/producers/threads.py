"""How many CPU threads an engine gets when nobody says."""

import math
import os

from llorch.config import ModelConfig
from llorch.weights.names import inventory

SMALL = 20_000_000  # parameters


def n_threads_for(config: ModelConfig) -> int:
    """One thread for a small model, all for others.

    The engines' threads wait for each other by spinning, some hundred times per token. With a small model there is
    nothing to win, and with two engines in one process on a busy machine a run was seen to take fifteen times as
    long.

    Args:
        config: The model.

    Returns:
        Number of threads, at least 1.
    """
    n_parameters = sum(math.prod(weight.shape) for weight in inventory(config).values())
    return 1 if n_parameters < SMALL else os.cpu_count() or 1
