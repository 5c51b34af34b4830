"""Files of another format than their names say, as a clone without git-lfs or a failed download leaves them."""

from pathlib import Path

from llorch.runtime.errors import FormatError

HEAD = 256  # bytes that tell the format
_AGAIN = "download the file again"
_LOGIN = f"{_AGAIN}, with a login if the address needs one"
_CONVERT = "convert the model to safetensors, or give the right file"
_POINTER = b"versionhttps://git-lfs.github.com/spec/"
_MARK = b"\xef\xbb\xbf"  # of UTF-8
_STARTS = (  # without white space, in lower case
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
    """Refuse a file whose `head`, its first `HEAD` bytes, is known as something else; with `text` any text, too.

    `expected` is the format of the reader, with its article. FormatError: BadMagic, Truncated for an empty file.
    """
    if not head:
        raise FormatError("Truncated", f"expected {expected}, got an empty file; {_AGAIN}", path=path)
    start = _start(head)
    for magic, name, remedy in _STARTS:
        if start.startswith(magic):
            raise FormatError("BadMagic", f"expected {expected}, got {name}{_quoted(head)}; {remedy}", path=path)
    if text and (quoted := _quoted(head)):
        raise FormatError("BadMagic", f"expected {expected}, got a text{quoted}; {_LOGIN}", path=path)


def refuse_pointer(head: bytes, path: str | Path) -> None:
    """Refuse (BadMagic) the pointer that git-lfs leaves in place of a file; no reader of llorch expects that text."""
    if _start(head).startswith(_POINTER):
        refuse_other_format(head, "the file", path)


def _start(head: bytes) -> bytes:
    return b"".join(head.removeprefix(_MARK).split()).lower()


def _quoted(head: bytes) -> str:
    """Quote the first line of a text; empty for bytes that are no text."""
    line = head.removeprefix(_MARK).strip().partition(b"\n")[0][:60].decode("ascii", "replace").strip()
    is_text = len(line) > 3 and "\ufffd" not in line and line.replace("\t", "").isprintable()
    return f" that starts with {line!r}" if is_text else ""
