"""Vocabulary of a file, compared with the vocabulary of its source; each is a GGUF file or a Hugging Face folder.

Each row judges one subject and leaves out what another row reports. A token's type counts by its effect: llama.cpp
makes a control token of every end token, by its text; its converter does so for every text that looks like one.

Source: llama.cpp conversion/base.py (`get_vocab_base`, `does_token_look_special`), src/llama-vocab.cpp (`impl::load`);
gguf-py vocab.py, `SpecialVocab` (tokens added to a text).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import pairwise, product, zip_longest
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Splits

from llorch.files import Weights
from llorch.files.gguf import GGUFFile
from llorch.files.strict_json import read_json, read_settings
from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.byte_level import PRE_TOKENIZERS
from llorch.files.tokenizer.chat import ChatTemplate, TemplateSettings, compiled, read_templates, templates_of_metadata
from llorch.files.tokenizer.gguf_table import TokenTable, TokenType
from llorch.files.tokenizer.merges import Merge, check_merges, merges_of_scores
from llorch.files.tokenizer.pipeline import Pipeline, name_of_words
from llorch.files.tokenizer.sentencepiece import BYTE_TOKEN, SPACE
from llorch.files.tokenizer.special import END_TEXTS, FILL_TEXTS
from llorch.judging.compare import compare_exact
from llorch.judging.types import Comparison
from llorch.runtime.errors import FormatError
from llorch.runtime.fields import Fields
from llorch.stages.stage_ref import StageRef

TEXTS = (
    "", " ", "0 7 42 365 2024 12345 1234567", "3.14159 1,000,000 10:30", "x2y33z444w5555", "\u0661\u0662\u0663\u0664",
    "\u0967\u0968\u0969\u096a", "\u00bd x\u00b2 \u2167", "I'm he's we'll they've you're she'd can't", "it\u2019s y'all",
    "I'M HE'S WE'LL THEY'VE YOU'RE SHE'D CAN'T", "'tis 's 'S rock'n'roll O'Neill", "a\nb\n\nc", "a \n b  \n\n  c", "\n",
    "\n\n\n", "\r\n x\r\ny\r", "tail  \n", " leading", "   three spaces", "a  b   c     d", "end   ", "\t", "\tx\t\ty",
    " \t mixed \t\n", "a\u00a0b \u3000c\u2003d", "\u200bx\ufeffy", "snake_case_name __init__ _x",
    "camelCase HTMLParser iPhone XMLHttp2", "ALL CAPS words Title Case", "Hello, world! How are you?",
    "(a) [b] {c} <d> \"e\" 'f' `g`", "...!!!???---===+++", "$5 + 7% = #1 & @x ^~|", "a/b\\c http://x.org/?q=1",
    "//\n/*\n*/\n#!\n", "def f(x):\n    return x ** 2\n", "if (a<=b&&c!=d) {\n\treturn;\n}", "na\u00efve \u00fcber",
    "e\u0301a\u0308 n\u0303", "x\u0301\u0302y\u20d7", "\u0440\u0443\u0441 \u0413\u041e\u0441\u0422",
    "\u03b1\u03b2 \u03b4", "\u05e9\u05dc\u05d5", "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643",
    "\u0643\u064e\u062a\u064e\u0628\u064e", "\u0928\u092e\u0938\u094d\u0924\u0947 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\u3053\u3093\u306b\u3061\u306f \u30ab\u30ca", "\ud55c\uad6d\uc5b4 \uc788",
    "in\u4e2d\u6587mix\u0440\u0443\u0441 12\u5e74", "\U0001f600 \U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f", "\ufffd\u2028\u0085", "<think>x</think>",
    "[INST]x[/INST]", "<s>x</s>", "x<|eot_id|>y", "<|im_start|>user\nHi<|im_end|>", "<|endoftext|><|begin_of_text|>x",
    "<tool_call>{}",
)  # fmt: skip
_SYSTEM, _USER = {"role": "system", "content": "You are brief."}, {"role": "user", "content": "What time is it?"}
_ANSWER = {"role": "assistant", "content": "It is ten."}
_THOUGHTS = {"role": "assistant", "content": "<think>\nA clock.\n</think>\n\nTen.", "reasoning_content": "A clock."}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_OUTPUT = {"role": "tool", "name": "time", "tool_call_id": "call00001", "content": '{"time": "10:00"}'}
_ZONE = {"type": "object", "properties": {"zone": {"type": "string", "description": "Time zone"}}, "required": ["zone"]}
_TOOL = {"type": "function", "function": {"name": "time", "description": "Get the time.", "parameters": _ZONE}}
_CONVERSATIONS: dict[str, Sequence[Mapping[str, object]]] = {
    "one turn": [_USER],
    "system, one turn": [_SYSTEM, _USER],
    "two turns": [_USER, _ANSWER, _USER],
    "system, two turns": [_SYSTEM, _USER, _ANSWER, _USER, _ANSWER],
    "thoughts": [_USER, _THOUGHTS, _USER, _THOUGHTS],
    "tool output": [_USER, _CALLING, _OUTPUT],
    "system, tool call": [_SYSTEM, _USER, _CALLING, _OUTPUT, _ANSWER, _USER],
    "spaces": [{"role": "user", "content": "  x\n\n y \n"}, {"role": "assistant", "content": "\n z "}, _USER],
}
_Case = tuple[str, Sequence[object] | None, bool, Mapping[str, object] | None]
_CASES: list[_Case] = [*product(_CONVERSATIONS, (None, [_TOOL]), (False, True), (None, {"enable_thinking": False}))]
_TIME = datetime(2025, 1, 15, 12)  # for templates that write the date
_TYPES = {  # CONTROL and UNKNOWN are parsed and hidden alike
    TokenType.NORMAL: "normal", TokenType.USER_DEFINED: "user defined", TokenType.BYTE: "byte",
    TokenType.CONTROL: "control", TokenType.UNKNOWN: "control",
}  # fmt: skip
_EFFECTS = {  # of the type in the file
    "normal": "its text becomes this token by merges only",
    "user defined": "its text in any prompt becomes this token, and answers show it",
    "control": "answers hide it, and its text in the prompt of a user does not become this token",
    "byte": "it prints one byte",
    "unused": "it prints nothing",
}
_CONTROL_BY_TEXT = frozenset(END_TEXTS).union(*FILL_TEXTS.values())
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
_AS_LLAMACPP = "as in llama.cpp"  # spaces: before every text, and after each special token


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """Tables of a vocabulary as they are stored, and llorch's reader.

    Attributes:
        texts: Text of each id, without padding ids.
        types: Type of each id: a value of `_TYPES`, or "unused".
        merges: Merges by priority; those equivalent to the scores if there are scores.
        scores: Score of each normal token, for SentencePiece in a GGUF file; else empty.
        pre: llama.cpp's name of the pre-tokenizer; empty for SentencePiece.
        words: Pre-tokenizer of the file, which splits a text into words; None for SentencePiece.
        spaces: Added spaces: "never", `_AS_LLAMACPP`, or the scheme of a folder, "first" or "always".
        composes: True if a text is normalized to NFC first.
        is_gguf: True for a GGUF file.
        adds: Values of `add_bos_token` and `add_eos_token` in tokenizer_config.json.
        templates: Chat templates by name.
    """

    tokenizer: Tokenizer
    texts: Mapping[int, str]
    types: Mapping[int, str]
    merges: Sequence[Merge]
    scores: Mapping[str, float]
    pre: str
    words: PreTokenizer | None
    spaces: str
    composes: bool
    is_gguf: bool
    adds: Sequence[object]
    templates: Mapping[str, str]

    def texts_of(self, token_type: str) -> set[str]:
        """Return the texts of the tokens of a type."""
        return {text for token_id, text in self.texts.items() if self.types[token_id] == token_type}

    def name(self, token_id: int | None) -> str:
        """Format an id with its text."""
        return "none" if token_id is None else f"{token_id} {self.texts.get(token_id, 'padding')!r}"

    def special_roles(self) -> dict[str, str]:
        """Map the text of each special token to its role in llorch's reader."""
        controls = {self.texts[token_id]: "control" for token_id in self.tokenizer.control_ids & self.texts.keys()}
        return dict.fromkeys(self.texts_of("user defined"), "user defined") | controls

    def split(self, text: str) -> list[str]:
        """Split a text into words; for SentencePiece, return the text with the added space."""
        return _split(self.words, text) if self.words else [text if self.spaces == "never" else f" {text}"]

    def is_approximated(self, text: str) -> bool:
        """Check if llama.cpp's pre-tokenizer of this name splits a text into other words."""
        return self.words is not None and self.split(text) != _split(_llamacpp_words(self.pre), text)


