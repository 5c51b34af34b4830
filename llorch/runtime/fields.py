"""Typed reading of values from untrusted files, with errors that name the key, the value and the file."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np

from llorch.runtime.errors import ErrorCode, FormatError, cut

_REQUIRED = object()  # default of a key that must be present
_SCALAR = (bool, int, float, str, type(None))
_LARGEST = sys.float_info.max  # an integer of a JSON file may be larger than any float


def shortest(value: float) -> float:
    """Return the shortest float for a widened float32, 1e-05 for 9.999999747378752e-06; other numbers stay."""
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


class ReadTrackingDict(dict[str, object]):
    """Dictionary that records which keys were read, also in nested objects."""

    def __init__(self, values: Mapping[str, object]) -> None:
        """Copy parsed values; no key is read yet."""
        nested = {key: ReadTrackingDict(value) for key, value in values.items() if isinstance(value, Mapping)}
        super().__init__({**values, **nested})
        self._values = values
        self._keys_read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self._keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:
        """Return a value, or the default."""
        self._keys_read.add(key)
        return super().get(key, default)

    def unread(self, prefix: str = "") -> dict[str, object]:
        """Return the values that were not read, without nulls; keys of nested objects have their path as prefix."""
        unread: dict[str, object] = {}
        for key, value in self.items():
            if key not in self._keys_read and value is not None:
                unread[prefix + key] = self._values[key]
            elif isinstance(value, ReadTrackingDict):
                unread |= value.unread(f"{prefix}{key}.")
        return unread


class Fields:
    """Typed access to parsed values; every getter returns its type or raises `FormatError`."""

    def __init__(
        self,
        values: Mapping[str, object],
        path: str | Path,
        *,
        prefix: str = "",
        defaults: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Wrap parsed values, null is absent. Each key gets the `prefix`; `defaults` override a getter's default."""
        self.values = values
        self.path = path
        self.defaults = defaults
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Check if there is a value other than null."""
        return self.values.get(self._prefix + key) is not None

    def full(self, key: str) -> str:
        """Return the key with its prefix."""
        return self._prefix + key

    def is_null(self, key: str) -> bool:
        """Check if the key exists and is null."""
        return (self._prefix + key, None) in self.values.items()  # `ReadTrackingDict` does not count this as a read

    def refuse_null(self, *keys: str) -> None:
        """Raise FormatError for an explicit null where null does not mean the default."""
        for key in filter(self.is_null, keys):
            raise self.error("Malformed", key, "a value, or no such key", None)

    def error(self, code: ErrorCode, key: str, expected: str, actual: object) -> FormatError:
        """Return the error for one key."""
        actual = shortest(actual) if isinstance(actual, float) else actual
        return FormatError(code, f"{self._prefix}{key}: expected {expected}, got {cut(repr(actual))}", path=self.path)

    def integer(self, key: str, *, default: object = _REQUIRED, low: int | None = None) -> int:
        """Read an integer (no bool, no float), at least `low` if it is not None."""
        value = self._get(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error("Malformed", key, "an integer", value)
        if low is not None and value < low:
            raise self.error("OutOfRange", key, f"at least {low}", value)
        return value

    def number(self, key: str, *, default: object = _REQUIRED, low: float | None = None) -> float:
        """Read a finite number, at least `low` if it is not None."""
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
        """Raise FormatError unless the value (else `default`) is one of `unless`, the values that llorch computes."""
        value = self._get(key, default, "")
        if not isinstance(value, _SCALAR) or value not in unless:
            raise self.error("Unsupported", key, " or ".join(repr(choice) for choice in unless), value)

    @contextmanager
    def adding_path(self) -> Iterator[None]:
        """Add the path to errors raised by code that does not know it."""
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
