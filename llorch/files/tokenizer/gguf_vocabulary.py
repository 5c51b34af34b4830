"""Vocabulary in the metadata of a GGUF file, checked, with llama.cpp's encoding.

Source: ggml docs/gguf.md (keys); llama.cpp src/llama-vocab.cpp, `impl::load` and `impl::tokenize`.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from llorch.files.tokenizer.byte_level import PRE_TOKENIZERS, TEXT_BYTES, ByteLevelBPE, text_bytes
from llorch.files.tokenizer.gguf_table import TokenTable, TokenType
from llorch.files.tokenizer.sentencepiece import SPACE, SentencePieceBPE
from llorch.files.tokenizer.special import FILL_TEXTS, Cutter, SpacePrefix, SpecialTokens, find_by_text, find_end_tokens
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

_PREFIX = "tokenizer.ggml."
# Types that text may become; no control token, because user text must not become one.
_TEXT_TYPES = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNDEFINED)
_PHI_3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 that do not strip whitespace after them
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2}  # defaults for a file without these keys
_ROLES = ("bos", "eos", "eot", "eom", *FILL_TEXTS)  # used `<role>_token_id` keys of the metadata


class GGUFVocabulary:
    """Tokens, special tokens and text encoder of a GGUF file."""

    def __init__(self, metadata: Mapping[str, object], path: str | Path) -> None:
        """Read and check the `tokenizer.ggml` keys; string arrays are sequences of bytes."""
        fields = Fields(metadata, path, prefix=_PREFIX)
        model = fields.text("model", default="none")
        if model in ("none", "no_vocab"):
            message = "expected a vocabulary (tokenizer.ggml.model), got none; give token ids"
            raise FormatError("Missing", message, path=path)
        self._path = path
        self._table = TokenTable(metadata, path)
        self.vocab_size = len(self._table.texts)
        match model:
            case "gpt2":
                starts_with_bos = self._use_byte_level(fields)
            case "llama":
                starts_with_bos = self._use_sentencepiece(fields)
            case _:
                raise fields.error("Unsupported", "model", "'gpt2' or 'llama'", model)
        self.special = self._read_special(fields, metadata)
        self._added_first = self._tokens_to_add(fields, "bos", default=starts_with_bos)
        self._added_last = self._tokens_to_add(fields, "eos", default=False)

    def encode_spans(
        self, text: str, *, add_special: bool, parse_special: bool, continues: bool
    ) -> tuple[list[int], Iterator[int]]:
        """Split text at special tokens and encode the pieces; return ids and start indices, -1 for an added BOS.

        `parse_special` also splits at control tokens; text that `continues` follows a control token.
        """
        ids = [*self._added_first] if add_special else []
        # Start of a piece in the text, whether a space was put before it, start of each token in the piece.
        parts: list[tuple[int, bool, Iterable[int]]] = [(-1, False, [0] * len(ids))]
        prefix = self.space_prefix == "always" or (self.space_prefix == "start" and not continues)
        for place, part in (self._every_special if parse_special else self._user_defined).cut(text):
            if isinstance(part, int):
                ids.append(part)
                parts.append((place, False, [0]))
                prefix = self.space_prefix == "always"
            else:
                part_ids, part_starts = self._encoder.encode_spans(" " * prefix + part)
                ids += part_ids
                parts.append((place, prefix, part_starts))
                prefix = False
        suffix_ids = self._added_last if add_special else []
        parts.append((len(text), False, [0] * len(suffix_ids)))
        return ids + suffix_ids, (place + max(0, start - prefix) for place, prefix, starts in parts for start in starts)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token; for a special token, its text."""
        text = self._table.texts[token_id]
        kind = self._table.types[token_id]
        if token_id in self.special.hidden or token_id in self.special.visible:
            return text.encode("utf-8", "surrogateescape")
        if kind is TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind is not TokenType.NORMAL:
            return b""  # llama.cpp prints nothing for unused and undefined tokens
        if isinstance(self._encoder, ByteLevelBPE):
            return text_bytes(text)
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")

    def _use_byte_level(self, fields: Fields) -> bool:
        """Set up byte-level BPE; return True if this pre-tokenizer adds BOS."""
        name = fields.text("pre", default="default")  # llama.cpp's default
        if name not in PRE_TOKENIZERS:
            raise fields.error("Unsupported", "pre", " or ".join(map(repr, PRE_TOKENIZERS)), name)
        ids = self._table.ids_of(*_TEXT_TYPES, TokenType.BYTE)
        self._require_utf8(ids)
        self._encoder = ByteLevelBPE(ids, self._table.read_merges(ids), PRE_TOKENIZERS[name])
        self.space_prefix: SpacePrefix = "never"
        return PRE_TOKENIZERS[name].adds_bos

    def _use_sentencepiece(self, fields: Fields) -> bool:
        """Set up SentencePiece BPE; return True, because it adds BOS."""
        scores = self._table.read_scores()
        ids = self._table.ids_of(*_TEXT_TYPES)
        byte_tokens = self._table.ids_of(TokenType.BYTE)
        byte_ids = {int(text[3:5], 16): token_id for text, token_id in byte_tokens.items()}
        self._require_no_missing(b for b in TEXT_BYTES if b not in byte_ids and not (b < 128 and chr(b) in ids))
        self._encoder = SentencePieceBPE(ids, {text: scores[i] for text, i in ids.items()}, byte_ids)
        self.space_prefix = "always" if fields.boolean("add_space_prefix", default=True) else "never"
        return True

    def _require_utf8(self, ids: Mapping[str, int]) -> None:
        try:
            "".join(ids).encode()
        except UnicodeEncodeError:
            bad_text = next(text for text in ids if any("\udc80" <= character <= "\udcff" for character in text))
            actual = f"{bad_text.encode('utf-8', 'surrogateescape')!r} as token {ids[bad_text]}"
            message = f"tokenizer.ggml.tokens: expected UTF-8 in a byte-level vocabulary, got {actual}"
            raise FormatError("Malformed", message, path=self._path) from None

    def _require_no_missing(self, missing_bytes: Iterable[int]) -> None:
        """Raise Missing for a vocabulary in which these bytes have no token."""
        if names := [f"0x{byte:02X}" for byte in missing_bytes]:
            message = f"tokenizer.ggml.tokens: {len(names)} byte values have no token: {', '.join(names[:4])}"
            raise FormatError("Missing", message, path=self._path)

    def _read_special(self, fields: Fields, metadata: Mapping[str, object]) -> SpecialTokens:
        """Read the special tokens by metadata and by text, and set up the splitting of text at them."""
        keys = {role: f"{role}_token_id" for role in _ROLES}
        roles = {role: fields.integer(key) for role, key in keys.items() if _PREFIX + key in metadata}
        # An id outside the vocabulary, such as 2**32 - 1, means none; llama.cpp then uses its default.
        defaults = _SENTENCEPIECE_IDS if isinstance(self._encoder, SentencePieceBPE) else {}
        roles = defaults | {role: token_id for role, token_id in roles.items() if 0 <= token_id < self.vocab_size}
        ids = {text: token_id for token_id, text in enumerate(self._table.texts)}
        control = self._table.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
        # A token found by its text is a control token for any type in the file.
        by_text = find_by_text(ids, roles)
        control |= {self._table.texts[token_id]: token_id for token_id in by_text.values()}
        visible = {text: i for text, i in self._table.ids_of(TokenType.USER_DEFINED).items() if text not in control}
        strips = self._strips(metadata, ids, control | visible)
        self._user_defined = Cutter(visible, strips=strips)
        self._every_special = Cutter(control | visible, strips=strips)
        return SpecialTokens(
            bos_token_id=roles.get("bos"),
            eos_token_id=roles.get("eos"),
            eos_token_ids=find_end_tokens(by_text, roles),
            hidden=frozenset(control.values()),
            visible=frozenset(visible.values()),
        )

    def _strips(self, metadata: Mapping[str, object], ids: Container[str], special: Collection[str]) -> Collection[str]:
        """Return the special tokens that strip whitespace after them: llama.cpp decides by the model name."""
        model_name = metadata.get("general.name")  # may have any type
        name = str(model_name).lower() if isinstance(model_name, str | bytes) else ""
        if "phi-3" not in name and "phi3" not in name:
            return ()
        for text in ("</s>", *_PHI_3_KEEPS):
            if text not in ids:
                message = f"general.name: llama.cpp opens a model named phi-3 only if it has the token {text}"
                raise FormatError("Missing", f"{message}, got {name!r}", path=self._path)
        return [text for text in special if text not in _PHI_3_KEEPS]

    def _tokens_to_add(self, fields: Fields, role: Literal["bos", "eos"], *, default: bool) -> list[int]:
        """Return BOS or EOS if the file adds it to every text; else an empty list."""
        if not fields.boolean(f"add_{role}_token", default=default):
            return []
        token_id = self.special.bos_token_id if role == "bos" else self.special.eos_token_id
        if token_id is None:
            raise fields.error("Missing", f"{role}_token_id", f"an id of the vocabulary (add_{role}_token)", None)
        return [token_id]