@dataclass(frozen=True)
class _Result:
    """Differences of one subject, the effect of the differences, and notes."""

    differences: Sequence[str] = ()
    effect: str = ""
    notes: Sequence[str] = ()
    n_compared: int = 1

    def comparison(self, part: str, model: str) -> Comparison:
        """Return the row of the subject, with the first three differences and the first three notes."""
        n_more, n_more_notes = len(self.differences) - 3, len(self.notes) - 3
        parts = [*self.differences[:3], f"and {n_more} more" * (n_more > 0), self.effect * bool(self.differences)]
        parts += [*self.notes[:3], f"and {n_more_notes} more notes" * (n_more_notes > 0)]
        share, stage_ref = min(1.0, len(self.differences) / self.n_compared), StageRef("00", "tokenizer", part=part)
        note = "; ".join(filter(None, parts))
        return compare_exact(stage_ref, "source", share, note, model=model, backend="file")


def compare_vocabularies(file: Weights, source: Weights, *, model: str) -> Iterator[Comparison]:
    """Compare the vocabulary of a file with the vocabulary of its source, one row for each subject.

    If llorch cannot read the source's vocabulary, or there is none, the only row is a note. If that is so for the
    file alone, the only row is FAIL.
    """
    actual, expected = _read(file), _read(source)
    if isinstance(expected, str):
        results = {"tokens": _Result(notes=[f"NOT RUN: llorch reads no vocabulary of the source: {expected}"])}
    elif isinstance(actual, str):
        difference = f"{len(expected.texts)} tokens in the source, llorch reads no vocabulary of the file: {actual}"
        results = {"tokens": _Result([difference], "programs can neither encode nor decode text")}
    else:
        results = _compare_subjects(actual, expected)
    yield from (result.comparison(part, model) for part, result in results.items())


