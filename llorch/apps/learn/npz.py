"""Arrays by name to the bytes of an npz and back, for programs in any language.

What is written can be read without a zip library: each .npy lies uncompressed behind a local header that tells its
size. What is read comes from a program that may be broken: nothing is unpickled, and nothing grows beyond a limit.
"""

import io
from collections.abc import Mapping
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np

from llorch.runtime.errors import UserError

MANIFEST = "manifest.json"


def to_npz(arrays: Mapping[str, np.ndarray], manifest: str | None = None) -> bytes:
    """Write an npz file as bytes, equal for equal arrays. A manifest, if given, is stored with the arrays."""
    file = io.BytesIO()
    with ZipFile(file, "w", ZIP_STORED) as archive:
        if manifest is not None:
            archive.writestr(ZipInfo(MANIFEST), manifest)
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
            archive.writestr(ZipInfo(f"{name}.npy"), member.getvalue())
    return file.getvalue()


def from_npz(data: bytes, *, most: int) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file.

    Args:
        data: The file.
        most: Bytes that the arrays may have together.

    Returns:
        The arrays by name, without `.npy`.

    Raises:
        ValueError: The file is no npz, is cut or is too large; it has members other than arrays, arrays of
            objects, or a name twice.
    """
    found: dict[str, np.ndarray] = {}
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            members = [info for info in archive.infolist() if info.filename != MANIFEST]
            if (size := sum(info.file_size for info in members)) > most:
                raise UserError(f"expected at most {most} bytes, got {size}")
            for info in members:
                name = info.filename.removesuffix(".npy")
                if name in found:
                    raise UserError(f"expected each name once, got {name} twice")
                found[name] = np.lib.format.read_array(io.BytesIO(archive.read(info)), allow_pickle=False)
    except Exception as error:  # zipfile and numpy raise a dozen classes for broken bytes
        raise UserError(f"not an npz of arrays: {error}") from None
    return found
