"""Find the file or folder of a MODEL: a built-in name, an existing path, or a model of the Hugging Face hub.

Input: a user's model name. Output: a path. Only this package uses the network, through huggingface_hub. It first
searches huggingface_hub's cache, and uses cached files unchanged. The order to read:

    reference       `org/name[:QUANT][@REVISION]`, and the files of a repository that a model needs
    fetch           search of the cache; consent, disk space check and download; errors in one line
"""

from collections.abc import Callable
from pathlib import Path

from llorch.files.hub.reference import Reference
from llorch.runtime.builtin import EVERY, builtin_path, is_builtin_name

Consent = Callable[[str], bool]  # gets the description of a download, returns True to start it
Report = Callable[[str], None]


def find(path_or_name: str | Path, *, consent: Consent = lambda line: True, report: Report = lambda line: None) -> Path:
    """Find the file or folder of a model; download a model of the hub that is not in the cache.

    The name is tried as a built-in name, an existing path, and `org/name[:QUANT][@REVISION]`, in this order. A `Path`,
    or a string such as `./story`, is only a path or a hub name. `consent` is called before a download, with its size.
    `report` gets the commit of a hub model, and a note if a path has a built-in name. FileNotFoundError: there is no
    such model, or it cannot be downloaded; OSError: disk full; MissingExtra: huggingface_hub is not installed.
    """
    spec = str(path_or_name)
    path = Path(path_or_name)
    if isinstance(path_or_name, str) and is_builtin_name(spec, EVERY, report):
        return builtin_path(spec)
    if spec and path.exists():  # Path("") would be the current folder
        return path
    reference = None if spec in EVERY else Reference.parse(spec)
    if reference is None:
        return builtin_path(spec)
    from llorch.files.hub.fetch import obtain

    return obtain(reference, consent=consent, report=report)