def _compare_subjects(file: _Vocabulary, source: _Vocabulary) -> dict[str, _Result]:
    tokens, merges = _compare_tokens(file, source), _compare_merges(file, source)
    return {
        "tokens": tokens,
        "types": _compare_types(file, source),
        "scores" if file.scores or source.scores else "merges": merges,
        "pre_tokenizer": _compare_encodings(file, source, only_words=bool(tokens.differences or merges.differences)),
        "begin": _compare_begin(file, source),
        "end": _compare_end(file, source),
        "end of turn": _compare_end_of_turn(file, source),
        "add_bos": _compare_added(file, source),
        "chat_template": _compare_templates(file, source),
    }


def _read(weights: Weights) -> _Vocabulary | str:
    """Read the vocabulary of a model; return the error's message if llorch cannot read it, or there is none."""
    try:
        return _read_gguf(weights.source) if isinstance(weights.source, GGUFFile) else _read_folder(Path(weights.path))
    except FormatError as error:
        return str(error)


def _read_gguf(file: GGUFFile) -> _Vocabulary:
    tokenizer = Tokenizer.from_gguf(file)  # raises for unknown parts
    fields, table = Fields(file.metadata, file.path, prefix="tokenizer.ggml."), TokenTable(file.metadata, file.path)
    pre = fields.text("pre", default="default") if fields.text("model") == "gpt2" else ""
    texts, types = dict(enumerate(table.texts)), {i: _TYPES.get(kind, "unused") for i, kind in enumerate(table.types)}
    scores = {} if pre else {texts[i]: score for i, score in enumerate(table.read_scores()) if types[i] == "normal"}
    return _Vocabulary(
        tokenizer=tokenizer,
        texts=_without_padding(texts),
        types=types,
        merges=table.read_merges({text: i for i, text in texts.items()}) if pre else merges_of_scores(scores),
        scores=scores,
        pre=pre,
        words=_llamacpp_words(pre) if pre else None,
        spaces="never" if pre or not fields.boolean("add_space_prefix", default=True) else _AS_LLAMACPP,
        composes=False,
        is_gguf=True,
        adds=(None, None),
        templates=templates_of_metadata(file.metadata, Path(file.path)),
    )


