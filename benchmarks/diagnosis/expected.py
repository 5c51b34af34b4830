"""Which known mistakes a bug may be named as; a bug that is not here is none of them."""

NAMES: dict[str, tuple[str, ...]] = {}
