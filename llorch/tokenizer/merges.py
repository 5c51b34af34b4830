"""The merge list of a BPE vocabulary: every merge joins two tokens to a third."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from llorch.errors import FormatError


def check_merges(
    merges: Iterable[object], ids: Mapping[str, int], *, key: str, path: str | Path
) -> list[tuple[str, str]]:
    """Split merges ("left right", or a list of the two), the most important first.

    FormatError: Malformed for one that is not two known tokens making a third, Duplicate for one seen before.
    """
    pairs: dict[tuple[str, str], None] = {}
    for index, merge in enumerate(merges):
        left, right = _split(merge)
        if left not in ids or right not in ids or left + right not in ids:
            expected = "expected two text tokens that join to a third, with one space between them"
            raise FormatError("Malformed", f"{key}: {expected}, got {_shown(merge)} at index {index}", path=path)
        pairs[left, right] = None
        if len(pairs) == index:
            message = f"{key}: expected different merges, got {_shown(merge)} again at index {index}"
            raise FormatError("Duplicate", message, path=path)
    return list(pairs)


def _split(merge: object) -> tuple[str, str]:
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


def _shown(merge: object) -> str:
    text = repr(merge)
    return text if len(text) <= 80 else text[:77] + "..."