def _read_folder(folder: Path) -> _Vocabulary:
    tokenizer, path = Tokenizer.from_huggingface(folder), folder / "tokenizer.json"  # raises for unknown parts
    content: dict[str, Any] = read_json(path, limit=64 << 20)
    vocab, fallback, words = content["model"]["vocab"], content["model"].get("byte_fallback"), content["pre_tokenizer"]
    texts = {token_id: text for text, token_id in vocab.items()}
    types = {i: "byte" if fallback and BYTE_TOKEN.fullmatch(text) else "normal" for i, text in texts.items()}
    if fallback and (unknown := content["model"].get("unk_token")) in vocab:
        types[vocab[unknown]] = "control"
    for token in content["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = "control" if token.get("special") else "user defined"
    settings = read_settings(folder / "tokenizer_config.json")
    return _Vocabulary(
        tokenizer=tokenizer,
        texts=_without_padding(texts),
        types=types,
        merges=check_merges(content["model"]["merges"], vocab, key="merges", path=path),
        scores={},
        pre="" if fallback else str(name_of_words(words)),
        words=None if fallback else Pipeline(content, path).tokenizer().pre_tokenizer,
        spaces="never" if not fallback else words["prepend_scheme"] if words else _AS_LLAMACPP,
        composes=content.get("normalizer") == {"type": "NFC"},
        is_gguf=False,
        adds=[settings.get(f"add_{role}_token") for role in ("bos", "eos")],
        templates=read_templates(folder),
    )


def _without_padding(texts: Mapping[int, str]) -> dict[int, str]:
    """Drop empty texts, and the texts that converters write for ids without a token."""
    return {i: text for i, text in texts.items() if text not in ("", f"[PAD{i}]", f"[EMPTY_{i}]")}


@cache
def _llamacpp_words(pre: str) -> PreTokenizer:
    """Return llama.cpp's pre-tokenizer of a name; some approximate the publisher's, as for the case of letters."""
    return Splits([Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].patterns])


def _split(words: PreTokenizer, text: str) -> list[str]:
    return [text[start:stop] for _, (start, stop) in words.pre_tokenize_str(text)]


def _format_pair(actual: object, expected: object) -> str:
    return f"{actual} in the file, {expected} in the source"


def _spaced(text: str | None) -> str:
    """Replace U+2581 by the space that it stands for, as llama.cpp's converter does in user-defined tokens."""
    return (text or "").replace(SPACE, " ")


def _first_difference(actual: Sequence[object], expected: Sequence[object]) -> int:
    """Return the first index at which two different sequences differ."""
    return next(i for i, (first, second) in enumerate(zip_longest(actual, expected)) if first != second)


def _compare_tokens(file: _Vocabulary, source: _Vocabulary) -> _Result:
    """Compare the text of each id, which determines the bytes; an unused token of one side alone is padding."""
    differences, ids = [], sorted(file.texts.keys() | source.texts.keys())
    for token_id in ids:
        actual, expected = file.texts.get(token_id), source.texts.get(token_id)
        types = {tables.types[token_id] for tables in (file, source) if token_id in tables.texts}
        if _spaced(actual) != _spaced(expected) and types != {"unused"}:
            texts = (repr(text or "padding") for text in (actual, expected))
            differences.append(f"token {token_id}: {_format_pair(*texts)}")
    paddings = [tables.tokenizer.vocab_size - len(tables.texts) for tables in (file, source)]
    notes = [f"padding ids: {_format_pair(*paddings)}"] if paddings[0] != paddings[1] else []
    return _Result(differences, "the model reads and writes other text with these ids", notes, len(ids))


