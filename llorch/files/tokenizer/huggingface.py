"""Vocabulary of a Hugging Face folder: tokenizer.json, checked and rebuilt in the `tokenizers` library.

Source: tokenizers `src/tokenizer/serialization.rs`, `src/models/bpe/serialization.rs` (fields of tokenizer.json).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from threading import Lock

from tokenizers import AddedToken, models
from tokenizers.pre_tokenizers import Metaspace

from llorch.files.strict_json import read_json, read_settings
from llorch.files.tokenizer.byte_level import TEXT_BYTES, starts_in, text_bytes
from llorch.files.tokenizer.merges import check_merges
from llorch.files.tokenizer.pipeline import Pipeline, read_template
from llorch.files.tokenizer.sentencepiece import BYTE_TOKEN, SPACE
from llorch.files.tokenizer.special import SpacePrefix, SpecialTokens, find_by_text, find_end_tokens
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

_MAX_TOKENIZER = 64 << 20  # bytes
_MAX_ID = 1 << 22  # limit of token ids in tokenizer.json
_BYTE_TOKENS = {byte: f"<0x{byte:02X}>" for byte in range(256)}  # SentencePiece tokens of single bytes
_MODEL_KEYS = frozenset(
    "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges vocab"
    " merges".split()
)
_SWITCHES = ("single_word", "lstrip", "rstrip", "normalized", "special")


class HuggingFaceVocabulary:
    """Tokens, special tokens and text encoder of a folder."""

    def __init__(self, folder: Path) -> None:
        """Read and check the files; FormatError for unknown parts of tokenizer.json."""
        self._path = folder / "tokenizer.json"
        if not self._path.is_file():
            message = "expected tokenizer.json in this folder, got none; add the file, or give token ids"
            raise FormatError("Missing", message, path=folder)
        content = read_json(self._path, limit=_MAX_TOKENIZER)
        self._fields = Fields(content, self._path)
        pipeline = Pipeline(content, self._path)
        self._byte_level = pipeline.byte_level
        self.space_prefix: SpacePrefix = pipeline.space_prefix
        self._tokenizer = pipeline.tokenizer()
        self._tokenizer.model = self._read_model()
        self._lock = Lock()
        added = [self._read_token(entry) for entry in self._list(content, "added_tokens")]
        self.special = self._add(folder, added)
        first, last = read_template(content.get("post_processor"), self._path)
        self._prefix_ids = [self._check_id(token_id, "post_processor", self.vocab_size) for token_id in first]
        self._suffix_ids = [self._check_id(token_id, "post_processor", self.vocab_size) for token_id in last]

    def encode_spans(
        self, text: str, *, add_special: bool, parse_special: bool, continues: bool
    ) -> tuple[list[int], Iterator[int]]:
        """Encode text, with `add_special` in the file's template; return ids and start indices, -1 before the text.

        Text that `continues` after a control token gets no space prefix, unless the scheme is `always`.
        """
        with self._lock, self._without_prefix(continues):  # the switch is a property of the tokenizer, not of the call
            self._tokenizer.encode_special_tokens = not parse_special
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)  # releases the GIL
        starts = starts_in(encoding)
        if not add_special:
            return encoding.ids, starts
        ids = [*self._prefix_ids, *encoding.ids, *self._suffix_ids]
        return ids, chain([-1] * len(self._prefix_ids), starts, [len(text)] * len(self._suffix_ids))

    @contextmanager
    def _without_prefix(self, continues: bool) -> Iterator[None]:
        """Disable the space prefix within the context, if the text `continues`."""
        part = self._tokenizer.pre_tokenizer
        if not continues or self.space_prefix != "start" or not isinstance(part, Metaspace):
            yield
            return
        part.prepend_scheme = "never"
        try:
            yield
        finally:
            part.prepend_scheme = "first"

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of an id: the text of an added token, nothing for a padding id."""
        text = self._texts.get(token_id, "")
        if token_id in self.special.hidden or token_id in self.special.visible:
            return text.encode()
        if self._byte_level:
            return text_bytes(text)
        if BYTE_TOKEN.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        return text.replace(SPACE, " ").encode()

    def _read_model(self) -> models.BPE:
        model = self._fields.section("model")
        if model is None:
            raise self._fields.error("Missing", "model", "a BPE model", None)
        unknown = sorted(model.values.keys() - _MODEL_KEYS)
        if unknown:
            raise self._fields.error("Unsupported", "model", "only the fields of a BPE model", unknown)
        model.refuse("type", unless=("BPE",), default="BPE")
        model.refuse("dropout", unless=(None, 0), default=None)
        model.refuse("byte_fallback", unless=(not self._byte_level,), default=False)
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            model.refuse(key, unless=(None, ""), default=None)
        ids = self._read_ids(model.values.get("vocab"))
        merges = check_merges(self._list(model.values, "merges"), ids, key="merges", path=self._path)
        ignore_merges = model.boolean("ignore_merges", default=False)
        return models.BPE(ids, merges, ignore_merges=ignore_merges, byte_fallback=not self._byte_level)

    def _read_ids(self, vocab: object) -> dict[str, int]:
        if not isinstance(vocab, dict) or not vocab:
            raise self._fields.error("Malformed", "vocab", "an object that maps texts to ids", vocab)
        ids = {text: self._check_id(token_id, f"vocab {text!r}", _MAX_ID) for text, token_id in vocab.items()}
        self._texts = {token_id: text for text, token_id in ids.items()}
        if len(self._texts) < len(ids):
            text = next(text for text, token_id in ids.items() if self._texts[token_id] != text)
            raise self._fields.error("Duplicate", f"vocab {text!r}", "a different id for each text", ids[text])
        gaps = [_BYTE_TOKENS[byte] for byte in TEXT_BYTES if _BYTE_TOKENS[byte] not in ids]
        if gaps and not self._byte_level:  # a byte-level vocabulary drops such a byte, like the library
            raise self._fields.error("Missing", "vocab", "a token for every byte, but these tokens are missing", gaps)
        return ids

    def _read_token(self, entry: object) -> tuple[int, AddedToken]:
        if not isinstance(entry, dict):
            raise self._fields.error("Malformed", "added_tokens", "objects", entry)
        fields = Fields(entry, self._path)
        content = fields.text("content")
        if not content:
            raise fields.error("Malformed", "added_tokens", "a text that is not empty", entry)
        switches = {name: fields.boolean(name, default=False) for name in _SWITCHES}
        return self._check_id(entry.get("id"), f"added_tokens {content!r}", _MAX_ID), AddedToken(content, **switches)

    def _add(self, folder: Path, added: list[tuple[int, AddedToken]]) -> SpecialTokens:
        """Add the added tokens to the library, set `vocab_size`, and return the special tokens by role."""
        by_text = find_by_text({token.content: token_id for token_id, token in added}, ())
        for token_id, token in added:
            # As in GGUF files, an end token is special for any type in the file, so that user text cannot become one.
            token.special = token.special or token_id in by_text.values()
        self._tokenizer.add_tokens([token for _, token in added])
        for token_id, token in added:
            next_id = self._tokenizer.token_to_id(token.content)
            if next_id != token_id:
                raise self._fields.error("Inconsistent", f"added_tokens {token.content!r}", f"id {next_id}", token_id)
            self._texts[token_id] = token.content
        bos_ids, eos_ids, rows = _read_ends(folder, {text: token_id for token_id, text in self._texts.items()})
        self.vocab_size = max(max(self._texts) + 1, rows)
        return SpecialTokens(
            bos_token_id=next(iter(bos_ids), None),
            eos_token_id=next(iter(eos_ids), None),
            eos_token_ids=frozenset(eos_ids) | find_end_tokens(by_text, {}),
            hidden=frozenset(token_id for token_id, token in added if token.special),
            visible=frozenset(token_id for token_id, token in added if not token.special),
        )

    def _list(self, values: Mapping[str, object], key: str) -> list[object]:
        value = values.get(key)
        if not isinstance(value, list):
            raise self._fields.error("Malformed", key, "a list", value)
        return value

    def _check_id(self, token_id: object, subject: str, limit: int) -> int:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise self._fields.error("Malformed", subject, "an integer id", token_id)
        if not 0 <= token_id < limit:
            raise self._fields.error("OutOfRange", subject, f"0 to {limit - 1}", token_id)
        return token_id


