"""Everything that transformers exports, without types: pyright would read 2,700 files to find them."""

from typing import Any

def __getattr__(name: str) -> Any: ...