def _compare_types(file: _Vocabulary, source: _Vocabulary) -> _Result:
    """Compare the types of the tokens that have the same text in both; a type without effect is a note."""
    differences, effects, notes = [], [], []
    for token_id, text in file.texts.items():
        actual, expected = file.types[token_id], source.types.get(token_id)
        if actual == expected or _spaced(source.texts.get(token_id)) != _spaced(text):
            continue
        difference = f"token {file.name(token_id)}: {_format_pair(actual, expected)}"
        is_converted = file.is_gguf and (actual, expected) == ("control", "user defined")
        if text in _CONTROL_BY_TEXT and (file.is_gguf or source.is_gguf):
            notes.append(f"{difference} (a control token in llama.cpp, by its text)")
        elif is_converted and _LOOKS_SPECIAL.fullmatch(text):
            notes.append(f"{difference} (by llama.cpp's converter, for its text)")
        else:
            differences.append(difference)
            effects.append(_EFFECTS[actual])
    return _Result(differences, "; ".join(dict.fromkeys(effects)), notes, len(file.texts))


def _compare_merges(file: _Vocabulary, source: _Vocabulary) -> _Result:
    """Compare the merges of normal tokens in order; a GGUF file of SentencePiece has scores in their place."""
    normal, effect = file.texts_of("normal") & source.texts_of("normal"), "words become other tokens"
    actual, expected = (
        [merge for merge in tables.merges if normal.issuperset((*merge, "".join(merge)))] for tables in (file, source)
    )
    n_merges = max(1, len(expected))
    if file.scores or source.scores:
        differences = _differences_in_priority(file, source, actual, expected)
        has_other = file.scores and source.scores and any(file.scores[text] != source.scores[text] for text in normal)
        return _Result(differences, effect, ["other scores in the same order"] * bool(has_other), n_merges)
    pairs = enumerate(zip_longest(actual, expected))
    differences = [f"merge {i}: {_format_pair(*pair)}" for i, pair in pairs if pair[0] != pair[1]]
    return _Result(differences, effect, n_compared=n_merges)


def _differences_in_priority(
    file: _Vocabulary, source: _Vocabulary, actual: Sequence[Merge], expected: Sequence[Merge]
) -> list[str]:
    """Compare an order of merges with scores; of equal scores the longer left part is first, as transformers writes."""
    scores, merges = (file.scores, expected) if file.scores else (source.scores, actual)
    first, second = ("source", "file") if file.scores else ("file", "source")
    ranks = [(-scores["".join(merge)], -len(merge[0]), -len(merge[1])) for merge in merges]
    differences = [
        f"{''.join(before)!r} before {''.join(after)!r} in the {first}, after it in the {second}"
        for (before, after), (rank, next_rank) in zip(pairwise(merges), pairwise(ranks), strict=True)
        if next_rank < rank
    ]
    differences += [f"merge {merge} in the file only" for merge in sorted({*actual} - {*expected})]
    return differences + [f"merge {merge} in the source only" for merge in sorted({*expected} - {*actual})]


def _compare_encodings(file: _Vocabulary, source: _Vocabulary, *, only_words: bool) -> _Result:
    """Compare the words of `TEXTS`, and the tokens by their texts; with `only_words`, not the tokens.

    Other words are FAIL even if no token shows these: in a small vocabulary, few tokens reach the end of a word.
    """
    texts, notes = _comparable_texts(file, source)
    differences, effect = [], "texts split into other words"
    for text in texts:
        words, source_words = file.split(text), source.split(text)
        (actual, names), (expected, source_names) = (_tokens_of(tables, text) for tables in (file, source))
        if only_words or actual == expected:
            actual, expected, names, source_names = words, source_words, words, source_words
        else:
            effect = "texts become other tokens"
        if actual != expected:
            part = slice(start := _first_difference(actual, expected), start + 3)
            differences.append(f"{text!r}: {_format_pair(names[part], source_names[part])}")
    if file.pre != source.pre:
        effect += f", pre-tokenizer {_format_pair(file.pre, source.pre)}"
    return _Result(differences, effect, notes, max(1, len(texts)))


def _tokens_of(tables: _Vocabulary, text: str) -> tuple[list[str], list[str]]:
    """Encode a text without and with parsed control tokens; return the texts of the tokens, and names with ids."""
    ids = [i for parse in (False, True) for i in tables.tokenizer.encode(text, add_special=False, parse_special=parse)]
    return [_spaced(tables.texts.get(token_id)) for token_id in ids], [tables.name(token_id) for token_id in ids]


