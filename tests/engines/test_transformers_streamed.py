"""transformers with one layer of a model in memory at a time: the same bits, every layer read once for all passes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from builders.tiny_models import GGUF_METADATA, gguf_tensors, random_tensors, write_file, write_folder
from helpers.refusals import refuses

from llorch.engines import OURS, Call, open_in_process
from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.judging.expectations.quantised_models import write_model
from llorch.ops.numerics import DtypeName
from llorch.runtime.builtin import builtin_path

pytestmark = pytest.mark.live

IDS = (3, 17, 25, 9, 2, 10, 7, 8)
N_GREEDY = 3


def split_folder(folder: Path) -> Path:
    """A folder whose tensors lie in two files."""
    tensors = random_tensors("qwen3")
    write_folder(folder, tensors, "qwen3")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{at % 2}.safetensors" for at, name in enumerate(tensors)}
    for file in {*names.values()}:
        part = {name: tensor for name, tensor in tensors.items() if names[name] == file}
        safetensors.numpy.save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def add_biases(path: Path) -> Path:
    """A Llama file with biases of q, k and v and none of o, which transformers has no model for."""
    tensors = gguf_tensors()
    for name, matrix in gguf_tensors().items():
        if any(part in name for part in ("attn_q.", "attn_k.", "attn_v.")):
            tensors[name.replace("weight", "bias")] = matrix[:, 0].copy()
    return write_file(path, tensors, GGUF_METADATA)


def model(name: str, folder: Path) -> Path:
    match name:
        case "folder":
            return split_folder(folder / name)
        case "biases":
            return add_biases(folder / "biases.gguf")
        case "Q4_K_M" | "Q1_0":
            return write_model(name, folder)
    return builtin_path(name)


def engine_calls(golden: dict[str, np.ndarray]) -> list[Call]:
    given: list[Call] = [("isolated", (IDS, golden), {}), ("logits", (IDS,), {"first_position": 2})]
    return [("selected_logits", (IDS,), {}), ("continued", (IDS, N_GREEDY), {}), ("trace", (IDS[:3],), {}), *given]


def is_equal(a: Any, b: Any) -> bool:
    pairs = ((a[key], b[key]) for key in a) if isinstance(a, dict) else zip(a, b, strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.nightly_cases(but=["biases-llorch-bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "reader"),
    [
        *(("micro-llama", "transformers"), ("micro-llama3", "transformers"), ("folder", "transformers")),
        *(("Q4_K_M", "transformers"), ("Q1_0", "llorch"), ("biases", "llorch")),
    ],
)
def test_streamed_runs_equal_in_memory_runs_bit_for_bit(
    tmp_path: Path, name: str, reader: str, dtype: DtypeName, monkeypatch: pytest.MonkeyPatch
):
    told: list[str] = []
    monkeypatch.setattr("llorch.engines.transformers.tell", told.append)
    path = model(name, tmp_path)
    with open_in_process("transformers", path, dtype=dtype, streamed=False) as engine:
        calls = engine_calls(engine.trace(IDS))
        whole = engine.call_batch(calls)
        assert engine.load_path.read == engine.load_path.decoded == reader
    assert told == []
    with open_in_process("transformers", path, dtype=dtype, streamed=True) as engine:
        assert [is_equal(*pair) for pair in zip(engine.call_batch(calls), whole, strict=True)] == [True] * len(calls)
        n_layers = engine.config.n_layers
        assert [line.split(",")[0] for line in told] == [
            *(f"layer {i} of {n_layers}" for i in range(n_layers)), "logits",
        ] * N_GREEDY  # fmt: skip
        assert is_equal(engine.logits(IDS), engine.call_batch([("logits", (IDS,), {})])[0])
        assert engine.load_path.read == reader
        assert engine.load_path.decoded == ("safetensors" if path.is_dir() else "gguf" if reader != OURS else OURS)


def test_only_one_part_at_a_time_has_weights(monkeypatch: pytest.MonkeyPatch):
    from llorch.engines.transformers_streamed import EMBEDDING, FINAL_NORM, Streamed

    held: list[set[str]] = []
    fill = Streamed._fill

    def watched(self: Streamed, part: str) -> None:
        fill(self, part)
        held.append(parts(self._model))

    monkeypatch.setattr(Streamed, "_fill", watched)
    with open_in_process("transformers", builtin_path("micro-llama"), streamed=True) as engine:
        calls = engine_calls(engine.trace(IDS))
        held.clear()
        engine.call_batch(calls)
        always = {EMBEDDING, FINAL_NORM}
        layers = [f"model.layers.{i}" for i in range(engine.config.n_layers)]
        assert [now - always for now in held] == [{part} for part in (*layers, "lm_head")] * N_GREEDY
        assert parts(engine._model) == always  # type: ignore[attr-defined]


def parts(model: Any) -> set[str]:
    """What has weights: a layer, or another module."""
    held = [name.split(".") for name, parameter in model.named_parameters() if not parameter.is_meta]
    return {".".join(name[:3] if "layers" in name else name[:-1]) for name in held}


def test_failed_pass_frees_all_parts_and_the_engine_continues():
    with open_in_process("transformers", builtin_path("micro-llama"), streamed=True) as engine:
        expected = engine.logits(IDS)
        with refuses(ValueError, got=10**6, where="ids"):
            engine.call_batch([("logits", (IDS,), {}), ("logits", ((10**6,),), {})])
        assert is_equal(engine.logits(IDS), expected)


@pytest.mark.parametrize("name", ["micro-qwen3-next", "micro-qwen3.5"])
def test_read_gains_and_decays_equal_the_folder(name: str, tmp_path: Path):
    import torch

    from llorch.engines.transformers_streamed import LlorchTensors

    convert(builtin_path(name), tmp_path / "folder")
    stored = safetensors.numpy.load_file(tmp_path / "folder" / "model.safetensors")
    ours = LlorchTensors(open_weights(tmp_path / "folder"), torch.float64)
    names = [each for each in stored if each.endswith(("norm.weight", "A_log"))]
    assert len(names) > 6
    for each in names:
        np.testing.assert_allclose(ours.read(each).numpy(), stored[each], rtol=4e-16, err_msg=each)


@pytest.mark.parametrize("free", [0, 1e9])
def test_model_larger_than_memory_is_streamed(monkeypatch: pytest.MonkeyPatch, free: float):
    monkeypatch.setattr("llorch.files.layerwise.available_memory", lambda: free)
    with open_in_process("transformers", builtin_path("micro-llama")) as engine:
        knobs = engine.provenance()["knobs"]
    assert ("layer" in str(knobs.get("weights"))) == (free == 0)  # type: ignore[attr-defined]
