"""Tokenizer behaviour on tiny vocabularies whose ids are worked out by hand."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from builders.vocabularies import generated_texts, tiny_byte_level, tiny_sentencepiece
from helpers.refusals import refuses

from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.files.tokenizer.sentencepiece import merge
from llorch.files.tokenizer.special import Cutter

BOS, EOT, TOOL, FIM_PAD, TOOL_X = 260, 261, 262, 263, 264


def byte_level(**changes: object) -> Tokenizer:
    return from_metadata(tiny_byte_level(), changes)


def sentencepiece(**changes: object) -> Tokenizer:
    return from_metadata(tiny_sentencepiece(), changes)


def from_metadata(metadata: dict[str, object], changes: dict[str, object]) -> Tokenizer:
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer(GGUFVocabulary(metadata, "tiny.gguf"))


def renamed(texts: dict[int, bytes], metadata: dict[str, object] | None = None) -> list[bytes]:
    tokens = (metadata or tiny_byte_level())["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return [texts[token_id] if token_id in texts else token for token_id, token in enumerate(tokens)]


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)


def test_byte_level_merges_in_the_order_of_the_list():
    assert text_ids(byte_level(), "hello") == [258, ord("o")]  # h e l l o -> he l l o -> he ll o -> hell o
    tokenizer = byte_level(pre="qwen2", tokens=renamed({256: b"el"}), merges=[b"e l", b"l l"])
    assert text_ids(tokenizer, "ell") == [256, ord("l")]
    tokenizer = byte_level(pre="qwen2", tokens=renamed({256: b"el"}), merges=[b"l l", b"e l"])
    assert text_ids(tokenizer, "ell") == [ord("e"), 257]


def test_byte_level_keeps_a_space_with_the_word_and_writes_other_characters_as_bytes():
    assert text_ids(byte_level(), "a hell\u00e9") == [ord("a"), ord(" "), 258, 0xC3, 0xA9]


@pytest.mark.parametrize(("name", "ids"), [("llama-bpe", [259]), ("qwen2", [*b"wor"]), ("smollm", [*b"wor"])])
def test_only_llama_3_takes_a_word_that_no_merge_makes(name: str, ids: list[int]):
    assert text_ids(byte_level(pre=name), "wor") == ids


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("llama-bpe", [258, ord("4")]),  # 343|4
        ("gpt-2", [257]),  # 3434
        ("qwen2", [*b"3434"]),  # 3|4|3|4
        ("smollm", [*b"3434"]),
    ],
)
def test_digits_are_grouped_as_the_pre_tokenizer_says(name: str, ids: list[int]):
    tokenizer = byte_level(pre=name, tokens=renamed({256: b"34", 257: b"3434", 258: b"343"}), merges=[b"3 4", b"34 34"])
    assert text_ids(tokenizer, "3434") == ids


def test_sentencepiece_merges_the_best_score_and_then_the_leftmost():
    tokenizer = sentencepiece()
    assert text_ids(tokenizer, "aaa") == [259, 263]  # space a a a -> space aa a -> space aaa
    assert text_ids(tokenizer, "aaaa") == [259, 262, 262]  # the left pair merges, then the right one
    assert text_ids(tokenizer, "ab") == [259, 264]  # "ab" (-3) before space + "a" (-4)
    assert text_ids(tokenizer, "a b") == [265, 259, 261]


def test_sentencepiece_writes_unknown_characters_as_bytes():
    assert text_ids(sentencepiece(), "\u00e9\n") == [259, 3 + 0xC3, 3 + 0xA9, 3 + 10]


def test_equal_scores_merge_from_the_left():
    assert merge("aaaaa", {"aa": 0, "aaa": 0}) == ["aaa", "aa"]  # the left pair grows first
    assert merge("aaaaa", {"aa": 0, "aaa": 1}) == ["aa", "aaa"]  # every aa comes before the aaa


def naive_merge(text: str, ranks: dict[str, int]) -> list[str]:
    pieces = list(text)
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ranks]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_merge_equals_the_plain_quadratic_rule_on_random_vocabularies():
    rng = random.Random(0)
    for _ in range(400):
        words = {"".join(rng.choices("abc", k=rng.randrange(2, 6))) for _ in range(rng.randrange(1, 40))}
        ranks = {word: rng.randrange(8) for word in words}  # few ranks: many ties
        text = "".join(rng.choices("abc", k=rng.randrange(40)))
        assert merge(text, ranks) == naive_merge(text, ranks)


def test_words_are_not_cut_apart_where_a_token_reaches_over_a_space():
    tokenizer = sentencepiece(tokens=renamed({265: "b\u2581".encode()}, tiny_sentencepiece()))
    assert text_ids(tokenizer, "b a") == [259, 265, 260]


def test_begin_and_end_tokens_are_added_as_the_file_says():
    assert byte_level().encode("o") == [BOS, ord("o")]  # Llama 3's default
    assert byte_level(pre="qwen2").encode("o") == [ord("o")]
    assert byte_level(pre="qwen2", add_bos_token=True, add_eos_token=True).encode("o") == [BOS, ord("o"), EOT]
    assert sentencepiece().encode("") == [1]
    assert sentencepiece(add_bos_token=False).encode("") == []


@pytest.mark.parametrize("special", ["<|begin_of_text|>", "<|eot_id|>", "<|fim_pad|>"])
def test_control_tokens_in_text_stay_text_unless_asked_for(special: str):
    tokenizer = byte_level()
    ids = tokenizer.encode(f"o{special}o", add_special=False)
    assert not {BOS, EOT, FIM_PAD} & {*ids}
    assert tokenizer.decode(ids) == f"o{special}o"
    assert len(tokenizer.encode(f"o{special}o", add_special=False, parse_special=True)) == 3


def test_user_defined_tokens_are_always_cut_out_longest_first():
    assert text_ids(byte_level(), "<tool><tool>xo<tool") == [TOOL, TOOL_X, ord("o"), *b"<tool"]


def test_a_longer_special_text_wins_over_an_earlier_one():
    cutter = Cutter({"ab": 1, "bcd": 2, "(.": 3})
    assert cutter.cut("abcd") == [(0, "a"), (1, 2)]
    assert cutter.cut("") == []
    assert cutter.cut("abab(.") == [(0, 1), (2, 1), (4, 3)]
    assert cutter.cut("a\nb") == [(0, "a\nb")]
    assert Cutter({}).cut("ab") == [(0, "ab")]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a[x] \t\n\v\f\ra", [(0, "a"), (1, "[x]"), (10, "a")]),
        ("a [x]\u00a0a", [(0, "a "), (2, "[x]"), (5, "\u00a0a")]),  # not before it, and no other space
        ("</s>  [x]  ", [(0, "</s>"), (6, "[x]")]),
        ("<s> a<unk> a", [(0, "<s>"), (3, " a"), (5, "<unk>"), (10, " a")]),
    ],
)
def test_a_model_named_phi_3_swallows_whitespace_behind_its_special_tokens(text: str, parts: list[tuple[int, str]]):
    tokens = renamed({259: b"<|endoftext|>", 264: b"\xe2\x96\x81"}, tiny_sentencepiece())
    tokenizer = from_metadata(tiny_sentencepiece() | {"general.name": "My PHI-3 mini"}, {"tokens": tokens})
    special = {"[x]": 266, "</s>": 2, "<s>": 1, "<unk>": 0}
    ids, starts = tokenizer.encode_spans(text, add_special=False, parse_special=True)
    expected: list[int] = []
    for place, part in parts:
        assert starts[len(expected)] == place
        expected += [special[part]] if part in special else text_ids(tokenizer, part)
    assert ids == expected == tokenizer.encode(text, add_special=False, parse_special=True)


def test_a_model_named_phi_3_needs_the_tokens_that_llama_cpp_asks_for():
    with refuses("Missing", "<|endoftext|>", where="general.name"):
        from_metadata(tiny_sentencepiece() | {"general.name": "phi3"}, {})


def test_sentencepiece_starts_afresh_after_a_special_token():
    tokenizer = sentencepiece()
    assert text_ids(tokenizer, "a[x]a") == [265, 266, 265]
    assert tokenizer.encode("</s>a", add_special=False, parse_special=True) == [2, 265]
    assert text_ids(sentencepiece(add_space_prefix=False), "a[x]a") == [260, 266, 260]


def test_end_tokens_are_those_of_the_file_and_those_known_by_their_text():
    assert byte_level().eos_token_ids == {EOT, FIM_PAD}
    assert byte_level(eos_token_id=7, eot_token_id=8, eom_token_id=9).eos_token_ids == {7, 8, 9, EOT, FIM_PAD}
    assert byte_level(fim_pad_token_id=5).eos_token_ids == {5, EOT}
    assert sentencepiece().eos_token_ids == {2}


def test_sentencepiece_begins_with_1_and_ends_with_2_if_the_file_names_no_token_of_it():
    tokens = renamed({1: b"<begin>", 2: b"<end>"}, tiny_sentencepiece())
    tokenizer = sentencepiece(tokens=tokens, bos_token_id=len(tokens), eos_token_id=len(tokens))
    assert (tokenizer.encode(""), tokenizer.eos_token_ids) == ([1], {2})


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_decoding_gives_the_text_back(make):
    tokenizer = make()
    for text in ["", " ", "a", " a", "  a  ", "a[x] a", "\x00\n", "\u00e9\U0001f44d", *generated_texts(300, seed=1)]:
        text = text.replace("\u2581", "")  # a SentencePiece vocabulary writes a space this way
        assert tokenizer.decode(tokenizer.encode(text)) == text
        ids = tokenizer.encode(text, parse_special=True, add_special=False)
        assert tokenizer.decode(ids, skip_special=False) == text


def test_decoding_hides_control_tokens_on_request_and_shows_user_defined_ones():
    ids = [BOS, ord("o"), TOOL, EOT]
    assert byte_level().decode(ids) == "o<tool>"
    assert byte_level().decode(ids, skip_special=False) == "<|begin_of_text|>o<tool><|eot_id|>"
    assert byte_level().decode([0xC3]) == "\ufffd"
    assert byte_level().decode([0xC3, EOT, 0xA9]) == "\u00e9"  # a control token inside a character
    assert byte_level().decode([0xC3, EOT, 0xA9], skip_special=False) == "\ufffd<|eot_id|>\ufffd"


def test_token_bytes_join_to_the_bytes_of_the_text():
    tokenizer = byte_level()
    ids = tokenizer.encode("hell \u00e9<tool>", add_special=True)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "hell \u00e9<tool>".encode()
    assert tokenizer.token_bytes(BOS) == b""
    assert [sentencepiece().token_bytes(i) for i in (2, 3 + 0xC3, 265, 266)] == [b"", b"\xc3", b" a", b"[x]"]


def test_ids_alone_do_not_cost_the_places_of_tokens(monkeypatch: pytest.MonkeyPatch):
    def places(*_: object) -> Iterator[int]:
        yield pytest.fail("nobody asked where tokens start")

    monkeypatch.setattr("llorch.files.tokenizer.byte_level.starts_in", places)
    monkeypatch.setattr("llorch.files.tokenizer.sentencepiece.islice", places)
    assert (byte_level().encode("o"), sentencepiece().encode("a")) == ([BOS, ord("o")], [1, 265])


@pytest.mark.parametrize("token_id", [-1, 265])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int):
    with refuses(ValueError, expected="0 to 264", got=token_id):
        byte_level().decode([token_id])
    with refuses(ValueError, expected="0 to 264", got=token_id):
        byte_level().token_bytes(token_id)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_lone_surrogate_is_refused_with_its_place(make):
    with refuses(ValueError, "surrogate '\\ud800'", "index 2"):
        make().encode("ab\ud800")


def test_an_empty_token_gets_the_name_that_llama_cpp_gives_it():
    assert text_ids(byte_level(tokens=renamed({TOOL: b""})), f"[EMPTY_{TOOL}]") == [TOOL]


def test_a_token_that_is_not_utf_8_keeps_its_bytes():
    tokenizer = sentencepiece(tokens=renamed({264: b"\xff\xfe"}, tiny_sentencepiece()))
    assert tokenizer.token_bytes(264) == b"\xff\xfe"
    assert text_ids(tokenizer, "\u00ff") == [259, 3 + 0xC3, 3 + 0xBF]


def test_a_missing_type_list_means_that_all_tokens_are_text():
    metadata = tiny_byte_level()
    del metadata["tokenizer.ggml.token_type"]
    assert text_ids(from_metadata(metadata, {}), "hell<tool>") == [258, *b"<tool>"]
