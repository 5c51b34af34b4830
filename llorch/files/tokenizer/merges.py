"""The merge list of a BPE vocabulary: checked, and made from the scores of SentencePiece tokens and back.

GGUF files hold scores, tokenizer.json holds merges. Merging by score takes the best-scored token that two neighbours
make; merging by rank takes the best-ranked pair. The two agree when the merges are all ways to cut each token in two,
the best-scored token first. That is how transformers makes the merges of a SentencePiece model. Of a vocabulary
trained with merges of its own they are not, and no score can stand for them.

Source: transformers convert_slow_tokenizer.py, `generate_merges` (the order of merges of equal score).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from llorch.runtime.errors import FormatError

Merge = tuple[str, str]


def check_merges(merges: Iterable[object], ids: Mapping[str, int], *, key: str, path: str | Path) -> list[Merge]:
    """Split merges ("left right", or a list of both); Malformed unless two tokens make a third, Duplicate if again."""
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
    """List every way to make a token of two others, the best-scored token first.

    Scores come in the order of the ids. Among equals the one with the longer left part counts first, so that runs of
    one character grow from the left, as they do by score.
    """
    cuts = [(text, cut) for text in scores for cut in range(1, len(text))]
    merges = [(text[:cut], text[cut:]) for text, cut in cuts if text[:cut] in scores and text[cut:] in scores]
    return sorted(merges, key=lambda merge: (-scores[merge[0] + merge[1]], -len(merge[0]), -len(merge[1])))


def scores_of_merges(merges: Sequence[Merge], texts: Collection[str], *, path: Path) -> dict[str, float]:
    """Find scores that merge as the merges, the most important first, do.

    0 for the token that is made first, then downwards; tokens whose merges are interleaved share one, a token that no
    merge makes has the lowest. Unsupported when the merges are not all ways to make their tokens.
    """
    texts = frozenset(texts)
    _require_all(merges, texts, path)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        first.setdefault(left + right, place)
        last[left + right] = place
    scores, score, open_until = {}, 1.0, -1
    for text, place in first.items():  # in the order of their places
        score -= place > open_until  # a new rank, once the merges of the tokens before are all done
        open_until = max(open_until, last[text])
        scores[text] = score
    return {text: scores.get(text, score - 1) for text in texts}


def _require_all(merges: Sequence[Merge], texts: frozenset[str], path: Path) -> None:
    """Refuse merges that leave out a pair of tokens whose join is a token."""
    known = set(merges)
    cuts = ((text[:cut], text[cut:]) for text in texts for cut in range(1, len(text)))
    absent = [merge for merge in cuts if merge[0] in texts and merge[1] in texts and merge not in known]
    if absent:
        shown = " + ".join(map(repr, min(absent)))
        message = f"merges: expected every merge that makes a token, as in SentencePiece, got {len(absent)} fewer"
        raise FormatError("Unsupported", f"{message} (such as {shown}); a GGUF file cannot hold such merges", path=path)
