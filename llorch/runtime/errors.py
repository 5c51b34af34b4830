"""Exceptions of llorch, each with a message for the person who has to act on it."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

ErrorCode = (
    Literal["Truncated", "BadMagic", "Malformed", "Duplicate", "OutOfBounds", "TooLarge", "Unsafe"]  # bytes
    | Literal["Missing", "Unexpected", "Shape", "DType", "OutOfRange", "NonFinite", "Inconsistent"]  # content
    | Literal["Unsupported", "BaseMismatch", "TemplateBudget", "TemplateError"]  # use
)

_MAX_QUOTED, _MAX_WORD = 80, 200  # characters of a quoted value, and of a word without a space
_LONG = re.compile(  # a quoted value, or a word, that is too long
    rf"""(?<!\w)(?P<quote>['"])(?:(?!(?P=quote)).){{{_MAX_QUOTED},}}(?P=quote)(?!\w)|\S{{{_MAX_WORD + 1},}}""",
    re.DOTALL,
)

Guard = Literal["ids", "positions", "norm", "layout", "weights", "run"]  # checks that a dump is comparable


class UserError(ValueError):
    """Bad input: a file, an option or an argument. A plain ValueError is a bug of llorch."""


class FormatError(UserError):
    """Error of a file or folder that cannot be used: one line with the place, the reason and the fix."""

    def __init__(
        self, code: ErrorCode, message: str, *, path: str | Path | None = None, offset: int | None = None
    ) -> None:
        """Build the one-line message: subject, expected and actual value, what to do.

        `code` is stable across releases; `path` is the file or folder at fault, `offset` the byte in it.
        """
        location = f"{path}: " if path is not None else ""
        position = f" (byte {offset})" if offset is not None else ""
        message = shortened(message)
        super().__init__(printable(f"{location}{code}: {message}{position}"))
        self.code: ErrorCode = code
        self.path = path
        self.offset = offset
        self.message = message


class CheckpointMismatch(AssertionError):
    """Error of a stage (a named intermediate array) that differs from the golden, its stored reference output."""


class GuardFailed(UserError):
    """Error of a dump that is not comparable: other tokens, other weights, or another run than declared."""

    def __init__(self, guard: Guard, message: str, *, source: str) -> None:
        """Build the one-line message; `guard` is the failed check, `source` the dump."""
        super().__init__(printable(f"{source}: {guard}: {shortened(message)}"))
        self.guard: Guard = guard


class NonFiniteRun(ArithmeticError):
    """Overflow in a run, although all weights are finite."""

    def __init__(self, stage: str, what: str, *, where: object, dtype: str) -> None:
        """Name the first non-finite stage, its values (`what`), the model (`where`) and the dtype."""
        cause = f"weights, or the alpha of an adapter, are too large for {dtype}"
        super().__init__(f"{where}: {stage} is the first stage that is not finite ({what}); {cause}")
        self.stage = stage


class LearnerFault(Exception):
    """Failure of a function in a learner's code: it raised, or returned no array of the right shape and dtype."""

    def __init__(self, part: str, failure: str) -> None:
        """Name the learner's function and its failure; the cause, if any, has the learner's frames."""
        super().__init__(f"{part}: {failure}")


class MissingExtra(ImportError):
    """Error of a command that needs a package which is not installed."""

    def __init__(self, extra: str, package: str) -> None:
        """Name the missing package and the extra of llorch that installs it; "" if llorch itself does."""
        name, clone = (f"'llorch[{extra}]'", f"'.[{extra}]'") if extra else ("llorch", ".")
        super().__init__(
            f"{package} is not installed; get it with: pip install {name}, "
            f"or in a clone: pip install -c constraints.txt -e {clone}"
        )
        self.extra = extra
        self.package = package


class NotInWheel(FileNotFoundError):
    """Error of a file that is not in the wheel, such as a golden; a clone and the sdist have every file."""

    def __init__(self, subject: str) -> None:
        """Build the message from `subject`, which says which file is missing and which files the wheel has."""
        super().__init__(f"{subject}; for the rest, install a clone or the unpacked sdist: pip install -e FOLDER")


class EngineDied(RuntimeError):
    """Error of a reference engine whose process ended, or that llorch ended after a timeout."""


class RankFailed(RuntimeError):
    """Failure of another rank, which ended the run."""

    def __init__(self, message: str, exit_code: int | None) -> None:
        """Repeat the message of that rank; `exit_code` is its exit code, or None if unknown."""
        super().__init__(message)
        self.exit_code = exit_code


class RankLost(RankFailed):
    """Loss of a rank: its process ended, as seen from the other ranks."""


class MissingDevice(RuntimeError):
    """Error of a device, or a feature of it, that was requested by name and is missing."""


def shortened(message: str) -> str:
    """Truncate every long quoted value and every long word of a message, and append its length."""
    return _LONG.sub(lambda match: cut(match[0], _MAX_QUOTED if match["quote"] else _MAX_WORD), message)


def cut(text: str, max_length: int = _MAX_QUOTED) -> str:
    """Return a text, or its first `max_length` characters and its length if it is longer."""
    return text if len(text) <= max_length else f"{text[:max_length]}... ({len(text)} characters)"


def printable(text: str) -> str:
    """Escape control characters, line ends and bidirectional marks in untrusted text."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def decode_utf8(data: bytes, subject: str, *, offset: int = 0) -> str:
    """Decode user text; UserError names the first byte that is not UTF-8 and its position, counted from `offset`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad_byte = f"byte 0x{data[error.start]:02x} at offset {offset + error.start}"
        raise UserError(f"{subject}: expected UTF-8, got {bad_byte}; convert the text first") from None


def suggestion(word: str, known_names: Iterable[str]) -> str:
    """Suggest a known word for an unknown one, as the end of a message; empty if none is similar.

    Known names of several words count by their last word; of equal last words the last name wins.
    """
    names_by_word = {name.rpartition(" ")[2]: name for name in known_names}
    return "".join(f"; did you mean {names_by_word[match]!r}?" for match in get_close_matches(word, names_by_word, n=1))