def _comparable_texts(file: _Vocabulary, source: _Vocabulary) -> tuple[list[str], list[str]]:
    """Return the texts of `TEXTS` that a right file encodes like its source, and notes on the others."""
    file_roles, source_roles = file.special_roles(), source.special_roles()
    other_roles = [text for text, _ in file_roles.items() ^ source_roles.items()]  # reported as types
    texts = [text for text in TEXTS if not any(special in text for special in other_roles)]
    notes = []
    if file.is_gguf == source.is_gguf:
        return texts, notes
    if file.composes != source.composes:
        texts = [text for text in texts if is_normalized("NFC", text)]
        notes.append("not compared: texts that NFC changes, which tokenizer.json applies and llama.cpp does not")
    if any(tables.is_approximated(text) for tables in (file, source) for text in texts):
        texts = [text for text in texts if not (file.is_approximated(text) or source.is_approximated(text))]
        notes.append(f"not compared: texts for which llama.cpp approximates the pre-tokenizer {source.pre}")
    if file.spaces != source.spaces and "never" not in (file.spaces, source.spaces):
        special_texts = file_roles.keys() | source_roles.keys()
        texts = [text for text in texts if text[:1] != " " and not any(special in text for special in special_texts)]
        spaces = _format_pair(file.spaces, source.spaces)
        notes.append(f"not compared: texts with a leading space or a special token, as spaces are added {spaces}")
    return texts, notes


def _compare_begin(file: _Vocabulary, source: _Vocabulary) -> _Result:
    """Compare BOS; a difference is a note if no text begins with the source's BOS."""
    actual, expected = file.tokenizer.bos_token_id, source.tokenizer.bos_token_id
    if actual == expected:
        return _Result()
    difference = _format_pair(file.name(actual), source.name(expected))
    templates = [template for tables in (file, source) for template in tables.templates.values()]
    if expected is None or not (_added_roles(source)[0] or any("bos_token" in template for template in templates)):
        return _Result(notes=[f"{difference}: no text of the source begins with BOS"])
    return _Result([difference], "texts begin with another token")


def _compare_end(file: _Vocabulary, source: _Vocabulary) -> _Result:
    """Compare EOS; it is a note if the source names none."""
    actual, expected = file.tokenizer.eos_token_id, source.tokenizer.eos_token_id
    difference = _format_pair(file.name(actual), source.name(expected))
    if actual == expected or expected is None:
        return _Result(notes=[difference] if actual != expected else ())
    is_known = expected in file.tokenizer.eos_token_ids
    programs = "in programs that know end tokens by this id only, " if is_known else ""
    return _Result([difference], f"{programs}generation goes on after {source.name(expected)}")


def _compare_end_of_turn(file: _Vocabulary, source: _Vocabulary) -> _Result:
    """Compare the tokens that end a generation, without EOS; an additional control token is a note."""
    eos_ids = {file.tokenizer.eos_token_id, source.tokenizer.eos_token_id}
    actual, expected = (tables.tokenizer.eos_token_ids - eos_ids for tables in (file, source))
    missing = [f"generation goes on after {source.name(token_id)}" for token_id in sorted(expected - actual)]
    added = {token_id: f"generation also ends at {file.name(token_id)}" for token_id in sorted(actual - expected)}
    text_ids = added.keys() - file.tokenizer.control_ids
    texts = [f"{added[token_id]}, no control token" for token_id in sorted(text_ids)]
    return _Result([*missing, *texts], notes=[note for token_id, note in added.items() if token_id not in text_ids])


def _added_roles(tables: _Vocabulary) -> tuple[str, str]:
    """Return the roles of the tokens that encoding adds before and after a text; empty if it adds none."""
    tokenizer = tables.tokenizer
    ids, text_ids = tokenizer.encode("a"), tokenizer.encode("a", add_special=False)
    start = next(i for i in range(len(ids) + 1) if ids[i : i + len(text_ids)] == text_ids)
    bos, eos = (tokenizer.bos_token_id, "BOS"), (tokenizer.eos_token_id, "EOS")
    before, after = dict([eos, bos]), dict([bos, eos])  # both can have one id
    return (
        ", ".join(before.get(token_id, tables.name(token_id)) for token_id in ids[:start]),
        ", ".join(after.get(token_id, tables.name(token_id)) for token_id in ids[start + len(text_ids) :]),
    )


