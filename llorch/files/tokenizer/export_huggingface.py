"""Conversion of a GGUF vocabulary to tokenizer.json and tokenizer_config.json, so that transformers gives the same ids.

The class is PreTrainedTokenizerFast, which uses tokenizer.json unchanged. For two families, however, transformers 5
replaces the file's pre-tokenizer and normalizer by Qwen's words and NFC, for any class. Then NFC is also written, so
that all readers of the folder agree, and a vocabulary with other words is Unsupported.

GGUF has no key for text normalisation, and llama.cpp does not normalise. For other families, NFC (in Qwen's folders) is
therefore written only if a conversion to GGUF has stored it.

Source: tokenizers `src/tokenizer/serialization.rs` (fields); transformers tokenization_utils_base.py (config).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llorch.families.table import FAMILIES
from llorch.files.tokenizer.byte_level import PRE_TOKENIZERS
from llorch.files.tokenizer.chat import templates_of_metadata
from llorch.files.tokenizer.export_gguf import NORMALIZER, PREFIX, SPACE_PREFIX
from llorch.files.tokenizer.gguf_table import TokenTable, TokenType
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.files.tokenizer.merges import merges_of_scores
from llorch.files.tokenizer.pipeline import (
    BYTE_LEVEL,
    METASPACE_DECODERS,
    SPACES_TO_METASPACE,
    TAKES_SPACE,
    WORDS,
    Json,
    metaspace,
    sequence,
)
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields

# llama.cpp's names -> key of `WORDS` with the same words.
_ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "llama-bpe", "deepseek-r1-qwen": "qwen2",
    "gpt-4o": "llama4",
}  # fmt: skip
_FIXED_WORDS = {family.transformers.pre_tokenizer for family in FAMILIES.values()} - {""}  # set by transformers
_ROLES = {"bos": "bos", "eos": "eos", "padding": "pad"}  # name in GGUF keys -> name in transformers' keys
_TEXT = (TokenType.NORMAL, TokenType.UNUSED, TokenType.UNDEFINED)  # tokens that text can become


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """Tokenizer files of a folder, and the token ids for the model's configuration."""

    tokenizer: Json  # tokenizer.json
    config: Json  # tokenizer_config.json
    token_ids: dict[str, int]  # bos_token_id, eos_token_id, pad_token_id, if present
    eos_token_ids: list[int]  # every id that ends a generation, EOS first
    notes: list[str]  # differences between transformers and llama.cpp


def translate_vocabulary(
    metadata: Mapping[str, object], vocabulary: GGUFVocabulary, path: Path, *, family: str, context: int
) -> HuggingFaceTokenizer:
    """Convert the vocabulary of a GGUF file; FormatError if tokenizer.json cannot express it."""
    table = TokenTable(metadata, path)
    _require_unicode(table, path)
    fields = Fields(metadata, path, prefix=PREFIX)
    parts, notes = _translate_parts(table, vocabulary, Fields(metadata, path), fields, family)
    parts["added_tokens"] = _added_tokens(table, vocabulary)
    _add_tokens(parts["model"]["vocab"], parts["added_tokens"])
    ids = {role: fields.integer(f"{role}_token_id") for role in _ROLES if fields.has(f"{role}_token_id")}
    end_ids = vocabulary.special.eos_token_ids
    return HuggingFaceTokenizer(
        tokenizer={
            "version": "1.0",
            "truncation": None,
            "padding": None,
            **parts,
            "post_processor": _post_processor(fields, ids, table),
        },
        config=_config(table, ids, templates_of_metadata(metadata, path), context),
        token_ids={f"{_ROLES[role]}_token_id": token_id for role, token_id in ids.items()},
        eos_token_ids=sorted(end_ids, key=lambda token_id: (token_id != ids.get("eos"), token_id)),
        notes=notes,
    )


def _translate_parts(
    table: TokenTable, vocabulary: GGUFVocabulary, llorch_fields: Fields, fields: Fields, family: str
) -> tuple[Json, list[str]]:
    """Convert model, normalizer and pre-tokenizer; add notes if transformers uses others for the family."""
    notes: list[str] = []
    if fields.text("model") == "gpt2":
        pre = fields.text("pre", default="default")
        parts = _byte_level(table, pre, fields)
        parts["normalizer"] = _normalizer(llorch_fields, pre, family, notes)
    else:
        stored_prefix = llorch_fields.text(SPACE_PREFIX, default="")
        parts = _sentencepiece(table, "never" if vocabulary.space_prefix == "never" else stored_prefix)
    required_words = FAMILIES[family].transformers.pre_tokenizer
    if required_words == "qwen35" and parts["pre_tokenizer"] == WORDS["qwen2"]:
        notes.append("transformers keeps combining marks with the letters, like Qwen 3.5; the file does not")
    elif required_words and parts["pre_tokenizer"] != WORDS[required_words]:
        expected = f"{required_words}, which transformers uses for every model of this family"
        raise fields.error("Unsupported", "pre", expected, fields.text("pre", default=""))
    return parts, notes


def _normalizer(llorch_fields: Fields, pre: str, family: str, notes: list[str]) -> Json | None:
    if llorch_fields.text(NORMALIZER, default="") == "NFC":
        return {"type": "NFC"}
    if FAMILIES[family].transformers.pre_tokenizer:
        notes.append(f"transformers composes characters first (NFC) for every {family}, llama.cpp does not")
        return {"type": "NFC"}
    if _ALIASES.get(pre, pre) in _FIXED_WORDS:
        notes.append("the folder does not compose characters (NFC), like llama.cpp; Qwen's released tokenizer does")
    return None


