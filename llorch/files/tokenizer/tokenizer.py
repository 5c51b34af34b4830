"""The public tokenizer: one behaviour for the vocabularies of GGUF files and of Hugging Face folders."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from llorch.files.gguf import GGUFFile
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.files.tokenizer.huggingface import HuggingFaceVocabulary
from llorch.runtime.errors import FormatError, UserError


class Tokenizer:
    """Token ids from text, and text from token ids."""

    def __init__(self, vocabulary: GGUFVocabulary | HuggingFaceVocabulary) -> None:
        """Wrap a vocabulary; use `from_gguf` or `from_huggingface`."""
        self._vocabulary = vocabulary
        self.vocab_size = vocabulary.vocab_size
        self.bos_token_id = vocabulary.special.bos_token_id
        self.eos_token_id = vocabulary.special.eos_token_id
        self.eos_token_ids = vocabulary.special.eos_token_ids

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "Tokenizer":
        """Read the vocabulary of an open GGUF file, which is not needed any more; ids are those of llama.cpp."""
        return cls(GGUFVocabulary(file.metadata, file.path))

    @classmethod
    def from_huggingface(cls, folder: str | Path) -> "Tokenizer":
        """Read `tokenizer.json` of a model folder; ids are those of the `tokenizers` library."""
        return cls(HuggingFaceVocabulary(Path(folder)))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Encode text.

        Args:
            text: Any text without lone surrogates.
            add_special: Put the beginning and end tokens that the file asks for.
            parse_special: Turn the text of a control token, such as `<|eot_id|>`, into that token. Leave it off for
                text from users: there it stays text.

        Returns:
            Token ids.

        Raises:
            ValueError: The text has a lone surrogate.
        """
        return self._encoded(text, add_special, parse_special)[0]

    def encode_spans(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> tuple[list[int], list[int]]:
        """Encode text as `encode` does, and tell in which character of it each token starts.

        Tokens that share a character start at the same one; -1 for an added beginning, the length of the text for an
        added end.
        """
        ids, starts = self._encoded(text, add_special, parse_special)
        return ids, list(starts)

    def _encoded(self, text: str, add_special: bool, parse_special: bool) -> tuple[list[int], Iterator[int]]:
        """Encode a text from its beginning; return ids and the place at which each token starts."""
        _refuse_surrogates(text)
        return self._vocabulary.encode_spans(
            text, add_special=add_special, parse_special=parse_special, continues=False
        )

    def encode_rendered(self, text: str, *, inert: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Encode what a chat template made: the text of control tokens is these tokens, but not inside of user text.

        `inert` are places that no control token may run over: one inside each text of one that a user wrote; where one
        is a single character, the place behind it, twice. Returned are ids, and in which character each starts.
        """
        ids, starts = self.encode_spans(text, add_special=False, parse_special=True)
        if not inert:
            return ids, starts
        spans = zip(ids, starts, [*starts[1:], len(text)], strict=True)
        controls = [(start, stop) for one, start, stop in spans if one in self.control_ids]
        taken = [(first, last) for first, last in controls if not _is_inert(text, first, last, inert)]
        if len(taken) == len(controls):
            return ids, starts
        return self._encode_between(text, taken)

    def _encode_between(self, text: str, controls: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Encode with these control tokens and no others."""
        ids: list[int] = []
        starts: list[int] = []
        place = 0
        for first, last in [*controls, (len(text), len(text))]:
            for part, special in ((text[place:first], False), (text[first:last], True)):
                new, places = self._vocabulary.encode_spans(
                    part, add_special=False, parse_special=special, continues=place > 0
                )
                ids += new
                starts += [start + (first if special else place) for start in places]
            place = last
        return ids, starts

    @property
    def control_ids(self) -> frozenset[int]:
        """All control tokens: those that are no text."""
        return self._vocabulary.special.hidden

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """Their texts, as somebody would write them."""
        return frozenset(self._piece(one).decode("utf-8", "replace") for one in self.control_ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decode token ids; the inverse of `encode`.

        The space that encoding put before the text, if the vocabulary does so, is taken away again. (llama.cpp keeps
        it after a beginning token, and tidies spaces before punctuation for some vocabularies: neither is inverse.)

        Args:
            ids: Token ids.
            skip_special: Leave control tokens out.

        Returns:
            The text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        return b"".join(self._pieces(ids, skip_special)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, for streaming: characters may span tokens.

        A leading space is included; nothing for a control token. ValueError for an id outside the vocabulary.
        """
        return b"" if token_id in self._vocabulary.special.hidden else self._piece(token_id)

    def _pieces(self, ids: Iterable[int], skip_special: bool) -> Iterator[bytes]:
        """Yield the bytes of each token, without the space that a tokenizer puts before a text."""
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
    """Refuse (FormatError Inconsistent) token ids of a tokenizer that are beyond the rows of the embedding table."""
    if (largest := max(ids, default=0)) >= n_rows:
        message = f"token {largest} has no row in the embedding table of {n_rows} rows"
        remedy = "resize the embedding with transformers, or use the tokenizer that belongs to the model"
        raise FormatError("Inconsistent", f"{message}; {remedy}", path=path)


def _is_inert(text: str, first: int, last: int, inert: Sequence[int]) -> bool:
    """Tell if a user wrote the text of a control token; the span may include whitespace that the token strips."""
    if len(text[first:last].strip()) <= 1 and any(first < place <= last and inert.count(place) > 1 for place in inert):
        return True
    return any(first < place < last for place in inert)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        message = f"text: expected Unicode, got the lone surrogate {surrogate!a} at index {error.start}"
        raise UserError(f"{message}; decode the bytes with errors='replace'") from None
