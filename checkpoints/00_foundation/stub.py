"""Lesson 00: from a file and a text to numbers. Three functions, in any order.

Write them, save, and check them: llorch learn check 00
llorch fills in the functions that you have not written.
"""

import numpy as np


def tensor_table(data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read the table of tensors of a GGUF file. All numbers in the file are little-endian.

    Args:
        data: The bytes of the whole file, (n,), uint8.

    Returns:
        names: As UTF-8 bytes, one name a line, no line break at the end, uint8.
        shapes: (tensors, 4), int64: slowest axis first (NumPy's order), zeros in front where there are fewer axes.
        types: (tensors,), int64: the number of each tensor's type, as stored.
        offsets: (tensors,), int64: where its bytes start, counted from the start of the file.
    """
    raise NotImplementedError


def merge(ids: np.ndarray, merges: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Join neighbouring pieces of a word until no listed pair is left.

    Args:
        ids: The word's single characters (or bytes) as numbers, (n,), int64.
        merges: Pairs that may be joined, (m, 3), int64: left piece, right piece, the piece that both make.
        ranks: Rank of each pair, (m,), int64. The lowest is joined first; among equal ranks, the leftmost in the word.

    Returns:
        The pieces that are left, (k,), int64.
    """
    raise NotImplementedError


def embedding(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Pick one row for every token.

    Args:
        ids: Token ids, (seq,), int64.
        table: One row for every token of the vocabulary, (vocab, hidden).

    Returns:
        (seq, hidden), in the dtype of the table.
    """
    raise NotImplementedError