def _require_unicode(table: TokenTable, path: Path) -> None:
    for token_id, text in enumerate(table.texts):
        if any("\udc80" <= character <= "\udcff" for character in text):
            raw = text.encode("utf-8", "surrogateescape")
            message = f"tokenizer.ggml.tokens: a tokenizer.json holds UTF-8, got {raw!r} as token {token_id}"
            raise FormatError("Unsupported", message, path=path)


def _text_ids(table: TokenTable) -> dict[str, int]:
    """Return the tokens that text can become, without padding tokens."""
    ids = table.ids_of(*_TEXT)
    return {
        text: token_id
        for text, token_id in ids.items()
        if table.types[token_id] is TokenType.NORMAL or text != f"[PAD{token_id}]"
    }


def _byte_level(table: TokenTable, pre: str, fields: Fields) -> Json:
    """Return pre-tokenizer, decoder and model of a byte-level vocabulary."""
    name = _ALIASES.get(pre, pre)
    if name not in WORDS:
        raise fields.error("Unsupported", "pre", " or ".join([*WORDS, *_ALIASES]), pre)
    ids = _text_ids(table) | table.ids_of(TokenType.BYTE)
    merges = table.read_merges(table.ids_of(*_TEXT, TokenType.USER_DEFINED, TokenType.BYTE))
    valid_merges = [pair for pair in merges if {*pair, "".join(pair)} <= ids.keys()]
    return {
        "pre_tokenizer": WORDS[name],
        "decoder": BYTE_LEVEL,
        "model": _model(ids, valid_merges, ignore_merges=PRE_TOKENIZERS[pre].ignore_merges),
    }


def _sentencepiece(table: TokenTable, spaces: str) -> Json:
    """Return normalizer, pre-tokenizer, decoder and model of a SentencePiece vocabulary."""
    text_ids = _text_ids(table)
    scores = table.read_scores()
    merges = merges_of_scores({text: scores[token_id] for text, token_id in text_ids.items()})
    unknown = next(iter(table.ids_of(TokenType.UNKNOWN)), None)
    ids = text_ids | table.ids_of(TokenType.BYTE, TokenType.UNKNOWN)
    model = _model(ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    decoders = [*METASPACE_DECODERS, *([TAKES_SPACE] if spaces != "never" else [])]
    parts = {"normalizer": None, "pre_tokenizer": None, "decoder": sequence("decoders", *decoders), "model": model}
    if spaces in ("never", "first", "always"):
        parts["pre_tokenizer"] = metaspace(spaces)
    else:
        parts["normalizer"] = SPACES_TO_METASPACE
    return parts


def _model(ids: Mapping[str, int], merges: list[tuple[str, str]], **switches: object) -> Json:
    return {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        **switches,
        "vocab": dict(sorted(ids.items(), key=lambda item: item[1])),
        "merges": [list(pair) for pair in merges],
    }


def _added_tokens(table: TokenTable, vocabulary: GGUFVocabulary) -> list[Json]:
    """Return the special tokens as `added_tokens` of a tokenizer.json."""
    hidden, visible = vocabulary.special.hidden, vocabulary.special.visible
    switches = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": token_id, "content": table.texts[token_id], **switches, "special": token_id in hidden}
        for token_id in sorted(hidden | visible)
    ]


def _add_tokens(vocab: dict[str, int], added: list[Json]) -> None:
    """Add the added tokens to the vocabulary, unless the library assigns their ids itself, after its last id."""
    for token in added:
        vocab.pop(token["content"], None)
    next_ids = range(len(vocab), len(vocab) + len(added))
    if [token["id"] for token in added] != [*next_ids] or max(vocab.values()) >= len(vocab):
        vocab |= {token["content"]: token["id"] for token in added}


def _post_processor(fields: Fields, ids: Mapping[str, int], table: TokenTable) -> Json:
    byte_level, pre = fields.text("model") == "gpt2", fields.text("pre", default="default")
    adds_bos = fields.boolean("add_bos_token", default=not byte_level or PRE_TOKENIZERS[pre].adds_bos)
    adds_eos = fields.boolean("add_eos_token", default=False)
    added = {role: ids[role] for role, is_added in (("bos", adds_bos), ("eos", adds_eos)) if is_added}
    texts = {role: table.texts[token_id] for role, token_id in added.items()}

    def steps(sequence: str, type_id: int) -> list[Json]:
        sequence_steps: list[Json] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if "bos" in texts:
            sequence_steps.insert(0, {"SpecialToken": {"id": texts["bos"], "type_id": type_id}})
        if "eos" in texts:
            sequence_steps.append({"SpecialToken": {"id": texts["eos"], "type_id": type_id}})
        return sequence_steps

    tokens = {texts[role]: {"id": texts[role], "ids": [added[role]], "tokens": [texts[role]]} for role in texts}
    pair = steps("A", 0) + steps("B", 1)
    template = {"type": "TemplateProcessing", "single": steps("A", 0), "pair": pair, "special_tokens": tokens}
    return sequence("processors", BYTE_LEVEL, template) if byte_level else template


def _config(table: TokenTable, ids: Mapping[str, int], templates: Mapping[str, str], context: int) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{key}_token": table.texts[ids[role]] if role in ids else None for role, key in _ROLES.items()},
        "unk_token": next(iter(table.ids_of(TokenType.UNKNOWN)), None),
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config
