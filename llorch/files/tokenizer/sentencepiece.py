"""SentencePiece-style BPE (Llama 1 and 2, TinyLlama): the best-scored pair of neighbours merges first.

A space becomes U+2581. Of two pairs with the same score the left one merges first. The `tokenizers` library cannot do
this: its BPE gives each split of a token its own rank, so "a" + "aaa" and "aaa" + "a" cannot tie, and Llama 2 gives all
runs of spaces the same score. Its Unigram model finds the best-scored segmentation of the whole text, a different rule.

Source: llama.cpp src/llama-vocab.cpp, `llm_tokenizer_spm_session`.
"""

import re
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice

SPACE = "\u2581"  # stands for a space in token texts
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # token of one byte, for text without a token
_CACHED_WORDS = 65_536  # words in the cache, at most
_CACHED_LENGTH = 32  # longer words rarely repeat


class SentencePieceBPE:
    """Text encoder of a vocabulary with scores."""

    def __init__(self, ids: Mapping[str, int], scores: Mapping[str, float], byte_ids: Mapping[int, int]) -> None:
        """Rank tokens by score; `ids` has no control tokens: text must not become one; `byte_ids` is the fallback."""
        rank_by_score = {score: rank for rank, score in enumerate(sorted(set(scores.values()), reverse=True))}
        self._ranks = {text: rank_by_score[score] for text, score in scores.items()}
        self._ids = ids
        self._byte_ids = byte_ids
        # If no token has a space after another character, words are independent of each other.
        crossing = re.compile(f"[^{SPACE}]{SPACE}")
        separable = not any(crossing.search(text) for text in ids)
        self._words = re.compile(f"{SPACE}*[^{SPACE}]*" if separable else "(?s).*")
        self._cache: dict[str, tuple[list[int], list[int]]] = {}  # by word

    def encode_spans(self, text: str) -> tuple[list[int], Iterator[int]]:
        """Encode text with its space prefix, without special tokens: ids, and the character index of each."""
        word_texts = self._words.findall(text.replace(" ", SPACE))
        words = [self._cache.get(word) or self._encode_word(word) for word in word_texts]
        ids = [token_id for ids, _ in words for token_id in ids]
        ends = accumulate((length for _, lengths in words for length in lengths), initial=0)
        return ids, islice(ends, len(ids))

    def _encode_word(self, word: str) -> tuple[list[int], list[int]]:
        """Encode a word: ids, and characters per id; of several ids for one character only the last has 1."""
        ids: list[int] = []
        lengths: list[int] = []
        for piece in merge(word, self._ranks):
            token_id = self._ids.get(piece)
            piece_ids = [self._byte_ids[byte] for byte in piece.encode()] if token_id is None else [token_id]
            ids += piece_ids
            lengths += [0] * (len(piece_ids) - 1) + [len(piece)]
        if len(word) <= _CACHED_LENGTH and len(self._cache) < _CACHED_WORDS:
            self._cache[word] = ids, lengths
        return ids, lengths


def merge(text: str, ranks: Mapping[str, int]) -> list[str]:
    """Merge neighbouring characters and pieces, best rank first and leftmost among equals, until no pair is a token."""
    length = len(text)
    end = list(range(1, length + 1))  # end of the piece that starts here; 0 after its merge into the left piece
    previous = list(range(-1, length - 1))  # start of the piece to the left
    # An entry is rank * length + start of the left piece: one small integer that sorts as (rank, start).
    queue = [rank * length + i for i in range(length - 1) if (rank := ranks.get(text[i : i + 2])) is not None]
    heapify(queue)
    while queue:
        rank, left = divmod(heappop(queue), length)
        right = end[left]
        # An entry is stale if its left piece is merged or its pair has changed.
        if right in (0, length) or ranks.get(text[left : end[right]]) != rank:
            continue
        end[left] = stop = end[right]
        end[right] = 0
        if stop < length:
            previous[stop] = left
            if (rank := ranks.get(text[left : end[stop]])) is not None:
                heappush(queue, rank * length + left)
        if left and (rank := ranks.get(text[previous[left] : stop])) is not None:
            heappush(queue, rank * length + previous[left])
    return _walk(text, end)


def _walk(text: str, end: list[int]) -> list[str]:
    """Cut a text into pieces; `end` has the end of the piece that starts at each position."""
    pieces, start = [], 0
    while start < len(text):
        pieces.append(text[start : end[start]])
        start = end[start]
    return pieces
