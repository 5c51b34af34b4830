"""Both reference engines, live: their outputs, which agree with each other stage by stage."""

import ctypes
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import tokenizers
from builders.families import MICRO
from builders.tiny_models import random_tensors, write_folder
from helpers.refusals import refuses
from tokenizers import models, pre_tokenizers, processors

from llorch.engines import EngineName, ReferenceEngine
from llorch.engines import open_in_process as open_engine  # what is watched here is inside the engines
from llorch.files import open_weights
from llorch.files.export import write_gguf
from llorch.judging.goldens.forward import SAMPLINGS
from llorch.runtime.builtin import builtin_path
from llorch.runtime.errors import MissingExtra

pytestmark = pytest.mark.live

FOLDERS = ("folder-llama", "folder-qwen3")
VOCABULARY = 259
IDS = (3, 17, 250, 9, 44, 101, 7, 88, 129, 200, 55)
# Measured: 1e-6 at most at position 0. At 4000 the engines' float32 RoPE angles differ by some 1e-4 of a turn
# (ggml multiplies angles up, transformers multiplies position by frequency), and 4e-5 of that shows.
NEAR, FAR = 4e-6, 2e-4

Pair = tuple[ReferenceEngine, ReferenceEngine]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: random_folder(name, tmp_path_factory.mktemp("models") / name) for name in FOLDERS}


@pytest.fixture(scope="module", params=[*MICRO, *FOLDERS])
def pair(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Pair]:
    yield from open_pair(folders[request.param] if request.param in folders else builtin_path(request.param))


@pytest.fixture(scope="module")
def qwen3(folders: dict[str, Path]) -> Iterator[Pair]:
    yield from open_pair(folders["folder-qwen3"])


def open_pair(path: Path) -> Iterator[Pair]:
    with open_engine("llamacpp", path) as first:
        with open_engine("transformers", path) as second:
            yield first, second