def _compare_added(file: _Vocabulary, source: _Vocabulary) -> _Result:
    """Compare the tokens that encoding adds; a converter may follow the source's tokenizer_config.json instead."""
    actual, expected = _added_roles(file), _added_roles(source)
    if actual == expected:
        return _Result()
    sides = (f"{roles[0] or 'nothing'} before and {roles[1] or 'nothing'} after a text" for roles in (actual, expected))
    difference = _format_pair(*sides)
    by_settings = [bool(roles) if adds is None else adds for adds, roles in zip(source.adds, expected, strict=True)]
    if [bool(roles) for roles in actual] == by_settings:
        return _Result(notes=[f"{difference}; the source's tokenizer_config.json agrees with the file"])
    return _Result([difference], "the model reads every text with other tokens at its ends")


def _compare_templates(file: _Vocabulary, source: _Vocabulary) -> _Result:
    """Compare the chat templates by name: by text, else by the renderings of `_CONVERSATIONS`."""
    missing, added = (sorted(a.templates.keys() - b.templates.keys()) for a, b in ((source, file), (file, source)))
    differences = [f"no template {name!r} in the file" for name in missing]
    notes = [f"template {name!r} in the file only" for name in added]
    for name in sorted(file.templates.keys() & source.templates.keys()):
        if file.templates[name] != source.templates[name]:
            result = _compare_renderings(file.templates[name], source.templates[name], source.tokenizer)
            differences += [f"template {name!r}: {difference}" for difference in result.differences]
            notes += [f"template {name!r}: {note}" for note in result.notes]
    effect = "chat programs would use a default template" if missing else "the model reads other prompts"
    return _Result(differences, effect, notes, len(_CASES))


def _compare_renderings(actual: str, expected: str, tokenizer: Tokenizer) -> _Result:
    """Compare two templates by their renderings, both with the source's BOS and EOS.

    A conversation that only the source's template refuses is a note. An invalid or endless template is a difference.
    """
    differences, n_equal, n_added = [], 0, 0
    try:
        (file_template,) = compiled({"": actual}, tokenizer, path="the file").values()
        (source_template,) = compiled({"": expected}, tokenizer, path="the source").values()
        for case in _CASES:
            file_text, source_text = _render(file_template, case), _render(source_template, case)
            if source_text is None:
                n_added += file_text is not None
            elif file_text == source_text:
                n_equal += 1
            else:
                differences.append(f"{_format_case(case)}: {_format_first_difference(file_text, source_text)}")
    except FormatError as error:
        return _Result([f"other text, and {error}"])
    if differences:
        return _Result([f"{len(differences)} of {len(_CASES)} conversations are rendered otherwise, {differences[0]}"])
    if not n_equal:
        return _Result(["other text, and the source's template refuses every conversation"])
    note = f"other text, {n_equal} equal renderings, {n_added} that the source's template refuses"
    return _Result(notes=[note])


def _render(template: ChatTemplate, case: _Case) -> str | None:
    """Render a conversation; None if the template refuses it. FormatError TemplateBudget at a limit."""
    title, tools, is_opened, variables = case
    settings = TemplateSettings(variables, _TIME)
    try:
        return template.render(_CONVERSATIONS[title], tools=tools, add_generation_prompt=is_opened, settings=settings)
    except FormatError as error:
        if error.code == "TemplateBudget":
            raise
        return None


def _format_case(case: _Case) -> str:
    options = zip(("tools", "generation prompt", "enable_thinking false"), case[1:], strict=True)
    return ", ".join([case[0], *(option for option, value in options if value)])


def _format_first_difference(actual: str | None, expected: str) -> str:
    if actual is None:
        return "the file's template refuses it"
    start = _first_difference(actual, expected)
    excerpts = (repr(text[max(0, start - 10) : start + 30]) for text in (actual, expected))
    return f"{_format_pair(*excerpts)} at character {start}"
