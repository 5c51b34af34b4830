"""Wrong code for an optimizer step: all of it is made from the library, and the page types its own."""

WRONG: dict[str, dict] = {}
UNTYPED: dict[str, str] = {}
