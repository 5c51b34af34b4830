from helpers.tiny_base import base, weights  # noqa: F401
