"""Typed reading of values that a file gave us, with errors that name the key, the value and the file."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np

from llorch.runtime.errors import ErrorCode, FormatError, cut

_REQUIRED = object()
_SCALAR = (bool, int, float, str, type(None))
_LARGEST = sys.float_info.max  # an integer of a JSON file may be larger than any float


def shortest(value: float) -> float:
    """Undo the widening of a float32 from a GGUF file: 9.999999747378752e-06 was 1e-05; other numbers stay."""
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


class Recorded(dict[str, object]):
    """Values that record which keys were asked for, also inside of objects; a copy records for both."""

    def __init__(self, values: Mapping[str, object]) -> None:
        """Copy parsed values; nothing was asked for yet."""
        nested = {key: Recorded(value) for key, value in values.items() if isinstance(value, Mapping)}
        super().__init__({**values, **nested})
        self._plain = values
        self._asked: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self._asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:
        """Return a value, or the default."""
        self._asked.add(key)
        return super().get(key, default)

    def unread(self, prefix: str = "") -> dict[str, object]:
        """Return the values that nobody asked for, nulls left out; keys of an object inside have its key in front."""
        unread: dict[str, object] = {}
        for key, value in self.items():
            if key not in self._asked and value is not None:
                unread[prefix + key] = self._plain[key]
            elif isinstance(value, Recorded):
                unread |= value.unread(f"{prefix}{key}.")
        return unread


class Fields:
    """A mapping of unknown values; every getter returns the wanted type or raises `FormatError`."""

    def __init__(
        self,
        values: Mapping[str, object],
        path: str | Path,
        *,
        prefix: str = "",
        defaults: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Wrap values as parsed, null as absent; `prefix` goes before each key, `defaults` before those of a getter."""
        self.values = values
        self.path = path
        self.defaults = defaults
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Tell if there is a value, other than null."""
        return self.values.get(self._prefix + key) is not None

    def full(self, key: str) -> str:
        """Return the key with its prefix."""
        return self._prefix + key

    def is_null(self, key: str) -> bool:
        """Tell if the key is there and holds null."""
        return (self._prefix + key, None) in self.values.items()  # which `Recorded` does not take for reading

    def refuse_null(self, *keys: str) -> None:
        """Refuse an explicit null where it does not mean the default."""
        for key in filter(self.is_null, keys):
            raise self.error("Malformed", key, "a value, or no such key", None)

    def error(self, code: ErrorCode, key: str, expected: str, actual: object) -> FormatError:
        """Make the error for one key."""
        actual = shortest(actual) if isinstance(actual, float) else actual
        return FormatError(code, f"{self._prefix}{key}: expected {expected}, got {cut(repr(actual))}", path=self.path)

    def integer(self, key: str, *, default: object = _REQUIRED, low: int | None = None) -> int:
        """Read an integer (no bool, no float), at least `low` if given."""
        value = self._get(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error("Malformed", key, "an integer", value)
        if low is not None and value < low:
            raise self.error("OutOfRange", key, f"at least {low}", value)
        return value

    def number(self, key: str, *, default: object = _REQUIRED, low: float | None = None) -> float:
        """Read a finite number, at least `low` if given."""
        value = self._get(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error("Malformed", key, "a number", value)
        if not -_LARGEST <= value <= _LARGEST or (low is not None and value < low):
            raise self.error("OutOfRange", key, "a finite number" if low is None else f"at least {low}", value)
        return float(value)

    def text(self, key: str, *, default: object = _REQUIRED) -> str:
        """Read a string."""
        value = self._get(key, default, "a string")
        if not isinstance(value, str):
            raise self.error("Malformed", key, "a string", value)
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """Read true or false."""
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error("Malformed", key, "true or false", value)
        return value

    def section(self, key: str) -> "Fields | None":
        """Read the object below `key`; None if it is absent or null."""
        value = self.values.get(self._prefix + key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error("Malformed", key, "an object", value)
        return Fields(value, self.path)

    def refuse(self, key: str, *, unless: tuple[object, ...], default: object) -> None:
        """Refuse a value that would change the computation in a way llorch does not have."""
        value = self._get(key, default, "")
        if not isinstance(value, _SCALAR) or value not in unless:
            raise self.error("Unsupported", key, " or ".join(repr(v) for v in unless), value)

    @contextmanager
    def naming_the_file(self) -> Iterator[None]:
        """Add the file to errors raised by code that does not know it."""
        try:
            yield
        except FormatError as error:
            if error.path is not None:
                raise
            raise FormatError(error.code, error.message, path=self.path, offset=error.offset) from None

    def _get(self, key: str, default: object, expected: str) -> object:
        """Return a value, or `default` if it is absent or null; raise FormatError if it is required."""
        value = self.values.get(self._prefix + key)
        if value is None:
            value = self.defaults.get(key)
        if value is None:
            if default is _REQUIRED:
                raise FormatError("Missing", f"{self._prefix}{key}: expected {expected}, got nothing", path=self.path)
            return default
        return value
