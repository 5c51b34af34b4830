"""Special tokens: control tokens, end-of-generation tokens, and splitting of text at special tokens.

Source: llama.cpp src/llama-vocab.cpp, `impl::load` (end-of-generation list) and `tokenizer_st_partition`.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

SpacePrefix = Literal["never", "start", "always"]  # added space: none, before the text, also after each special token

# Files name one end token; chat models also stop at others, which llama.cpp finds by text. This list has the texts in
# files of the Llama and Qwen families and their fine-tunes.
END_TEXTS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>",
    "<EOT>", "_<EOT>", "[EOS]", "[EOT]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # the Qwen and Llama distillations of DeepSeek R1
)  # fmt: skip
# Fill-in-the-middle tokens of code models, used if the metadata lack the role: the first text in the vocabulary.
FILL_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "\u2581<PRE>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "\u2581<SUF>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "\u2581<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # roles of tokens that end a generation


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Special token ids of a vocabulary."""

    bos_token_id: int | None
    eos_token_id: int | None  # end token of the file, or its first one
    eos_token_ids: frozenset[int]  # every id that ends a generation
    hidden: frozenset[int]  # control and unknown tokens: parsed only on request, not decoded to text
    visible: frozenset[int]  # user-defined tokens: always parsed, and decoded to text


def find_by_text(ids: Mapping[str, int], known_roles: Container[str]) -> dict[str, int]:
    """Return ids of control tokens found by text: end tokens by text, others by role if not in `known_roles`."""
    ids_by_key = {text: ids[text] for text in END_TEXTS if text in ids}
    for role, texts in FILL_TEXTS.items():
        present = [ids[text] for text in texts if text in ids]
        if present and role not in known_roles:
            ids_by_key[role] = present[0]
    return ids_by_key


def find_end_tokens(by_text: Mapping[str, int], by_role: Mapping[str, int]) -> frozenset[int]:
    """Return every token that ends a generation, from `find_by_text` and from the file's roles."""
    keys = (*END_TEXTS, *END_ROLES)
    return frozenset(ids[key] for ids in (by_text, by_role) for key in keys if key in ids)


_WHITESPACE = r"[ \t\n\v\f\r]*"  # isspace of C


class Cutter:
    """Splitter of text at special tokens; of two overlapping ones the one with more bytes wins."""

    def __init__(self, texts: Mapping[str, int], *, strips: Container[str] = ()) -> None:
        """Prepare one search per length; special texts in `strips` include the whitespace after them."""
        self._ids = texts
        kinds = {text: (len(text.encode("utf-8", "surrogateescape")), text in strips) for text in texts}
        self._searches = [
            re.compile("(" + "|".join(map(re.escape, same)) + ")" + _WHITESPACE * kind[1])
            for kind in sorted(set(kinds.values()), reverse=True)
            for same in [[text for text in texts if kinds[text] == kind]]
        ]

    def cut(self, text: str) -> list[tuple[int, str | int]]:
        """Split a text at special texts into non-empty pieces and ids, each with its start index."""
        parts: list[tuple[int, str | int]] = [(0, text)] if text else []
        for search in self._searches:
            if search.search(text):
                parts = [piece for start, part in parts for piece in self._split(start, part, search)]
        return parts

    def _split(self, start: int, part: str | int, search: re.Pattern[str]) -> Iterator[tuple[int, str | int]]:
        """Yield the pieces and special token ids of a part, each with its start index; an id is yielded unchanged."""
        if isinstance(part, int):
            yield start, part
            return
        end = 0
        for match in search.finditer(part):
            if match.start() > end:
                yield start + end, part[end : match.start()]
            yield start + match.start(), self._ids[match[1]]
            end = match.end()
        if end < len(part):
            yield start + end, part[end:]
