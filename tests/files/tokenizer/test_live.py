"""The same ids as llama.cpp and transformers give, on real vocabularies and on tiny ones."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders.huggingface_folders import write_folder
from builders.tiny_models import GGUF_METADATA, write_file
from builders.vocabularies import (
    NAMES,
    encoder_of,
    first_difference,
    generated_texts,
    real_vocabulary,
    tiny_byte_level,
    tiny_sentencepiece,
)
from fetch_vocabularies import STORED
from helpers.llama_vocabulary import LlamaVocabulary
from helpers.work_limit import work_limit

from llorch.files.gguf import open_gguf
from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.byte_level import PRE_TOKENIZERS

SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest) -> Path:
    return real_vocabulary(request.param)


@pytest.fixture(scope="module")
def tokenizer(real: Path) -> Tokenizer:
    with open_gguf(real) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def llama(real: Path) -> Iterator[LlamaVocabulary]:
    vocabulary = LlamaVocabulary(real)
    yield vocabulary
    vocabulary.close()


@pytest.mark.weights
@pytest.mark.parametrize("name", STORED)
def test_ids_equal_those_stored_beside_the_vocabulary(name: str):
    real = real_vocabulary(name)
    with open_gguf(real) as file:
        ours = Tokenizer.from_gguf(file)
    texts = real.with_suffix(".gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = real.with_suffix(".gguf.out").read_text().split("\n")
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        assert ours.encode(text, add_special=False) == [int(token_id) for token_id in line.split()], text


@pytest.mark.nightly_cases(but=["llama-spm"])
@pytest.mark.weights
@pytest.mark.live
def test_ids_equal_llama_cpp_on_generated_texts(tokenizer: Tokenizer, llama: LlamaVocabulary):
    assert first_difference(tokenizer.encode, llama.encode, generated_texts(2000, seed=2)) is None


@pytest.mark.weights
@pytest.mark.live
@pytest.mark.slow
@pytest.mark.nightly_cases(but=["*-one in 13"])
@pytest.mark.parametrize("step", [pytest.param(1, id="every"), pytest.param(13, id="one in 13")])
def test_code_points_are_split_into_the_words_of_llama_cpp(tokenizer: Tokenizer, llama: LlamaVocabulary, step: int):
    def in_context(code: int) -> str:
        c = chr(code)
        return f"a{c}b\u20ac1{c}2\u20ac {c}!\u20ac\n{c} \u20ac{c}{c}x\u20ac {c}{c}\u20ac{c}[PAD\u20ac!!{c}1\u20ac"

    # Beyond the last assigned plane all are alike: one in 97 is enough.
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000 and (code < 0x40000 or code % 97 == 0)]
    codes = [code for code in codes if code < 0x800 or code % step == 0]
    texts = ["".join(map(in_context, codes[start : start + 32])) for start in range(0, len(codes), 32)]
    for text in texts:
        expected = llama.encode(text, add_special=False, parse_special=False)
        assert tokenizer.encode(text, add_special=False) == expected, ascii(text)


@pytest.mark.weights
@pytest.mark.live
def test_end_tokens_and_bytes_of_every_token_equal_llama_cpp(tokenizer: Tokenizer, llama: LlamaVocabulary):
    assert tokenizer.vocab_size == llama.size
    assert tokenizer.eos_token_ids == llama.end_tokens()
    assert [tokenizer.token_bytes(i) for i in range(llama.size)] == [llama.piece(i) for i in range(llama.size)]


@pytest.mark.weights
def test_every_special_text_is_inert_in_the_text_of_a_user(real: Path, tokenizer: Tokenizer):
    with open_gguf(real) as file:
        types = file.metadata["tokenizer.ggml.token_type"]
        texts = [raw.decode() for raw in file.metadata["tokenizer.ggml.tokens"]]  # type: ignore[union-attr]
    assert isinstance(types, np.ndarray)
    control = {int(i): texts[i] for i in np.flatnonzero((types == 3) | (types == 2))}
    control |= {i: texts[i] for i in tokenizer.eos_token_ids}
    assert len(control) >= 3
    for token_id, text in control.items():
        for user_text in (text, f"a{text}b", f" {text} ", text * 3, f"<{text}>"):
            ids = tokenizer.encode(user_text, add_special=False)
            assert not control.keys() & set(ids), user_text
            assert tokenizer.decode(ids) == user_text
        assert token_id in tokenizer.encode(f"a{text}b", add_special=False, parse_special=True)


@pytest.mark.weights
def test_decoding_gives_generated_texts_back(tokenizer: Tokenizer):
    for text in generated_texts(2000, seed=3):
        text = text.replace("\u2581", "_")  # a SentencePiece vocabulary writes a space this way
        assert tokenizer.decode(tokenizer.encode(text)) == text


PATTERNS = ("a", "ab", " ", "\n", "\t", "=", "1", "'s", " a", "\x00", "\u00e9", "\U0001f600")


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.nightly_cases(but=["qwen2- "])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_repeated_pattern_costs_work_in_proportion_to_its_length(tokenizer: Tokenizer, pattern: str):
    def n_lines(n_bytes: int) -> int:
        with work_limit(math.inf) as work:
            tokenizer.encode(pattern * (n_bytes // len(pattern.encode())))
        return work.n_lines

    assert n_lines(200_000) <= 4.5 * n_lines(50_000)
    # The `tokenizers` library runs no Python. Its 2 seconds here would be hours by a square law: `--processor-limit`.
    assert len(tokenizer.encode(pattern * (1_000_000 // len(pattern.encode())))) > 1000


def write_vocabulary(path: Path, metadata: dict[str, object]) -> Path:
    """Write a GGUF file that llama.cpp opens for its vocabulary."""
    lists = {key: value.tolist() for key, value in metadata.items() if isinstance(value, np.ndarray)}
    return write_file(path, {}, GGUF_METADATA | metadata | lists)


@pytest.mark.nightly_cases(but=["switches0-None"])
@pytest.mark.live
@pytest.mark.parametrize("pre", [*PRE_TOKENIZERS, None])
@pytest.mark.parametrize("switches", [{}, {"add_eos_token": True, "add_space_prefix": False}, {"add_bos_token": False}])
def test_tiny_vocabularies_equal_llama_cpp(tmp_path: Path, pre: str | None, switches: dict[str, bool]):
    metadata = tiny_byte_level() | {"tokenizer.ggml.pre": pre} if pre else tiny_sentencepiece()
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in switches.items()}
    path = write_vocabulary(tmp_path / "tiny.gguf", metadata)
    theirs = LlamaVocabulary(path)
    with open_gguf(path) as file:
        ours = Tokenizer.from_gguf(file)
    mixed = [text + "<tool>" + text[::-1] + "<tool>x[x]<|fim_pad|> aaaa" for text in generated_texts(50, seed=4)]
    texts = ["", " ", "hello", "aaaab", *mixed, *generated_texts(100, seed=5)]
    assert first_difference(ours.encode, theirs.encode, texts) is None
    assert ours.eos_token_ids == theirs.end_tokens()
    assert [ours.token_bytes(i) for i in range(theirs.size)] == [theirs.piece(i) for i in range(theirs.size)]
    theirs.close()


@pytest.mark.live
@pytest.mark.parametrize("name", ["Phi-3 mini", "a phi3", "phi"])
def test_the_name_of_a_model_changes_its_ids_as_in_llama_cpp(tmp_path: Path, name: str):
    metadata = tiny_sentencepiece()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[264] = b"<|endoftext|>"
    path = write_vocabulary(tmp_path / "tiny.gguf", metadata | {"general.name": name})
    theirs = LlamaVocabulary(path)
    with open_gguf(path) as file:
        ours = Tokenizer.from_gguf(file)
    rng = random.Random(0)
    parts = [
        "[x]", "</s>", "<s>", "<unk>", "<|endoftext|>", " ", "\n", "\t", "\x0b", "\x1c", "\u00a0", "\x85", "a",
        "ab",
    ]  # fmt: skip
    assert first_difference(ours.encode, theirs.encode, ["".join(rng.choices(parts, k=8)) for _ in range(5000)]) is None
    theirs.close()


@pytest.mark.nightly_cases(but=["llama-spm"])
@pytest.mark.weights
@pytest.mark.live
def test_ids_equal_transformers_on_a_folder_made_from_the_vocabulary(real: Path, tmp_path: Path):
    import transformers

    write_folder(real, tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = Tokenizer.from_huggingface(tmp_path)
    texts = generated_texts(500, seed=6)
    assert first_difference(ours.encode, encoder_of(theirs), texts) is None
    for ids in map(ours.encode, texts):
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.eos_token_ids >= {theirs.eos_token_id}
    assert ours.bos_token_id == theirs.bos_token_id
