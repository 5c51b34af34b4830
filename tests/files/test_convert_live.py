"""What is written, in llama.cpp and transformers: the same ids, logits and chat as the source has there."""

import ctypes
import re
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from builders.quantised_folders import FOLDERS
from builders.tiny_models import FAMILIES, random_tensors, write_folder
from builders.vocabularies import NAMES, encoder_of, first_difference, generated_texts, real_vocabulary
from builders.whole_folders import VOCABULARIES, tensors_with_rows, write_whole_folder
from helpers.command_line import invoke
from helpers.ggml_library import SILENT
from helpers.llama_vocabulary import LlamaVocabulary

from llorch.files import open_gguf, open_weights
from llorch.files.convert import convert
from llorch.files.export import FILE_TYPES, write_gguf
from llorch.files.quant import GGMLType
from llorch.files.tokenizer import byte_level
from llorch.runtime.builtin import BUILTIN, builtin_path
from tests.files.test_export import NOT_IN_LLAMACPP, SCALINGS, WIDE, wide_tensors

IDS = [*range(3, 40), 7, 7, 3]
CHAT = [{"role": "user", "content": " hello <|eot_id|> 12"}, {"role": "assistant", "content": "\u4f60\n"}]
# llama.cpp rounds differently from torch: measured 1.3e-7 to 8e-7, relative to all logits.
ROUNDING = 2e-6

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def llama_api() -> ModuleType:
    import llama_cpp

    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    return llama_cpp


def hard_texts(count: int, *, composed: bool, seed: int) -> list[str]:
    """Generated texts without the letters of Unicode 16, which `tokenizers` knows and llama.cpp does not."""
    spans = re.findall(r"\\x\{([0-9A-F]+)\}-\\x\{([0-9A-F]+)\}", byte_level._NEW)
    new = {code for first, last in spans for code in range(int(first, 16), int(last, 16) + 1)}
    texts = [text for text in generated_texts(count, seed=seed) if not new & {*map(ord, text)}]
    kept = [text for text in texts if not composed or unicodedata.is_normalized("NFC", text)]
    assert len(spans) == 26
    assert len(kept) > 0.85 * count
    return ["", " ", "hello", "aaaab <tool> hell", "<s>a</s> ab<|eot_id|>x<tool>", *kept]


def auto_tokenizer(folder: Path) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return transformers.AutoTokenizer.from_pretrained(folder)


def transformers_logits(folder: Path) -> np.ndarray:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy()


def llama_logits(path: Path, ids: Sequence[int] | np.ndarray = IDS) -> np.ndarray:
    from llorch.engines import open_engine

    with open_engine("llamacpp", path) as engine:
        return engine.logits([*map(int, ids)])


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    assert np.isfinite(actual).all()
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def assert_same_ids(tokenizer: Any, llama: LlamaVocabulary, texts: list[str]) -> None:
    assert first_difference(encoder_of(tokenizer), llama.encode, texts) is None


def end_tokens(folder: Path) -> set[int]:
    import transformers

    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    return {*ends} if isinstance(ends, list) else {ends}  # type: ignore[arg-type]


