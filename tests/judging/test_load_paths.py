"""Load paths of a model into an engine: the text in rows, and a mistake of llorch that shows where the rows say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_models import GGUF_METADATA, VOCAB, gguf_tensors, random_tensors, write_file, write_folder
from helpers.refusals import refuses

from llorch.engines import OURS, EngineName, LoadPath, ReferenceEngine, open_in_process
from llorch.families.config import LinearScaling, ModelConfig
from llorch.files import Weights, export, open_weights, opening
from llorch.judging import verify as models
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.quantised_models import write_model
from llorch.judging.goldens import float64_reference
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.forward import ENGINES, stored_load_path
from llorch.judging.runner_check import check_runner
from llorch.judging.runners.numpy import FLOAT64, NumpyRunner
from llorch.judging.verify import plan_live, run_engines
from llorch.ops.numerics import GGML
from llorch.runtime.builtin import builtin_path
from llorch.stages.comparison import FAIL

IDS = (3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 27, 13)
LLAMACPP, TRANSFORMERS = (LoadPath(name, name) for name in ENGINES)
COPY, OUR_COPY = LoadPath("llamacpp", "llamacpp", "llamacpp"), LoadPath(OURS, OURS, OURS)
SCALED = GGUF_METADATA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
NO_WORDS = {"tokenizer.ggml.model": "none", "llama.vocab_size": VOCAB}


def make(model_name: str, folder: Path) -> Path:
    """A model by its name: built-in, a type of the micro models of checkpoint 13, or a tiny one made here."""
    if model_name.startswith("micro"):
        return builtin_path(model_name)
    if model_name == "folder":
        return write_folder(folder / model_name, random_tensors("llama"))
    if not model_name.startswith("file"):
        return write_model(model_name, folder)
    tensors, metadata = {n: values * np.float32(0.1) for n, values in gguf_tensors().items()}, GGUF_METADATA
    if model_name == "file, scaled":
        metadata = SCALED
    if model_name == "file, factors":
        tensors["rope_freqs.weight"] = np.array([1.0, 1.5, 3.0, 7.0], np.float32)
    if model_name == "file, biased":
        tensors |= {n.replace("weight", "bias"): v[:, 0].copy() for n, v in tensors.items() if n[6:] in QKV}
    return write_file(folder / "tiny.gguf", tensors, metadata | NO_WORDS)


QKV = tuple(f"attn_{part}.weight" for part in "qkv")


@pytest.mark.live
@pytest.mark.parametrize(
    ("model_name", "name", "settings", "load_path"),
    [
        ("micro-llama", "llamacpp", {}, LLAMACPP),
        ("micro-llama", "llamacpp", {"dtype": "bfloat16"}, COPY),
        ("micro-llama", "llamacpp", {"dtype": "float16"}, COPY),
        ("Q4_K_M", "llamacpp", {}, COPY),
        ("Q4_K_M", "llamacpp", {"numerics": GGML}, LLAMACPP),
        ("folder", "llamacpp", {}, OUR_COPY),
        ("folder", "llamacpp", {"dtype": "float16"}, OUR_COPY),
        ("folder", "transformers", {"dtype": "float64"}, TRANSFORMERS),
        ("micro-qwen2", "transformers", {}, TRANSFORMERS),
        ("micro-qwen3", "transformers", {}, replace(TRANSFORMERS, set_by_llorch=("head_dim",))),
        ("micro-llama3", "transformers", {}, replace(TRANSFORMERS, set_by_llorch=("rope_parameters",))),
        ("file", "transformers", {}, TRANSFORMERS),
        ("file, scaled", "transformers", {}, replace(TRANSFORMERS, set_by_llorch=("rope_parameters",))),
        ("file, factors", "transformers", {}, replace(TRANSFORMERS, set_by_llorch=("inv_freq",))),
        ("file, biased", "transformers", {}, LoadPath(OURS, OURS, set_by_llorch=("attention_bias",))),
        ("Q4_K_M", "transformers", {}, TRANSFORMERS),
        ("Q1_0", "transformers", {"dtype": "float64"}, LoadPath(OURS, OURS)),
    ],
)
def test_an_engine_says_on_what_route_its_model_came(
    model_name: str, name: EngineName, settings: dict, load_path: LoadPath, tmp_path: Path
):
    with open_in_process(name, make(model_name, tmp_path), **settings) as engine:
        assert engine.load_path == load_path
        assert stored_load_path({"engines": {name: engine.provenance()}}, name) == load_path


def test_goldens_that_do_not_say_how_a_file_came_are_refused():
    with refuses(ValueError, "llamacpp", "reference_outputs/regenerate.py", where="golden"):
        stored_load_path({"engines": {"llamacpp": {}}}, "llamacpp")


def eps_read(patch: pytest.MonkeyPatch) -> None:
    for name in ("config_from_gguf", "config_from_huggingface"):
        misread(patch, name, lambda config: {"rms_norm_eps": 1.1 * config.rms_norm_eps})


def scaling_read(patch: pytest.MonkeyPatch) -> None:
    misread(patch, "config_from_gguf", lambda _: {"rope_scaling": LinearScaling(factor=2.001)})


def misread(patch: pytest.MonkeyPatch, name: str, change: Callable[[ModelConfig], dict]) -> None:
    right = getattr(opening, name)

    def wrong(*args: object, **kwargs: object) -> ModelConfig:
        config = right(*args, **kwargs)
        return replace(config, **change(config))

    patch.setattr(opening, name, wrong)


def tensor_read(patch: pytest.MonkeyPatch) -> None:
    right = Weights.read
    patch.setattr(Weights, "read", lambda self, name: right(self, name) * np.float32(1.01 if "v_proj" in name else 1))


def eps_written(patch: pytest.MonkeyPatch) -> None:
    add = export.add_hyperparameters
    wrong = lambda writer, config: add(writer, replace(config, rms_norm_eps=1.1 * config.rms_norm_eps))  # noqa: E731
    patch.setattr(export, "add_hyperparameters", wrong)


def rows_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(export, "interleave", lambda rows, heads: rows)


TRUE = "transformers", FLOAT64_REFERENCE
INJECTED = [  # who disagrees, and whether that is what the routes say
    (tensor_read, "file", {"llamacpp", *TRUE}),
    (tensor_read, "folder", {*TRUE}),
    (tensor_read, "Q4_K_M", {"llamacpp", *TRUE}),
    (tensor_read, "Q1_0", {"llamacpp"}),
    (eps_read, "file", {"llamacpp", *TRUE}),
    (eps_read, "folder", {*TRUE}),
    (scaling_read, "file, scaled", {"llamacpp"}),
    (eps_written, "folder", {"llamacpp"}),
    (rows_written, "folder", {"llamacpp"}),
    (eps_written, "Q4_K_M", set()),
]


@pytest.mark.nightly_cases(but=["eps_written-folder-red7"])
@pytest.mark.live
@pytest.mark.parametrize(("inject", "model_name", "red"), INJECTED)
def test_a_mistake_of_our_reader_or_writer_is_red_where_rows_say_that_it_was_not_in_the_way(
    inject: Callable, model_name: str, red: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = make(model_name, tmp_path)
    for module in (models, float64_reference):
        monkeypatch.setattr(module, "open_engine", open_in_this_process)
    monkeypatch.setattr(models, "start", lambda engines: None)
    inject(monkeypatch)
    plan = plan_live(open_weights(path), IDS, ENGINES)
    shown = run_engines(plan, progress=print, failed=None)
    suite = ForwardExpectations("m", shown.weights, plan.cases, shown.engine_outputs, shown.reference)
    comparisons = [c for dtype in ("numpy", FLOAT64) for c in check_runner(suite, NumpyRunner(shown.weights, dtype))]
    routes = {c.engine: c.load_path for c in comparisons if c.load_path is not None}
    assert {c.engine for c in comparisons if c.verdict == FAIL} == red
    assert {name for name, load_path in routes.items() if shows(load_path, inject.__name__)} == red


def open_in_this_process(*args: Any, progress: object = None, **kwargs: Any) -> ReferenceEngine:
    """An engine in this process, where mistakes are planted."""
    return open_in_process(*args, **kwargs)


def shows(load_path: LoadPath, mistake: str) -> bool:
    """Whether an engine whose file came this way knows better."""
    if mistake.endswith("written"):
        return load_path.written == OURS
    return load_path.read != OURS and not (mistake == "scaling_read" and "rope_parameters" in load_path.set_by_llorch)
