"""Merge list of a BPE vocabulary: checks, and conversion to and from scores of SentencePiece tokens.

GGUF files have scores, tokenizer.json has merges. Merging by score joins the neighbours with the best-scored token;
merging by rank joins the best-ranked pair. Both agree if the merges are all splits of each token into two tokens, the
best-scored token first. transformers generates the merges of a SentencePiece model in this way. Merges of a vocabulary
trained with merges are different, and no scores are equivalent to them.

Source: transformers convert_slow_tokenizer.py, `generate_merges` (the order of merges of equal score).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from llorch.runtime.errors import FormatError

Merge = tuple[str, str]


def check_merges(merges: Iterable[object], ids: Mapping[str, int], *, key: str, path: str | Path) -> list[Merge]:
    """Split merges ("left right" or [left, right]); Malformed unless two tokens join to a third, Duplicate."""
    pairs: dict[Merge, None] = {}
    for index, merge in enumerate(merges):
        left, right = _split_merge(merge)
        if left not in ids or right not in ids or left + right not in ids:
            expected = "expected two text tokens that join to a third, with one space between them"
            raise FormatError("Malformed", f"{key}: {expected}, got {_format_merge(merge)} at index {index}", path=path)
        pairs[left, right] = None
        if len(pairs) == index:
            message = f"{key}: expected different merges, got {_format_merge(merge)} a second time at index {index}"
            raise FormatError("Duplicate", message, path=path)
    return list(pairs)


def _split_merge(merge: object) -> tuple[str, str]:
    match merge:
        case bytes():
            left, _, right = merge.decode("utf-8", "surrogateescape").partition(" ")
        case str():
            left, _, right = merge.partition(" ")
        case [str(left), str(right)]:
            pass
        case _:
            return "", ""
    return left, right


def _format_merge(merge: object) -> str:
    text = repr(merge)
    return text if len(text) <= 80 else text[:77] + "..."


def merges_of_scores(scores: Mapping[str, float]) -> list[Merge]:
    """Return every split of a token into two tokens, the best-scored token first.

    `scores` is in the order of the ids. Among equal scores the longer left part comes first, so that runs of one
    character grow from the left, as in merging by score.
    """
    cuts = [(text, cut) for text in scores for cut in range(1, len(text))]
    merges = [(text[:cut], text[cut:]) for text, cut in cuts if text[:cut] in scores and text[cut:] in scores]
    return sorted(merges, key=lambda merge: (-scores[merge[0] + merge[1]], -len(merge[0]), -len(merge[1])))


def scores_of_merges(merges: Sequence[Merge], texts: Collection[str], *, path: Path) -> dict[str, float]:
    """Return scores that are equivalent to merges, which are sorted by priority.

    The first token has score 0, later ones lower scores. Tokens with interleaved merges share a score, tokens without
    a merge have the lowest. Unsupported if the merges are not all splits of their tokens.
    """
    texts = frozenset(texts)
    _require_all(merges, texts, path)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, (left, right) in enumerate(merges):
        first.setdefault(left + right, index)
        last[left + right] = index
    scores, score, last_open = {}, 1.0, -1
    for text, index in first.items():  # in the order of their first merge
        score -= index > last_open  # a new score after the last merge of all earlier tokens
        last_open = max(last_open, last[text])
        scores[text] = score
    return {text: scores.get(text, score - 1) for text in texts}


def _require_all(merges: Sequence[Merge], texts: frozenset[str], path: Path) -> None:
    """Raise Unsupported if a pair of tokens that joins to a token is missing."""
    listed = set(merges)
    cuts = ((text[:cut], text[cut:]) for text in texts for cut in range(1, len(text)))
    missing = [merge for merge in cuts if merge[0] in texts and merge[1] in texts and merge not in listed]
    if missing:
        pair = " + ".join(map(repr, min(missing)))
        message = f"merges: expected every merge that makes a token, as in SentencePiece, got {len(missing)} fewer"
        raise FormatError("Unsupported", f"{message} (such as {pair}); a GGUF file cannot hold such merges", path=path)
