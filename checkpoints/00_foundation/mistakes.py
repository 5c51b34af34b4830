"""Wrong embeddings, by the name of the known mistake. Each must fail under its name."""

import numpy as np


def ids_from_one(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    return table[(ids + 1) % len(table)]


def begins_twice(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    with_bos = np.concatenate([ids[:1], ids])
    return table[with_bos[: len(ids)]]


def axes_as_in_the_file(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    vocab, hidden = table.shape
    return np.ascontiguousarray(table.reshape(hidden, vocab)[:, ids].T)


def scaled_as_in_gemma(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    return (table[ids] * np.sqrt(table.shape[1])).astype(table.dtype)


WRONG = {
    "embedding": {
        "embedding-ids-off-by-one": ids_from_one,
        "embedding-first-token-twice": begins_twice,
        "embedding-dimensions-not-reversed": axes_as_in_the_file,
        "embedding-scaled": scaled_as_in_gemma,
    }
}
UNTYPED = {"embedding-from-lm-head": "the function gets its table and does not choose between the two"}