@pytest.mark.nightly_cases(but=["micro-qwen3"])
@pytest.mark.parametrize("name", BUILTIN)
def test_a_file_and_the_folder_made_of_it_give_the_same(tmp_path: Path, llama_api: ModuleType, name: str):
    source, folder, back = builtin_path(name), tmp_path / "folder", tmp_path / "back.gguf"
    convert(source, folder)
    convert(folder, back)
    theirs = llama_logits(source)
    assert distance(transformers_logits(folder), theirs) < ROUNDING
    assert np.array_equal(llama_logits(back), theirs)
    texts = hard_texts(200, composed=name == "micro-qwen2", seed=31)
    for path in (source, back):
        vocabulary = LlamaVocabulary(path)
        assert_same_ids(auto_tokenizer(folder), vocabulary, texts)
        assert end_tokens(folder) == vocabulary.end_tokens()
        vocabulary.close()


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_folder_and_the_file_made_of_it_give_the_same(tmp_path: Path, llama_api: ModuleType, kind: str):
    source, file, back = write_whole_folder(tmp_path / "source", kind), tmp_path / "m.gguf", tmp_path / "back"
    convert(source, file)
    convert(file, back)
    theirs = transformers_logits(source)
    assert distance(llama_logits(file), theirs) < ROUNDING
    assert np.array_equal(transformers_logits(back), theirs)
    vocabulary = LlamaVocabulary(file)
    one, other = auto_tokenizer(source), auto_tokenizer(back)
    assert_same_ids(one, vocabulary, hard_texts(200, composed=kind.startswith("qwen"), seed=32))
    for text in hard_texts(200, composed=False, seed=33):
        assert one(text)["input_ids"] == other(text)["input_ids"]
    assert (one.bos_token, one.eos_token, one.pad_token) == (other.bos_token, other.eos_token, other.pad_token)
    assert end_tokens(source) <= vocabulary.end_tokens() == end_tokens(back)
    vocabulary.close()


@pytest.mark.parametrize(
    "name", ["gptq-3bit", "gptq-4bit-qwen2", "awq-gemm", "ct-w8a8", "mlx-4bit", "mlx-5bit", "ct-mxfp4"]
)
def test_packed_gguf_of_a_quantised_folder_has_the_logits_of_its_floats_in_llama_cpp(
    tmp_path: Path, llama_api: ModuleType, name: str
):
    packed, floats = tmp_path / "packed.gguf", tmp_path / "floats.gguf"
    assert convert(FOLDERS / name, packed).kept
    assert not convert(FOLDERS / name, floats, ggml_type=GGMLType.F32).kept
    assert packed.stat().st_size < 0.6 * floats.stat().st_size
    ids = np.array(IDS) % 24
    # llama.cpp's quantiser decodes the packed file to F32.
    assert np.array_equal(llama_logits(packed, ids), llama_logits(floats, ids))
    result = invoke("verify", str(packed), "--numerics", "ggml", "--tokens", "5,17,3,20,9", "--json")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_chat_is_rendered_the_same(tmp_path: Path, llama_api: ModuleType, kind: str, prompt: bool):
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    source, file, back = write_whole_folder(tmp_path / "source", kind), tmp_path / "m.gguf", tmp_path / "back"
    convert(source, file)
    convert(file, back)
    vocabulary = LlamaVocabulary(file)
    template = llama_api.llama_model_chat_template(vocabulary.model, None).decode()
    begin = vocabulary.api.llama_vocab_bos(vocabulary.vocab)
    texts = {
        name: llama_api.llama_vocab_get_text(vocabulary.vocab, begin).decode() for name in ("bos_token", "eos_token")
    }
    formatter = Jinja2ChatFormatter(template, **texts, add_generation_prompt=prompt)
    theirs = formatter(messages=CHAT).prompt  # type: ignore[arg-type]
    for folder in (source, back):
        tokenizer = auto_tokenizer(folder)
        assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt) == theirs
    assert "hello" in theirs
    vocabulary.close()


@pytest.mark.parametrize(
    ("family", "scaling", "bias"),
    [
        (family, scaling, bias)
        for family in FAMILIES
        for scaling in SCALINGS
        for bias in (False, True)
        if (scaling, family) not in NOT_IN_LLAMACPP and (family == "llama" or not bias)
    ],
)
def test_every_scaling_goes_both_ways(tmp_path: Path, family: str, scaling: str, bias: bool):
    tensors = random_tensors(family)
    for layer in (0, 1):
        for part, width in (("q", 32), ("k", 16), ("v", 16), ("o", 32)) if bias else ():
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            tensors[name] = np.random.default_rng(layer).standard_normal(width).astype(np.float32)
    changes = {"rope_scaling": SCALINGS[scaling], "attention_bias": bias}
    source = write_folder(tmp_path / "a", tensors, family, **changes)
    convert(source, tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "b")
    theirs = transformers_logits(source)
    assert distance(llama_logits(tmp_path / "m.gguf"), theirs) < ROUNDING
    assert np.array_equal(transformers_logits(tmp_path / "b"), theirs)


