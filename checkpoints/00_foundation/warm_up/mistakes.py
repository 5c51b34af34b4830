"""The library knows no mistake of a number format; the stub has one."""

WRONG: dict = {}
UNTYPED: dict[str, str] = {}
