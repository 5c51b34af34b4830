"""Public tokenizer, with the same interface for GGUF files and Hugging Face folders."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from llorch.files.gguf import GGUFFile
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.files.tokenizer.huggingface import HuggingFaceVocabulary
from llorch.runtime.errors import FormatError, UserError


class Tokenizer:
    """Tokenizer: encodes text to token ids, and decodes token ids."""

    def __init__(self, vocabulary: GGUFVocabulary | HuggingFaceVocabulary) -> None:
        """Wrap a vocabulary; use `from_gguf` or `from_huggingface`."""
        self._vocabulary = vocabulary
        self.vocab_size = vocabulary.vocab_size
        self.bos_token_id = vocabulary.special.bos_token_id
        self.eos_token_id = vocabulary.special.eos_token_id
        self.eos_token_ids = vocabulary.special.eos_token_ids

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "Tokenizer":
        """Read the vocabulary of a GGUF file, which may then be closed; ids equal llama.cpp's."""
        return cls(GGUFVocabulary(file.metadata, file.path))

    @classmethod
    def from_huggingface(cls, folder: str | Path) -> "Tokenizer":
        """Read `tokenizer.json` of a model folder; ids equal those of the `tokenizers` library."""
        return cls(HuggingFaceVocabulary(Path(folder)))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Encode text.

        Args:
            text: Any text without lone surrogates.
            add_special: Add BOS and EOS as the file says.
            parse_special: Encode the text of a control token, such as `<|eot_id|>`, as that token; not for user text.

        Raises:
            UserError: The text has a lone surrogate.
        """
        return self._encode(text, add_special, parse_special)[0]

    def encode_spans(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> tuple[list[int], list[int]]:
        """Encode text like `encode`; also return the index of the character in which each token starts.

        Tokens that share a character have the same index; an added BOS has -1, an added EOS the length of the text.
        """
        ids, starts = self._encode(text, add_special, parse_special)
        return ids, list(starts)

    def _encode(self, text: str, add_special: bool, parse_special: bool) -> tuple[list[int], Iterator[int]]:
        _refuse_surrogates(text)
        return self._vocabulary.encode_spans(
            text, add_special=add_special, parse_special=parse_special, continues=False
        )

    def encode_rendered(self, text: str, *, inert: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Encode the output of a chat template: texts of control tokens become tokens, except in user text.

        `inert` has positions that no control token may span: one inside each control token text of a user; for a text
        of a single character the position after it, twice. Returns ids and the character index of each token.
        """
        ids, starts = self.encode_spans(text, add_special=False, parse_special=True)
        if not inert:
            return ids, starts
        spans = zip(ids, starts, [*starts[1:], len(text)], strict=True)
        controls = [(start, stop) for token_id, start, stop in spans if token_id in self.control_ids]
        active = [(first, last) for first, last in controls if not _is_inert(text, first, last, inert)]
        if len(active) == len(controls):
            return ids, starts
        return self._encode_with_controls(text, active)

    def _encode_with_controls(self, text: str, controls: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Encode with control tokens only at the spans (start, end) in `controls`."""
        ids: list[int] = []
        starts: list[int] = []
        position = 0
        for first, last in [*controls, (len(text), len(text))]:
            for part, is_control in ((text[position:first], False), (text[first:last], True)):
                part_ids, part_starts = self._vocabulary.encode_spans(
                    part, add_special=False, parse_special=is_control, continues=position > 0
                )
                ids += part_ids
                starts += [start + (first if is_control else position) for start in part_starts]
            position = last
        return ids, starts

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of all control tokens."""
        return self._vocabulary.special.hidden

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """Texts of all control tokens."""
        return frozenset(self._piece(token_id).decode("utf-8", "replace") for token_id in self.control_ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decode token ids; the inverse of `encode`.

        The space that some vocabularies add before the text is removed. (llama.cpp keeps it after BOS, and removes
        spaces before punctuation for some vocabularies; neither is an inverse.)

        With `skip_special`, control tokens give no text. Bytes that are not UTF-8 become U+FFFD. UserError for an id
        outside the vocabulary.
        """
        return b"".join(self._pieces(ids, skip_special)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, for streaming: characters may span tokens.

        A leading space is included. A control token gives no bytes. UserError for an id outside the vocabulary.
        """
        return b"" if token_id in self._vocabulary.special.hidden else self._piece(token_id)

    def _pieces(self, ids: Iterable[int], skip_special: bool) -> Iterator[bytes]:
        """Yield the bytes of each token, without the added space before the text."""
        special, space_prefix = self._vocabulary.special, self._vocabulary.space_prefix
        at_start = space_prefix != "never"
        for token_id in ids:
            piece = self._piece(token_id)
            if token_id in special.hidden or token_id in special.visible:
                at_start = space_prefix == "always" or (at_start and token_id == special.bos_token_id)
                yield b"" if skip_special and token_id in special.hidden else piece
            else:
                yield piece.removeprefix(b" ") if at_start else piece
                at_start = False

    def _piece(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise UserError(f"token id: expected 0 to {self.vocab_size - 1}, got {token_id}")
        return self._vocabulary.piece(token_id)


def require_rows(ids: Iterable[int], n_rows: int, *, path: str | Path) -> None:
    """Raise FormatError Inconsistent for token ids beyond the rows of the embedding table."""
    if (largest := max(ids, default=0)) >= n_rows:
        message = f"token {largest} has no row in the embedding table of {n_rows} rows"
        remedy = "resize the embedding with transformers, or use the tokenizer that belongs to the model"
        raise FormatError("Inconsistent", f"{message}; {remedy}", path=path)


def _is_inert(text: str, start: int, stop: int, inert: Sequence[int]) -> bool:
    """Check if a control token's text comes from a user; the span may include whitespace that the token strips."""
    if len(text[start:stop].strip()) <= 1 and any(start < index <= stop and inert.count(index) > 1 for index in inert):
        return True
    return any(start < index < stop for index in inert)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        message = f"text: expected Unicode, got the lone surrogate {surrogate!a} at index {error.start}"
        raise UserError(f"{message}; decode the bytes with errors='replace'") from None
