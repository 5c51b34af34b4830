"""The begin and end tokens that the configuration files beside a tokenizer.json name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llorch.fields import Fields
from llorch.files.strict_json import read_json

_MAX_CONFIG = 4 << 20  # bytes; a tokenizer_config.json with its chat template has about 60 thousand


@dataclass(frozen=True, kw_only=True)
class NamedIds:
    """What config.json, generation_config.json and tokenizer_config.json say; each of them may be absent."""

    bos_token_id: int | None
    eos_token_id: int | None  # the first that is named
    eos_token_ids: frozenset[int]
    rows: int  # of the embedding table; it may be padded beyond the last token

    @classmethod
    def read(cls, folder: Path, ids: Mapping[str, int]) -> "NamedIds":
        """Read the files of a folder; FormatError where one names no token of the vocabulary."""
        model = _read(folder / "config.json")
        generation = _read(folder / "generation_config.json")
        tokenizer = _read(folder / "tokenizer_config.json")
        rows = model.integer("vocab_size", default=0, low=0)
        limit = max(rows, max(ids.values()) + 1)
        by_text = {key: _id_of_text(tokenizer, key, ids) for key in ("bos_token", "eos_token")}
        begins = [by_text["bos_token"], *_ids(model, "bos_token_id", limit), *_ids(generation, "bos_token_id", limit)]
        ends = [by_text["eos_token"], *_ids(model, "eos_token_id", limit), *_ids(generation, "eos_token_id", limit)]
        return cls(
            bos_token_id=next((token_id for token_id in begins if token_id is not None), None),
            eos_token_id=next((token_id for token_id in ends if token_id is not None), None),
            eos_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
            rows=rows,
        )


def _read(path: Path) -> Fields:
    return Fields(read_json(path, limit=_MAX_CONFIG) if path.is_file() else {}, path)


def _ids(fields: Fields, key: str, limit: int) -> Iterator[int]:
    """One id, a list of ids, or nothing."""
    value = fields.values.get(key)
    for token_id in value if isinstance(value, list) else [value]:
        if token_id is None:
            continue
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise fields.error("Malformed", key, "an id or a list of ids", value)
        if not 0 <= token_id < limit:
            raise fields.error("OutOfRange", key, f"0 to {limit - 1}", token_id)
        yield token_id


def _id_of_text(fields: Fields, key: str, ids: Mapping[str, int]) -> int | None:
    """A token by its text, which stands there alone or as `content` of an object."""
    value = fields.values.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if not isinstance(text, str):
        raise fields.error("Malformed", key, "the text of a token", value)
    if text not in ids:
        raise fields.error("Missing", key, "a token of tokenizer.json", text)
    return ids[text]
