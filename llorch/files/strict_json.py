"""Strict parser for JSON from untrusted files.

Python's parser accepts NaN, Infinity and 1e400, keeps the last of duplicate keys, accepts lone surrogates in strings,
and fails with RecursionError or at a digit limit. Two tools that differ here would load different models.

Source: RFC 8259 (text), RFC 7493 I-JSON (the rules that this parser enforces).
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from llorch.files.foreign import HEAD, refuse_other_format
from llorch.files.mapped import read_regular
from llorch.runtime.errors import FormatError

_MAX_SETTINGS = 4 << 20  # bytes; a tokenizer_config.json with its chat template has about 60 thousand
_MAX_DEPTH = 32  # levels of nested objects and lists
_MAX_DIGITS = 64  # per number
_MAX_ITEMS = 1 << 20  # limits memory and time: an empty list takes 30 times its text in memory, a digit 100 ns


class _Refused(Exception):
    """Error in a hook of the parser, with the reason."""


def parse_json(data: bytes, *, what: str, path: str | Path, max_items: int = _MAX_ITEMS) -> object:
    """Parse a UTF-8 JSON text strictly: finite floats, no duplicate keys. The caller limits its size.

    Braces, brackets and commas, each at most `max_items`, are counted before parsing, also inside strings. FormatError:
    Malformed for anything that is not strict JSON, TooLarge for too many items.
    """
    if max(map(data.count, (b"{", b"[", b","))) > max_items:
        raise FormatError("TooLarge", f"{what} has more than {max_items} items", path=path)
    try:
        value = json.loads(data.decode("utf-8"), **_HOOKS)
        _check_tree(value)
    except UnicodeDecodeError as error:
        raise FormatError("Malformed", f"{what} is not UTF-8: {error.reason}", path=path, offset=error.start) from None
    except json.JSONDecodeError as error:
        raise FormatError("Malformed", f"{what} is not JSON: {error.msg}", path=path, offset=error.pos) from None
    except RecursionError:
        raise FormatError("Malformed", f"{what} is nested deeper than {_MAX_DEPTH}", path=path) from None
    except _Refused as error:
        raise FormatError("Malformed", f"{what}: {error}", path=path) from None
    return value


def read_json(path: Path, *, limit: int) -> dict[str, object]:
    """Read a JSON file with one object, at most `limit` bytes; raises like `read_regular` and `parse_json`."""
    data = read_regular(path, limit=limit)
    refuse_other_format(data[:HEAD], "a JSON file", path, text=False)
    # Real tokenizers have about one item per 20 bytes.
    value = parse_json(data, what="the file", path=path, max_items=max(_MAX_ITEMS, limit // 16))
    if not isinstance(value, dict):
        raise FormatError("Malformed", f"expected a JSON object, got {type(value).__name__}", path=path)
    return value


def read_settings(path: Path) -> dict[str, Any]:
    """Read a settings file of a model folder by `read_json`; an empty dict if there is no file."""
    return read_json(path, limit=_MAX_SETTINGS) if path.is_file() else {}


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a JSON number")


def _parse_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise _Refused(f"a number has {len(text)} digits, at most {_MAX_DIGITS} are read")
    return int(text)


def _parse_float(text: str) -> float:
    if len(text) > _MAX_DIGITS:
        raise _Refused(f"a number has {len(text)} digits, at most {_MAX_DIGITS} are read")
    number = float(text)
    if not math.isfinite(number):
        raise _Refused(f"{text} does not fit a float64")
    return number


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in keys or keys.add(key))
        raise _Refused(f"key {duplicate!r} occurs twice")
    return values


_HOOKS: dict[str, Any] = {
    "parse_constant": _refuse_constant,
    "parse_int": _parse_int,
    "parse_float": _parse_float,
    "object_pairs_hook": _object,
}


def _check_tree(value: object) -> None:
    """Check the depth and every string, without recursion."""
    level: Iterable[object] = [value]
    for _ in range(_MAX_DEPTH + 1):
        next_level: list[object] = []
        for node in level:
            if isinstance(node, dict):
                next_level.extend(node)
                next_level.extend(node.values())
            elif isinstance(node, list):
                next_level.extend(node)
            elif isinstance(node, str) and not node.isascii():
                _check_surrogates(node)
        if not next_level:
            return
        level = next_level
    raise _Refused(f"nested deeper than {_MAX_DEPTH}")


def _check_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _Refused("a string holds half of a surrogate pair") from None
