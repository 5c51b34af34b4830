from runs.tiny_base import base, weights  # noqa: F401
