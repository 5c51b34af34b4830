"""Detection of files in another format than expected, such as git-lfs pointers and failed downloads."""

from pathlib import Path

from llorch.runtime.errors import FormatError

HEAD = 256  # bytes needed to detect the format
_DOWNLOAD = "download the file again"
_LOGIN = f"{_DOWNLOAD}, with a login if the address needs one"
_CONVERT = "convert the model to safetensors, or give the right file"
_POINTER = b"versionhttps://git-lfs.github.com/spec/"  # start of a git-lfs pointer, without whitespace
_MARK = b"\xef\xbb\xbf"  # byte order mark of UTF-8
_STARTS = (  # first bytes (without whitespace, lower case), name of the format, remedy
    (_POINTER, "a git-lfs pointer", "run git lfs pull in the clone, or download the file"),
    (b"<", "an HTML or XML page", _LOGIN),
    (b"pk\x03\x04", "a zip archive, as of PyTorch", _CONVERT),
    (b"\x80\x02", "a pickle", _CONVERT),
    (b"\x80\x04", "a pickle", _CONVERT),
    (b"\x1f\x8b", "a gzip archive", "unpack it"),
    (b"gguf", "a GGUF file", "give it a name that ends with .gguf"),
    *((b'{"' + key, "an error document of a server", _LOGIN) for key in (b"error", b"message", b"detail")),
)


def refuse_other_format(head: bytes, expected: str, path: str | Path, *, text: bool = True) -> None:
    """Raise if `head`, the first `HEAD` bytes of a file, is of another known format, or (if `text`) of any text file.

    `expected` names the expected format, with article. FormatError: BadMagic, or Truncated for an empty file.
    """
    if not head:
        raise FormatError("Truncated", f"expected {expected}, got an empty file; {_DOWNLOAD}", path=path)
    start = _without_spaces(head)
    for magic, name, remedy in _STARTS:
        if start.startswith(magic):
            raise FormatError("BadMagic", f"expected {expected}, got {name}{_quote_text(head)}; {remedy}", path=path)
    if text and (quote := _quote_text(head)):
        raise FormatError("BadMagic", f"expected {expected}, got a text{quote}; {_LOGIN}", path=path)


def refuse_pointer(head: bytes, path: str | Path) -> None:
    """Raise BadMagic for a git-lfs pointer, which no reader of llorch expects."""
    if _without_spaces(head).startswith(_POINTER):
        refuse_other_format(head, "the file", path)


def _without_spaces(head: bytes) -> bytes:
    return b"".join(head.removeprefix(_MARK).split()).lower()


def _quote_text(head: bytes) -> str:
    """Quote the first line of an ASCII text, as the end of a message; empty for other bytes."""
    line = head.removeprefix(_MARK).strip().partition(b"\n")[0][:60].decode("ascii", "replace").strip()
    is_text = len(line) > 3 and "\ufffd" not in line and line.replace("\t", "").isprintable()
    return f" that starts with {line!r}" if is_text else ""
