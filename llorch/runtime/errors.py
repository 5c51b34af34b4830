"""The exceptions that llorch raises on purpose, each with a message for the person who has to act on it."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

ErrorCode = (
    Literal["Truncated", "BadMagic", "Malformed", "Duplicate", "OutOfBounds", "TooLarge", "Unsafe"]  # of bytes
    | Literal["Missing", "Unexpected", "Shape", "DType", "OutOfRange", "NonFinite", "Inconsistent"]  # of what they mean
    | Literal["Unsupported", "BaseMismatch", "TemplateBudget", "TemplateError"]  # of its use
)

_MOST_QUOTED, _MOST_OF_WORD = 80, 200  # characters of a value, and of a list of names without a space
_LONG = re.compile(
    rf"""(?<!\w)(?P<quote>['"])(?:(?!(?P=quote)).){{{_MOST_QUOTED},}}(?P=quote)(?!\w)|\S{{{_MOST_OF_WORD + 1},}}""",
    re.DOTALL,
)

Guard = Literal["ids", "positions", "norm", "layout", "weights", "run"]


class UserError(ValueError):
    """Bad input: a file, an option or an argument. A plain ValueError is a bug of llorch."""


class FormatError(UserError):
    """A file or a folder that cannot be used, refused with one line that says what, where and why."""

    def __init__(
        self, code: ErrorCode, message: str, *, path: str | Path | None = None, offset: int | None = None
    ) -> None:
        """Build the one-line message: subject, what was expected, what was got, what to do.

        `code` is stable across releases; `path` is the file or folder at fault, `offset` the byte in it.
        """
        where = f"{path}: " if path is not None else ""
        at = f" (byte {offset})" if offset is not None else ""
        message = shortened(message)
        super().__init__(printable(f"{where}{code}: {message}{at}"))
        self.code: ErrorCode = code
        self.path = path
        self.offset = offset
        self.message = message


class CheckpointMismatch(AssertionError):
    """A stage whose numbers are not those of the golden."""


class GuardFailed(UserError):
    """A dump whose numbers say nothing beside ours: of other tokens, weights, or another run than is said."""

    def __init__(self, guard: Guard, message: str, *, source: str) -> None:
        """Build the one-line message; `guard` says which of them failed, `source` names the dump."""
        super().__init__(printable(f"{source}: {guard}: {shortened(message)}"))
        self.guard: Guard = guard


class NonFiniteRun(ArithmeticError):
    """A run whose numbers overflowed, although all weights are finite."""

    def __init__(self, stage: str, what: str, *, where: object, dtype: str) -> None:
        """Name the first stage that is not finite, what was seen there, model and adapter, and the run's dtype."""
        cause = f"weights, or the alpha of an adapter, are too large for {dtype}"
        super().__init__(f"{where}: {stage} is the first stage that is not finite ({what}); {cause}")
        self.stage = stage


class LearnerFault(Exception):
    """A part that cannot be gone on with: it raised, or returned no array of the right shape and dtype."""

    def __init__(self, part: str, said: str) -> None:
        """Name the learner's function and what it did; a cause, if any, holds the learner's frames."""
        super().__init__(f"{part}: {said}")


class MissingExtra(ImportError):
    """A package that the command needs and that is not installed."""

    def __init__(self, extra: str, package: str) -> None:
        """Name the extra of llorch that brings a package which could not be imported; "" if llorch alone brings it."""
        name, clone = (f"'llorch[{extra}]'", f"'.[{extra}]'") if extra else ("llorch", ".")
        super().__init__(
            f"{package} is not installed; get it with: pip install {name}, "
            f"or in a clone: pip install -c constraints.txt -e {clone}"
        )
        self.extra = extra
        self.package = package


class LeftOut(FileNotFoundError):
    """A built-in model, a golden or another file that the wheel leaves out; a clone and the sdist have it."""

    def __init__(self, subject: str) -> None:
        """Name the file; say how to get it."""
        super().__init__(f"{subject}; for the rest, install a clone or the unpacked sdist: pip install -e FOLDER")


class EngineDied(RuntimeError):
    """An engine of others whose process ended, or was silent for too long and ended by us."""


class RankFailed(RuntimeError):
    """What ended a run on another rank, or that the other ranks were lost."""

    def __init__(self, message: str, exit_code: int | None) -> None:
        """Repeat its line; the exit code is its, too, or None where nobody knows."""
        super().__init__(message)
        self.exit_code = exit_code


class RankLost(RankFailed):
    """A rank whose process ended, as far as the others know."""


class MissingDevice(RuntimeError):
    """A device, or an ability of it, that was asked for by name and is not there."""


def shortened(message: str) -> str:
    """Cut every long quoted value and every long word of a message, and tell the length that it had."""
    return _LONG.sub(lambda found: cut(found[0], _MOST_QUOTED if found["quote"] else _MOST_OF_WORD), message)


def cut(text: str, most: int = _MOST_QUOTED) -> str:
    """Return a text, or its beginning and its length where it has more than so many characters."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def printable(text: str) -> str:
    """Make foreign text safe to show: without control characters, line ends and marks that reorder a line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def decode_utf8(data: bytes, what: str, *, offset: int = 0) -> str:
    """Decode text that a person gave; ValueError names the first byte that is not UTF-8 and its place from `offset`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {offset + error.start}"
        raise UserError(f"{what}: expected UTF-8, got {found}; convert the text first") from None


def suggestion(word: str, known: Iterable[str]) -> str:
    """Suggest a known word for an unknown one, as the end of a message; empty if none is near.

    Of known names of several words the last word counts, of equal ones the last name.
    """
    names = {name.rpartition(" ")[2]: name for name in known}
    return "".join(f"; did you mean {names[near]!r}?" for near in get_close_matches(word, names, n=1))
