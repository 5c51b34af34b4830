"""The vocabulary of a Hugging Face folder: tokenizer.json, checked and rebuilt in the `tokenizers` library.

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
_MAX_ID = 1 << 22
_BYTE_TOKENS = {byte: f"<0x{byte:02X}>" for byte in range(256)}
_MODEL_KEYS = frozenset(
    "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges vocab"
    " merges".split()
)
_SWITCHES = ("single_word", "lstrip", "rstrip", "normalized", "special")


class HuggingFaceVocabulary:
    """Tokens, special tokens and the text encoder of a folder."""

    def __init__(self, folder: Path) -> None:
        """Read and check the files; FormatError for parts of tokenizer.json that are not known here."""
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
        self._first = [self._check_id(one, "post_processor", self.vocab_size) for one in first]
        self._last = [self._check_id(one, "post_processor", self.vocab_size) for one in last]

    def encode_spans(
        self, text: str, *, add_special: bool, parse_special: bool, continues: bool
    ) -> tuple[list[int], Iterator[int]]:
        """Encode text, with `add_special` in the file's template, and tell where tokens start: -1 before the text.

        Text that `continues` after a control token gets no space before it, unless each control token has one behind.
        """
        with self._lock, self._without_prefix(continues):  # the switch belongs to the tokenizer, not to the call
            self._tokenizer.encode_special_tokens = not parse_special
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)  # other threads go on
        starts = starts_in(encoding)
        if not add_special:
            return encoding.ids, starts
        ids = [*self._first, *encoding.ids, *self._last]
        return ids, chain([-1] * len(self._first), starts, [len(text)] * len(self._last))

    @contextmanager
    def _without_prefix(self, continues: bool) -> Iterator[None]:
        """Encode without a leading space in the block, if the text `continues`."""
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
        """Return the bytes of an id: the text of an added token, nothing for an id that only pads the model."""
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
        absent = [_BYTE_TOKENS[byte] for byte in TEXT_BYTES if _BYTE_TOKENS[byte] not in ids]
        if absent and not self._byte_level:  # a byte-level vocabulary leaves such a byte out, as the library does
            raise self._fields.error("Missing", "vocab", "a token for every byte, but these tokens are missing", absent)
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
        """Put the added tokens into the library, and sort them into hidden and visible ones."""
        by_text = find_by_text({token.content: token_id for token_id, token in added}, ())
        for token_id, token in added:
            # As in GGUF files: what ends a generation is no user's text, whatever type the file gives it.
            token.special = token.special or token_id in by_text.values()
        self._tokenizer.add_tokens([token for _, token in added])
        for token_id, token in added:
            free = self._tokenizer.token_to_id(token.content)
            if free != token_id:
                raise self._fields.error("Inconsistent", f"added_tokens {token.content!r}", f"id {free}", token_id)
            self._texts[token_id] = token.content
        begins, ends, rows = _named_ids(folder, {text: token_id for token_id, text in self._texts.items()})
        self.vocab_size = max(max(self._texts) + 1, rows)
        return SpecialTokens(
            bos_token_id=next(iter(begins), None),
            eos_token_id=next(iter(ends), None),
            eos_token_ids=frozenset(ends) | find_end_tokens(by_text, {}),
            hidden=frozenset(token_id for token_id, token in added if token.special),
            visible=frozenset(token_id for token_id, token in added if not token.special),
        )

    def _list(self, values: Mapping[str, object], key: str) -> list[object]:
        value = values.get(key)
        if not isinstance(value, list):
            raise self._fields.error("Malformed", key, "a list", value)
        return value

    def _check_id(self, token_id: object, what: str, limit: int) -> int:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise self._fields.error("Malformed", what, "an integer id", token_id)
        if not 0 <= token_id < limit:
            raise self._fields.error("OutOfRange", what, f"0 to {limit - 1}", token_id)
        return token_id


def _named_ids(folder: Path, ids: Mapping[str, int]) -> tuple[list[int], list[int], int]:
    """Read the begin and end tokens that the files of a folder name, and the rows of the embedding table.

    The table may be padded beyond the last token. FormatError where a file names no token of the vocabulary.
    """
    files = (folder / f"{name}.json" for name in ("config", "generation_config", "tokenizer_config"))
    model, generation, tokenizer = (Fields(read_settings(file), file) for file in files)
    rows = model.integer("vocab_size", default=0, low=0)
    limit = max(rows, max(ids.values()) + 1)
    begins, ends = (
        [*_id_of_text(tokenizer, f"{role}_token", ids), *_token_ids((model, generation), f"{role}_token_id", limit)]
        for role in ("bos", "eos")
    )
    return begins, ends, rows


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


def _id_of_text(fields: Fields, key: str, ids: Mapping[str, int]) -> list[int]:
    """Find a token by its text, which stands there alone or as `content` of an object; empty if the key is absent."""
    value = fields.values.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if value is None:
        return []
    if not isinstance(text, str):
        raise fields.error("Malformed", key, "the text of a token", value)
    if text not in ids:
        raise fields.error("Missing", key, "a token of tokenizer.json", text)
    return [ids[text]]