def random_folder(name: str, path: Path) -> Path:
    """A random model with uneven gains and biases, pairwise different sizes and eps and theta off the defaults."""
    import torch
    import transformers

    config: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=96, intermediate_size=160, num_hidden_layers=2)
    config |= dict(num_key_value_heads=2, head_dim=32, rms_norm_eps=3e-6, max_position_embeddings=8192)
    rope = {"rope_type": "llama3", "rope_theta": 2e4, "factor": 8.0, "low_freq_factor": 1.0}
    if name == "folder-llama":
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
        config |= dict(num_attention_heads=6, attention_bias=True, tie_word_embeddings=True, rope_parameters=rope)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    else:
        config |= dict(num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 3e5})
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))
    draw = torch.Generator().manual_seed(1)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        if parameter.ndim == 2:
            noise *= 0.02 if "embed" in key else parameter.shape[1] ** -0.5
        parameter.data.copy_(0.3 * noise + ("norm" in key) if parameter.ndim == 1 else noise)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    return path


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance; both must be infinite at the same places."""
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    return float(np.linalg.norm(actual[finite] - expected[finite]) / np.linalg.norm(expected[finite]))


@pytest.mark.parametrize(("first_position", "bound"), [(0, NEAR), (4000, FAR)])
def test_engines_agree_at_every_stage(pair: Pair, first_position: int, bound: float):
    first, second = (engine.trace(IDS, first_position=first_position) for engine in pair)
    assert list(first) == list(second)
    worst = {key: distance(first[key], second[key]) for key in first}
    assert {key: d for key, d in worst.items() if not d < bound} == {}


def test_engines_agree_on_a_single_token(pair: Pair):
    first, second = (engine.trace(IDS[:1]) for engine in pair)
    assert max(distance(first[key], second[key]) for key in first) < NEAR


def test_capture_does_not_change_the_logits(pair: Pair):
    for engine in pair:
        np.testing.assert_array_equal(engine.trace(IDS)["logits"], engine.logits(IDS), strict=True)


def test_traces_are_contiguous_float32_and_only_scores_are_infinite(pair: Pair):
    for engine in pair:
        for key, array in engine.trace(IDS).items():
            assert array.dtype == np.float32, key
            assert array.flags.c_contiguous, key
            assert np.isfinite(array).all() != key.endswith("attn_scores"), key


def test_selected_logits_are_those_of_the_last_token(pair: Pair):
    for engine in pair:
        assert distance(engine.selected_logits(IDS), engine.logits(IDS)[-1]) < NEAR


def test_engines_continue_with_the_same_tokens(pair: Pair):
    first, second = (engine.greedy(IDS, 16) for engine in pair)
    assert first == second
    assert len(first) == 16


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampler_chains_agree(qwen3: Pair, name: str):
    logits = qwen3[0].selected_logits(IDS)
    first, second = (engine.probabilities(logits, SAMPLINGS[name], IDS) for engine in qwen3)
    np.testing.assert_array_equal(first > 0, second > 0)
    np.testing.assert_allclose(first, second, rtol=2e-6, atol=1e-9, strict=True, equal_nan=False)
    assert abs(first.sum() - 1) < 1e-5


def test_temperature_0_puts_all_probability_on_the_best_token(qwen3: Pair):
    settings = dataclasses.replace(SAMPLINGS["all"], temperature=0.0)
    logits = qwen3[0].selected_logits(IDS)
    for engine in qwen3:
        assert engine.probabilities(logits, settings, ()).tolist() == np.eye(VOCABULARY)[logits.argmax()].tolist()


@pytest.mark.parametrize("first_position", [0, 5, 4000])
def test_queries_are_rotated_to_the_requested_positions(qwen3: Pair, first_position: int):
    angles = np.outer(first_position + np.arange(len(IDS)), 3e5 ** (-np.arange(0, 32, 2) / 32))[:, None]
    for engine in qwen3:
        trace = engine.trace(IDS, first_position=first_position)
        x = trace["l0.q_norm"].astype(np.float64)
        turned = (x[..., :16] + 1j * x[..., 16:]) * np.exp(1j * angles)
        expected = np.concatenate([turned.real, turned.imag], axis=-1)
        assert distance(trace["l0.q_rope"], expected) < (NEAR if first_position < 10 else FAR)


def test_end_tokens_and_generation_settings_of_a_folder_do_not_stop_greedy(qwen3: Pair, folders, tmp_path: Path):
    expected = qwen3[0].greedy(IDS, 8)
    folder = shutil.copytree(folders["folder-qwen3"], tmp_path / "ends")
    settings = {"eos_token_id": expected[:3], "do_sample": True, "temperature": 0.7, "repetition_penalty": 1.8}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    with open_engine("transformers", folder) as engine:
        assert engine.greedy(IDS, 8) == expected


def test_quantised_files_run_as_their_decoded_weights(tmp_path: Path):
    import llama_cpp

    path = tmp_path / "q8.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    assert llama_cpp.llama_model_quantize(bytes(builtin_path("micro-qwen2")), bytes(path), ctypes.pointer(params)) == 0
    with open_engine("llamacpp", path) as first:
        a = first.trace(IDS)
    with open_engine("transformers", path) as second:
        b = second.trace(IDS)
    assert max(distance(a[key], b[key]) for key in a) < NEAR


def test_an_error_inside_the_callback_reaches_the_caller(qwen3: Pair, monkeypatch: pytest.MonkeyPatch):
    def fail(*_arguments: object) -> None:
        raise LookupError("planted")

    monkeypatch.setattr("llorch.engines.llamacpp_graph.GraphCapture.keep", fail)
    with pytest.raises(LookupError, match="planted"):
        qwen3[0].trace(IDS)
    monkeypatch.undo()
    qwen3[0].trace(IDS)


def test_a_graph_with_other_stages_is_refused(qwen3: Pair, monkeypatch: pytest.MonkeyPatch):
    for engine, name in zip(qwen3, ("llamacpp", "transformers"), strict=True):
        monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, n_layers=3))
        with refuses(RuntimeError, "l2.attn_norm", where=name):
            engine.trace(IDS)


def test_another_struct_layout_is_refused(monkeypatch: pytest.MonkeyPatch):
    from llorch.engines import ggml_tensor  # needs the engine

    read_too_far = ggml_tensor.GgmlTensor.from_address  # as if a field of eight bytes had gone
    monkeypatch.setattr(ggml_tensor, "node", lambda address: read_too_far(address + 8))
    with refuses(RuntimeError, "ggml_tensor", "type", "ne", "nb", "op", "op_params", "llorch[golden]"):
        ggml_tensor.check_layout()


def test_refusal_names_the_path_and_the_reason_of_llama_cpp(tmp_path: Path):
    tensors = random_tensors("qwen3")  # llama.cpp knows no biases in this family, transformers does
    projections = [name for name in tensors if "self_attn" in name and "_proj.weight" in name]
    tensors |= {n.replace("weight", "bias"): np.ones(len(tensors[n]), np.float32) for n in projections}
    folder = write_folder(tmp_path / "biased", tensors, "qwen3", attention_bias=True)
    with refuses(OSError, "biased", "float32", "number of tensors"):
        open_engine("llamacpp", folder)


@pytest.mark.parametrize("ids", [(), (VOCABULARY,), (-1,)])
def test_ids_outside_the_vocabulary_are_refused(qwen3: Pair, ids: tuple[int, ...]):
    for engine in qwen3:
        with refuses(ValueError, expected=f"0 to {VOCABULARY - 1}", got=ids[0] if ids else "none", where="ids"):
            engine.trace(ids)


def test_closed_engine_raises_an_error(folders):
    for name in get_args(EngineName):
        engine = open_engine(name, folders["folder-qwen3"])
        engine.close()
        with refuses(ValueError, "closed", where=name):
            engine.logits(IDS)


def test_tokenizing_without_a_vocabulary_gives_none(qwen3: Pair):
    for engine in qwen3:
        assert engine.tokenize("some text", add_special=True, parse_special=True) is None


@pytest.mark.parametrize("add_special", [False, True])
@pytest.mark.parametrize("parse_special", [False, True])
def test_tokenizers_of_both_engines_agree(folders, tmp_path: Path, add_special: bool, parse_special: bool):
    folder = shutil.copytree(folders["folder-qwen3"], tmp_path / "words")
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    metadata = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": [1] * 258 + [3]}
    metadata |= {"merges": ["h e", "he l"], "bos_token_id": 258, "add_bos_token": True}
    words = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    write_gguf(open_weights(folder), tmp_path / "words.gguf", tokenizer_metadata=words)
    text = "hello <|end|>\n h\u00e9 \U0001f600"
    with open_engine("llamacpp", tmp_path / "words.gguf") as first:
        actual = first.tokenize(text, add_special=add_special, parse_special=parse_special)
    with open_engine("transformers", folder) as second:
        assert second.tokenize(text, add_special=add_special, parse_special=parse_special) == actual
    assert actual is not None
    assert actual.count(258) == add_special + parse_special


def byte_tokenizer() -> tokenizers.Tokenizer:
    vocabulary = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("he", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 258)])
    return tokenizer


def test_provenance_is_json_and_names_the_engine(qwen3: Pair):
    for engine in qwen3:
        assert json.loads(json.dumps(engine.provenance()))["producer"] == engine.name


@pytest.mark.parametrize(("name", "package"), [("llamacpp", "llama_cpp"), ("transformers", "torch")])
def test_a_missing_engine_names_the_extra(name: EngineName, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    with refuses(MissingExtra, package, "llorch[golden]"):
        open_engine(name, "any")


def test_importing_llorch_engines_imports_no_engine_library():
    code = "import sys, llorch.engines; sys.exit(bool({'torch', 'transformers', 'llama_cpp'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