QUANTISED = [one for one in FILE_TYPES if one not in (GGMLType.F32, GGMLType.MXFP4)]


@pytest.mark.parametrize("ggml_type", QUANTISED, ids=lambda ggml_type: ggml_type.name)
def test_the_tensors_are_those_of_llama_cpp_s_own_tool(tmp_path: Path, llama_api: ModuleType, ggml_type: GGMLType):
    source = tmp_path / "f32.gguf"
    convert(write_folder(tmp_path / "a", wide_tensors(), **WIDE), source, ggml_type=GGMLType.F32)
    settings = llama_api.llama_model_quantize_default_params()
    settings.ftype, settings.pure, settings.nthread = int(FILE_TYPES[ggml_type]), True, 1
    ternary = ggml_type in (GGMLType.TQ1_0, GGMLType.TQ2_0)
    if ternary:  # as its converter does; its tool would take types that need more than the gguf package has
        settings.token_embedding_type = settings.output_tensor_type = int(GGMLType.F16)
    names = [str(path).encode() for path in (source, tmp_path / "theirs.gguf")]
    assert llama_api.llama_model_quantize(*names, ctypes.byref(settings)) == 0
    convert(source, tmp_path / "ours.gguf", ggml_type=ggml_type)
    with open_gguf(tmp_path / "ours.gguf") as ours, open_gguf(tmp_path / "theirs.gguf") as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name in ours.tensors:
            assert ours.tensors[name].ggml_type is theirs.tensors[name].ggml_type, name
            assert np.array_equal(ours.raw(name), theirs.raw(name)), name
        for key in ("general.file_type", "general.quantization_version"):
            if key in ours.metadata:
                assert ours.metadata[key] == theirs.metadata[key]


@pytest.mark.parametrize("ggml_type", FILE_TYPES, ids=lambda ggml_type: ggml_type.name)
def test_every_type_runs_in_llama_cpp(tmp_path: Path, ggml_type: GGMLType):
    convert(write_folder(tmp_path / "a", wide_tensors(), **WIDE), tmp_path / "m.gguf", ggml_type=ggml_type)
    exact = transformers_logits(tmp_path / "a")
    # A few bits a weight leave this much; a wrong layout would leave about 1.4.
    assert distance(llama_logits(tmp_path / "m.gguf"), exact) < 0.7


@pytest.mark.nightly_cases(but=["llama-spm"])
@pytest.mark.weights
@pytest.mark.parametrize("name", NAMES)
def test_a_real_vocabulary_goes_both_ways(tmp_path: Path, llama_api: ModuleType, name: str):
    real, family = real_vocabulary(name), "qwen3" if name == "qwen2" else "llama"
    file, folder, back = (tmp_path / part for part in ("m.gguf", "folder", "back.gguf"))
    with open_gguf(real) as vocabulary:
        metadata = {key: value for key, value in vocabulary.metadata.items() if key.startswith("tokenizer.")}
    n_rows = len(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    source = write_folder(tmp_path / "a", tensors_with_rows(family, n_rows), family, vocab_size=n_rows)
    write_gguf(open_weights(source), file, tokenizer_metadata=metadata)
    convert(file, folder)
    convert(folder, back)
    vocabularies = [LlamaVocabulary(path) for path in (real, file, back)]
    theirs = auto_tokenizer(folder)
    assert [one.end_tokens() for one in vocabularies] == [end_tokens(folder)] * 3
    for one in vocabularies:
        assert_same_ids(theirs, one, hard_texts(300, composed=False, seed=34))
        one.close()
