"""The tokens that are no text: which they are, which of them end a generation, and how text is cut at them.

Source: llama.cpp src/llama-vocab.cpp, `impl::load` (end-of-generation list) and `tokenizer_st_partition`.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

SpacePrefix = Literal["never", "start", "always"]  # where encoding puts a space: before the text, after each special

# Files name one end token; chat models stop at others too, which llama.cpp finds by their text. These are the ones
# that occur in files of the Llama and Qwen families and their fine-tunes.
END_TEXTS = (
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>",
    "<EOT>", "_<EOT>", "[EOS]", "[EOT]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # the Qwen and Llama distillations of DeepSeek R1
)  # fmt: skip
# Tokens of code models, likewise found by their text unless the metadata names the role. Of each row only the first
# that the vocabulary has counts.
FILL_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "\u2581<PRE>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "\u2581<SUF>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "\u2581<MID>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids that are treated as something other than text."""

    bos_token_id: int | None
    eos_token_id: int | None  # the one that the file names, or names first: it ends a text
    eos_token_ids: frozenset[int]  # every id that ends a generation
    hidden: frozenset[int]  # control and unknown tokens: cut out of text only on request, never shown in it
    visible: frozenset[int]  # user-defined tokens: always cut out of text, and part of what is shown


def find_by_text(ids: Mapping[str, int], named: Container[str]) -> dict[str, int]:
    """Find control tokens by text: end tokens under their text, others under their role unless it is in `named`."""
    found = {text: ids[text] for text in END_TEXTS if text in ids}
    for role, texts in FILL_TEXTS.items():
        known = [ids[text] for text in texts if text in ids]
        if known and role not in named:
            found[role] = known[0]
    return found


def find_end_tokens(by_text: Mapping[str, int], named: Mapping[str, int]) -> frozenset[int]:
    """Return every token that ends a generation, from `find_by_text` and from the roles that the file states."""
    keys = (*END_TEXTS, *END_ROLES)
    return frozenset(ids[key] for ids in (by_text, named) for key in keys if key in ids)


_WHITESPACE = r"[ \t\n\v\f\r]*"  # isspace of C


class Cutter:
    """Cuts text at special tokens: where two overlap, the one with more bytes counts, even if it starts later."""

    def __init__(self, texts: Mapping[str, int], *, strips: Container[str] = ()) -> None:
        """Prepare one search per length; special texts of `strips` take the whitespace behind them with them."""
        self._ids = texts
        kinds = {text: (len(text.encode("utf-8", "surrogateescape")), text in strips) for text in texts}
        self._searches = [
            re.compile("(" + "|".join(map(re.escape, same)) + ")" + _WHITESPACE * kind[1])
            for kind in sorted(set(kinds.values()), reverse=True)
            for same in [[text for text in texts if kinds[text] == kind]]
        ]

    def cut(self, text: str) -> list[tuple[int, str | int]]:
        """Cut a text at special texts into pieces (none empty) and ids, each with its first character's index."""
        parts: list[tuple[int, str | int]] = [(0, text)] if text else []
        for search in self._searches:
            if search.search(text):
                parts = [piece for start, part in parts for piece in self._split(start, part, search)]
        return parts

    def _split(self, start: int, part: str | int, search: re.Pattern[str]) -> Iterator[tuple[int, str | int]]:
        """Yield a text's parts and the ids of tokens found in it, each with its place; an id stays as it is."""
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
