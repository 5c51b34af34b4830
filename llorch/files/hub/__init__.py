"""Find the file or folder of a MODEL: a built-in name, an existing path, or a model of the Hugging Face hub.

Input: the name that a user writes. Output: a path. This package alone uses the network, through huggingface_hub. It
looks into huggingface_hub's cache first and uses files of the cache unchanged. The order to read:

    reference       `org/name[:QUANT][@REVISION]`, and the files of a repository that a model needs
    fetch           the files that are in the cache; the others are asked for, sized, downloaded; an error is one line
"""

from collections.abc import Callable
from pathlib import Path

from llorch.files.hub.reference import Reference
from llorch.runtime.builtin import EVERY, builtin_path, wins

Consent = Callable[[str], bool]  # to a download that is described in a line
Report = Callable[[str], None]


def find(path_or_name: str | Path, *, consent: Consent = lambda line: True, report: Report = lambda line: None) -> Path:
    """Find the file or folder that a user means; download a model of the hub that is not in the cache.

    It is a built-in name, an existing path, or `org/name[:QUANT][@REVISION]`, tried in this order; a `Path` is a path
    first, and so is a text such as `./story`. `consent` is asked before a download, in a line with its size; `report`
    is told the commit of a model of the hub, and that a path has a built-in name. FileNotFoundError: there is no such
    model, or it cannot be had; OSError: the disk has no room for it; MissingExtra: huggingface_hub is not installed.
    """
    spec = str(path_or_name)
    path = Path(path_or_name)
    if isinstance(path_or_name, str) and wins(spec, EVERY, report):
        return builtin_path(spec)
    if spec and path.exists():  # Path("") would be the current folder
        return path
    reference = None if spec in EVERY else Reference.parse(spec)
    if reference is None:
        return builtin_path(spec)
    from llorch.files.hub.fetch import obtain

    return obtain(reference, consent=consent, report=report)
