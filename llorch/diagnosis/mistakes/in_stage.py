"""How a stage calls the function that a mistake replaces, so that the wrong function gives the stage's wrong array.

The functions are those that lessons have learners write, called as learners' functions are: by the names of their
arguments. What surrounds the call in the stage stays right.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.planting import Replacement

InStage = Callable[[Replacement, Any, str], np.ndarray]  # of the wrong function, a stage's inputs, the stage

IN_STAGE: Mapping[str, InStage] = {}
