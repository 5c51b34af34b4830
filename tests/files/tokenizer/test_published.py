"""Vocabularies as their publishers distribute them: ids of llama.cpp in a GGUF file, of the publisher in a folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tokenizers
from builders.published_vocabularies import (
    PUBLISHERS,
    SENTENCEPIECE,
    VOCABULARIES,
    write_published,
    write_sentencepiece,
)
from builders.tiny_models import GGUF_METADATA, write_file
from builders.vocabularies import first_difference, real_vocabulary, strings_in_shares
from fetch_vocabularies import BARE
from helpers.llama_vocabulary import LlamaVocabulary
from tokenizers.models import BPE

from llorch.files.gguf import open_gguf
from llorch.files.tokenizer import Tokenizer
from llorch.files.tokenizer.byte_level import text_bytes
from llorch.files.tokenizer.export_gguf import read_tokenizer
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary

pytestmark = [pytest.mark.weights, pytest.mark.live]
N_STRINGS = 500  # benchmarks/published.py judges more


class Written(NamedTuple):
    """A published vocabulary in both formats, and strings to encode."""

    name: str
    gguf: Path
    folder: Path
    texts: list[str]


def strings_for(gguf: Path, count: int, *, seed: int) -> list[str]:
    """Strings that contain the texts of a vocabulary's own tokens."""
    with open_gguf(gguf) as file:
        texts = [raw.decode("utf-8", "replace") for raw in file.metadata["tokenizer.ggml.tokens"]]  # type: ignore[union-attr]
        types = file.metadata["tokenizer.ggml.token_type"].tolist()  # type: ignore[union-attr]
    tokens = [text_bytes(text).decode("utf-8", "replace") for text, kind in zip(texts, types, strict=True) if kind == 1]
    controls = [text for text, kind in zip(texts, types, strict=True) if kind == 3]
    return strings_in_shares(count, seed=seed, tokens=[text for text in tokens if text], controls=controls or ["<s>"])


def of_publisher(name: str, file: Path, texts: list[str]) -> list[list[int]]:
    """Encode texts in a process that has the publisher's library, which this one has not."""
    judge = Path(__file__).parents[2] / "support/helpers/publishers_judge.py"
    path = str(Path(os.environ["LLORCH_VOCABULARIES"]) / PUBLISHERS)
    done = subprocess.run(
        [sys.executable, str(judge), name, str(file)], input=json.dumps(texts), capture_output=True, text=True,
        check=False, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tokens_beyond_merges(folder: Path) -> set[int]:
    """Ids of tokens that the merges of a tokenizer.json do not make from their own bytes."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    library = tokenizers.Tokenizer(BPE(model["vocab"], [(left, right) for left, right in model["merges"]]))
    made = library.encode_batch(list(model["vocab"]), add_special_tokens=False)
    return {one for one, encoding in zip(model["vocab"].values(), made, strict=True) if encoding.ids != [one]}


@pytest.fixture(scope="module", params=VOCABULARIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    gguf, folder = write_published(VOCABULARIES[request.param], tmp_path_factory.mktemp("published") / request.param)
    return Written(request.param, gguf, folder, strings_for(gguf, N_STRINGS, seed=33))


def of_gguf(path: Path) -> Tokenizer:
    with open_gguf(path) as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def from_file(written: Written) -> Tokenizer:
    return of_gguf(written.gguf)


@pytest.mark.nightly_cases(but=["tekken-240911"])
def test_gguf_ids_equal_llama_cpp(written: Written, from_file: Tokenizer):
    ours, theirs = from_file, LlamaVocabulary(written.gguf)
    assert first_difference(ours.encode, theirs.encode, written.texts) is None
    assert [ours.token_bytes(i) for i in range(theirs.size)] == [theirs.piece(i) for i in range(theirs.size)]
    theirs.close()


@pytest.mark.nightly_cases(but=["tekken-240911"])
def test_folder_ids_equal_the_publisher_and_decode_to_the_text(written: Written):
    published, ours = VOCABULARIES[written.name], Tokenizer.from_huggingface(written.folder)
    # The publisher's library takes a word that is a token as it is. Folders of Qwen do not, and some tokens of Qwen 3.6
    # are not what merges make of their own bytes: transformers and llama.cpp never give such a token.
    beyond = set() if published.ignore_merges else tokens_beyond_merges(written.folder)
    expected = of_publisher(written.name, published.path(), written.texts)
    comparable = [(text, ids) for text, ids in zip(written.texts, expected, strict=True) if beyond.isdisjoint(ids)]
    assert len(comparable) >= 0.99 * len(expected)
    for text, ids in comparable:
        assert ours.encode(text, add_special=False) == ids, ascii(text)
        if not published.composes:
            assert ours.decode(ids) == text


@pytest.mark.nightly_cases(but=["tekken-240911"])
def test_a_folder_converts_to_the_ids_of_llama_cpp(written: Written, from_file: Tokenizer, tmp_path: Path):
    made = read_tokenizer(written.folder, from_file.vocab_size)
    lists = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in made.metadata.items()}
    path = write_file(tmp_path / "converted.gguf", {}, GGUF_METADATA | lists)
    theirs, ours = LlamaVocabulary(path), Tokenizer(GGUFVocabulary(made.metadata, path))
    assert first_difference(ours.encode, theirs.encode, written.texts[::4]) is None
    theirs.close()


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_ids_equal_llama_cpp_and_the_library(name: str, tmp_path: Path):
    path = write_sentencepiece(name, tmp_path / "vocabulary.gguf")
    texts = strings_for(path, N_STRINGS, seed=34)
    ours, theirs = of_gguf(path), LlamaVocabulary(path)
    assert first_difference(ours.encode, theirs.encode, texts) is None
    theirs.close()


@pytest.mark.parametrize("name", BARE)
def test_vocabularies_without_a_name_of_words_equal_llama_cpp(name: str):
    path = real_vocabulary(name)
    ours, theirs = of_gguf(path), LlamaVocabulary(path)
    assert first_difference(ours.encode, theirs.encode, strings_for(path, N_STRINGS, seed=35)) is None
    theirs.close()


def test_published_smollm2_skips_missing_bytes_like_llama_cpp():
    path = real_vocabulary("qwen2").parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    ours, theirs = of_gguf(path), LlamaVocabulary(path)
    controls = [chr(code) for code in range(32)]
    texts = [f"a{left}b !{right}! {left}{right}" for left in controls for right in controls]
    assert first_difference(ours.encode, theirs.encode, [*texts, *strings_for(path, N_STRINGS, seed=36)]) is None
    assert ours.encode("!\x04!", add_special=False) == ours.encode("!", add_special=False) * 2
    theirs.close()
