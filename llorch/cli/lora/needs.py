"""What training needs beside the core."""

from importlib.util import find_spec

from llorch.errors import MissingExtra


def require_torch() -> None:
    """Say what to install where torch is absent.

    Raises:
        MissingExtra: torch is not installed.
    """
    if find_spec("torch") is None:
        raise MissingExtra("train", "torch")
