"""Does a trained model stop? It answers a row of its own data, until it stops or says far more than the row.

Source: unsloth issue 416, trl issues 1623 and 734 (a model that never stops).
"""

from collections.abc import Collection
from itertools import islice
from pathlib import Path

import numpy as np

from llorch.apps.doctor.adapter.finding import OK, WARNING, AdapterFinding
from llorch.files import Weights
from llorch.model.model import Model
from llorch.runtime.errors import FormatError
from llorch.stages.comparison import NOT_RUN
from llorch.training.batch import IGNORED, Example
from llorch.training.data import TrainingData
from llorch.training.data.ends import say_unnamed, trained_ends
from llorch.training.merge_files import LARGEST_COMPARED

_ROWS, _MORE = 50, 64  # looked at; tokens beyond twice the answer of the row


def stops(data: TrainingData, adapter: Path, weights: Weights) -> AdapterFinding:
    """Generate from the shortest of the first rows that end."""
    n_weights = sum(int(np.prod(weights.shape(name))) for name in weights)
    if n_weights > LARGEST_COMPARED:
        return AdapterFinding("stops", NOT_RUN, f"{n_weights / 1e6:.0f} M weights: takes long")
    try:
        model = Model(weights)
        ends = trained_ends(data.train, model)
        model.add_adapter("examined", adapter, any_base=True)
    except FormatError as error:
        return AdapterFinding("stops", NOT_RUN, str(error))
    rows = [row for row in islice(data.train, _ROWS) if any(label in ends for label in row.labels)]
    if not rows:
        return AdapterFinding("stops", NOT_RUN, f"none of the first {_ROWS} examples trains a token that ends a text")
    return _answer(min(rows, key=lambda row: len(row.ids)), ends, model)


def _answer(row: Example, ends: Collection[int], model: Model) -> AdapterFinding:
    """Check that the model ends its answer to a training example within about twice the length of the example's."""
    first = max(1, next(place for place, label in enumerate(row.labels) if label != IGNORED))
    n_most = 2 * (len(row.ids) - first) + _MORE
    tokens = model.generate(row.ids[:first], max_tokens=n_most, ignore_eos=True, adapter="examined")
    n_tokens = 0
    for n_tokens, token in enumerate(tokens, start=1):
        if token.id in ends:
            unnamed = say_unnamed([token.id], model)
            text = f"the answer to {row.source} ends after {n_tokens} tokens"
            return AdapterFinding("stops", WARNING if unnamed else OK, f"{text}; {unnamed}" if unnamed else text)
    text = f"the answer to {row.source} does not end within {n_tokens} tokens (in the data: {len(row.ids) - first})"
    return AdapterFinding("stops", WARNING, f"{text}; train longer, or check with llorch data show that the rows end")
