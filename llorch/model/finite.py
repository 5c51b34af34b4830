"""Numbers that are not finite show in the logits; a second pass that looks at every stage names where they begin."""

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from llorch.runtime.errors import NonFiniteRun

Look = Callable[[str, np.ndarray], None]  # name and array of a stage


def name_first_stage(run: Callable[[Look], object], *, where: object, dtype: str) -> NoReturn:
    """Run the same tokens again, showing every stage, and raise a NonFiniteRun of the first that is not finite."""

    def look(name: str, array: np.ndarray) -> None:
        masked = name.endswith("attn_scores")  # -inf hides a later key there
        n_wrong = array.size - np.count_nonzero(np.isfinite(array) | (np.isneginf(array) & masked))
        if n_wrong:
            raise NonFiniteRun(name, f"{n_wrong} of {array.size} values", where=where, dtype=dtype)

    with np.errstate(all="ignore"):
        run(look)
    raise NonFiniteRun("logits", "in the first run only, not when computed again", where=where, dtype=dtype)
