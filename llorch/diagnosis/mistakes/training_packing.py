"""Known mistakes in packed rows, which hold several documents: each maps a right function of llorch to a wrong one.

llorch runs every document by itself. A trainer runs the row, and must mask the attention between documents. Rotations
depend on the distance of two tokens only, so positions may restart in every document or run on through the row.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake, training_mistake
from llorch.diagnosis.mistakes.planting import Function
from llorch.diagnosis.mistakes.training_loss import DOCUMENTS
from llorch.training.batch import PADDING, Batch

ROPE_TABLES = "llorch.ops.rope.rope_tables"


def documents_joined(*, starts_learned: bool) -> Mistake[Any]:
    """Make the mistake of rows without a mask between documents; positions run on, or restart with `along`.

    If `starts_learned`, the label of a document's first token is not masked.
    """
    row_positions = np.zeros(0, np.int64)  # of the row that runs at present, restarting in each document

    def join(right: Function) -> Function:
        def wrong(batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            nonlocal row_positions
            labels = np.where(batch.positions == 0, batch.ids, batch.labels) if starts_learned else batch.labels
            for row, is_token in enumerate(batch.documents != PADDING):
                if is_token.any():
                    row_positions = batch.positions[row, is_token]
                    yield batch.ids[row, is_token], labels[row, is_token]

        return wrong

    def restart(right: Function) -> Function:
        return lambda positions, **kw: right(row_positions, **kw)

    learned = ", and the first token of each document is learned from the document before it" if starts_learned else ""
    return training_mistake(
        "packed-documents-see-each-other", ("adapted_logits",), DOCUMENTS, join,
        f"The documents of a packed row see each other{learned}; a token attends to tokens of its own document only.",
        along=(ROPE_TABLES, restart),
    )  # fmt: skip


PACKING: tuple[Mistake[Any], ...] = tuple(documents_joined(starts_learned=learned) for learned in (False, True))