def _read_ends(folder: Path, ids: Mapping[str, int]) -> tuple[list[int], list[int], int]:
    """Read BOS and EOS ids from the files of a folder, and the number of rows of the embedding table.

    The table may be padded beyond the last token. FormatError for a token that is not in the vocabulary.
    """
    files = (folder / f"{name}.json" for name in ("config", "generation_config", "tokenizer_config"))
    model, generation, tokenizer = (Fields(read_settings(file), file) for file in files)
    rows = model.integer("vocab_size", default=0, low=0)
    limit = max(rows, max(ids.values()) + 1)
    bos_ids, eos_ids = (
        [*_find_token(tokenizer, f"{role}_token", ids), *_token_ids((model, generation), f"{role}_token_id", limit)]
        for role in ("bos", "eos")
    )
    return bos_ids, eos_ids, rows


def _token_ids(files: Iterable[Fields], key: str, limit: int) -> Iterator[int]:
    """Yield the ids in a field of each file: one id, a list, or nothing."""
    for fields in files:
        value = fields.values.get(key)
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise fields.error("Malformed", key, "an id or a list of ids", value)
            if not 0 <= token_id < limit:
                raise fields.error("OutOfRange", key, f"0 to {limit - 1}", token_id)
            if key == "bos_token_id" and value != token_id and value != [token_id]:
                raise fields.error("Malformed", key, "one id", value)
            yield token_id


def _find_token(fields: Fields, key: str, ids: Mapping[str, int]) -> list[int]:
    """Find a token by its text, a string or the `content` of an object; empty if the key is absent."""
    value = fields.values.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if value is None:
        return []
    if not isinstance(text, str):
        raise fields.error("Malformed", key, "the text of a token", value)
    if text not in ids:
        raise fields.error("Missing", key, "a token of tokenizer.json", text)
    return [ids[text]]
