"""Faults of the forward pass in NumPy, and the runs that they are injected into: of goldens, stored types, engines."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_models
from builders.tiny_models import GGUF_METADATA, gguf_tensors, random_tensors, write_file, write_folder
from helpers.stored_goldens import quantised_golden, suite_of, suite_of_case, weights_of

from faults.fault import Inject, InjectedFault, replaced
from llorch.diagnosis.mistakes import MISTAKES
from llorch.families.config import ModelConfig
from llorch.files import Weights, matrix, open_weights
from llorch.judging.expectations.forward import ForwardExpectations
from llorch.judging.expectations.quantised import stage_rows
from llorch.judging.expectations.quantised_models import write_model
from llorch.judging.goldens.float64_reference import FLOAT64_REFERENCE
from llorch.judging.goldens.forward import ENGINES
from llorch.judging.runner_check import RunnerCheck, check_runner
from llorch.judging.runners import numpy as runners
from llorch.judging.runners.numpy import FLOAT64, NumpyRunner
from llorch.judging.types import Comparison
from llorch.judging.verify import plan_live, run_engines, verify_ggml, verify_live
from llorch.model import forward, generate
from llorch.model.cache import KVCache
from llorch.model.model import Model, load
from llorch.ops import sampling
from llorch.ops.numerics import GGML
from llorch.ops.sampling import softmax
from llorch.runtime.builtin import builtin_path

LIVE_VOCAB = 32_000
LIVE_IDS = (3, 1, 4, 15, 9, 2, 6, 5, 31_999, 7_777)
FLOAT64_IDS = (3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 27, 13)
FTYPES = {"Q8_0": 7, "Q4_K_M": 15}  # LLAMA_FTYPE_MOSTLY_*


def of_golden(fault: InjectedFault, patch: pytest.MonkeyPatch, _: Path) -> list[Comparison]:
    """Comparisons of some kinds with one engine's golden, of a fault or of a mistake of the library in an op."""
    mistake = MISTAKES.get(fault.name)
    inject = replaced(forward, mistake.part, mistake.wrong) if mistake else FAULTS[fault.name]
    inject(patch)
    suite, runner = suite_of_case(fault.model, fault.case, "llamacpp"), NumpyRunner(weights_of(fault.model))
    return [row for kind in fault.rows.split() for row in getattr(RunnerCheck(suite, runner), kind)()]


def in_float64(fault: InjectedFault, patch: pytest.MonkeyPatch, _: Path) -> list[Comparison]:
    """Comparisons of a run in float64 with the float64 reference."""
    FAULTS[fault.name](patch)
    return check_runner(suite_of(fault.model), NumpyRunner(weights_of(fault.model), FLOAT64))


def of_packed(fault: InjectedFault, patch: pytest.MonkeyPatch, folder: Path) -> list[Comparison]:
    """Comparisons of a model of a stored type with the golden of checkpoint 13; in its first layer, if so named."""
    FAULTS[fault.name](patch)
    comparisons = stage_rows(fault.model, write_model(fault.model, folder), quantised_golden())
    return [c for c in comparisons if fault.rows != "layer 0" or c.stage_ref.layer == 0]


def live(fault: InjectedFault, patch: pytest.MonkeyPatch, folder: Path) -> list[Comparison]:
    """Comparisons of decoding and sampling with both engines, which ran on a random model with many tokens."""
    suite = live_suite(fault.model, folder)
    FAULTS[fault.name](patch)
    runner = NumpyRunner(suite.weights)
    return [*(check := RunnerCheck(suite, runner)).decode_rows(), *check.sampler_rows()]


def in_float64_live(fault: InjectedFault, patch: pytest.MonkeyPatch, folder: Path) -> list[Comparison]:
    """Isolated comparisons with the float64 reference of a random model that is not in the repository."""
    path = _tiny_model(fault.model, folder)
    FAULTS[fault.name](patch)
    comparisons = verify_live(plan_live(open_weights(path), FLOAT64_IDS, ["llamacpp"]))
    return [c for c in comparisons if c.engine == FLOAT64_REFERENCE and c.mode == "isolated"]


def of_packed_live(fault: InjectedFault, patch: pytest.MonkeyPatch, folder: Path) -> list[Comparison]:
    """Comparisons of the story model with llama.cpp, which quantised it, too."""
    path = _quantised_story(fault.model, folder)
    FAULTS[fault.name](patch)
    model = load(path, numerics=GGML)
    return list(verify_ggml(model, model.tokenizer.encode("Once upon a time, a small fox found a stone")))


@cache
def live_suite(kind: str, folder: Path) -> ForwardExpectations:
    """Run both engines on a random model with many tokens, as a GGUF file or a Hugging Face folder."""
    path = folder / f"live-{kind}"
    if kind == "file":
        metadata = GGUF_METADATA | {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": LIVE_VOCAB}
        path = write_file(path.with_suffix(".gguf"), with_vocabulary(gguf_tensors()), metadata)
    else:
        write_folder(path, with_vocabulary(random_tensors("qwen3")), "qwen3", vocab_size=LIVE_VOCAB)
    plan = plan_live(open_weights(path), LIVE_IDS, ENGINES)
    shown = run_engines(plan, progress=print, failed=None)
    return ForwardExpectations("m", shown.weights, plan.cases, shown.engine_outputs, shown.reference)


def with_vocabulary(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same model with more tokens."""
    rng = np.random.default_rng(9)
    more = {name: (LIVE_VOCAB, array.shape[1]) for name, array in tensors.items() if len(array) == tiny_models.VOCAB}
    return tensors | {name: rng.standard_normal(shape, np.float32) / np.float32(3) for name, shape in more.items()}


@cache
def _tiny_model(kind: str, folder: Path) -> Path:
    if kind == "folder":
        return write_folder(folder / "tiny", random_tensors("qwen3"), "qwen3")
    tensors = {name: values * np.float32(0.1) for name, values in gguf_tensors().items()}
    metadata = {**GGUF_METADATA, "tokenizer.ggml.model": "none", "llama.vocab_size": tiny_models.VOCAB}
    return write_file(folder / "tiny.gguf", tensors, metadata)


@cache
def _quantised_story(kind: str, folder: Path) -> Path:
    from llorch.engines.f32_copy import write_by_llamacpp

    path = folder / f"story-{kind}.gguf"
    write_by_llamacpp(builtin_path("story"), path, FTYPES[kind])
    return path


def unmasked(_: Callable) -> Callable:
    def wrong(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        k = np.repeat(k, q.shape[1] // len(k), axis=0)
        return q.swapaxes(0, 1) @ k.swapaxes(1, 2) / q.dtype.type(q.shape[2] ** 0.5)

    return wrong


def forgetful(append: Callable) -> Callable:
    def wrong(cache: KVCache, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys, values = append(cache, layer, k, v)
        return keys * (np.arange(keys.shape[1]) >= keys.shape[1] - len(k))[:, None], values

    return wrong


def zeros_in_a_step(append: Callable) -> Callable:
    def wrong(cache: KVCache, layer: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        context = append(cache, layer, k, v)
        return context if context[0].shape[1] == len(k) else tuple(array * 0 for array in context)

    return wrong


def constant_logits(linear: Callable) -> Callable:
    def wrong(x: np.ndarray, weight: np.ndarray, *bias: Any) -> np.ndarray:
        made = linear(x, weight, *bias)
        return np.ones_like(made) if len(weight) == LIVE_VOCAB else made

    return wrong


def float16_for_float32(init: Callable) -> Callable:
    def narrow(self: KVCache, config: ModelConfig, dtype: type[np.floating], **kwargs: Any) -> None:
        init(self, config, np.float16 if dtype is np.float32 else dtype, **kwargs)

    return narrow


def scaled(op: Callable) -> Callable:
    """The first argument is too large by one part in 1e9."""
    return lambda x, *args: op(x * x.dtype.type(1 + 1e-9), *args)


def unsummed(_: Callable) -> Callable:
    return lambda x: matrix.round_activations(x, "Q8_1").reshape(len(x), -1, 32).sum(-1)


def rolled(run: Callable) -> Callable:
    return lambda model, new, *args, **kwargs: np.roll(run(model, new, *args, **kwargs), len(new) == 1, -1)


def constant_last_row(run: Callable) -> Callable:
    return lambda *args, last_only=False, **kwargs: run(*args, last_only=last_only, **kwargs) ** (not last_only)


FAULTS: dict[str, Inject] = {
    "none": lambda patch: None,
    "eps of 1.1": replaced(forward, "rms_norm", lambda norm: lambda x, w, *, eps: norm(x, w, eps=1.1 * eps)),
    "base of 1.00001": replaced(
        forward,
        "rope_tables",
        lambda tables: lambda *args, theta, **kwargs: tables(*args, theta=1.00001 * theta, **kwargs),
    ),
    "bias missing": replaced(forward, "linear", lambda _: lambda x, weight, bias=None: x @ weight.T),
    "scores not masked": replaced(forward, "attention_scores", unmasked),
    "scores of 1 + 1e-9": replaced(forward, "attention_scores", scaled),
    "context lost after a cache": replaced(
        forward, "attention_context", lambda context: lambda p, v: context(p, v) * (p.shape[1] == p.shape[2])
    ),
    "residual of 1 + 1e-9": replaced(
        forward, "attention", lambda run: lambda h, *args: run(h, *args) * h.dtype.type(1 + 1e-9)
    ),
    "gate of 1 + 1e-9": replaced(forward, "swiglu", scaled),
    "activation of 1.001 in a step": replaced(
        forward, "swiglu", lambda swiglu: lambda gate, up: swiglu(gate, up) * np.float32(1.001 if len(gate) == 1 else 1)
    ),
    "logits constant": replaced(forward, "linear", constant_logits),
    "positions from 0 after a cache": replaced(KVCache, "next_positions", lambda _: lambda cache, n: np.arange(n)),
    "a step one position on": replaced(
        KVCache, "next_positions", lambda positions: lambda cache, n: positions(cache, n) + (cache.length > 0)
    ),
    "cache forgets earlier keys": replaced(KVCache, "append", forgetful),
    "cache of zeros": replaced(
        KVCache, "append", lambda append: lambda *args: tuple(array * 0 for array in append(*args))
    ),
    "cache of zeros in a step": replaced(KVCache, "append", zeros_in_a_step),
    "float16 cache": replaced(KVCache, "__init__", float16_for_float32),
    "token after the best one": replaced(
        generate, "draw", lambda _: lambda distribution, u: int(distribution.argmax() + 1) % distribution.size
    ),
    "filters ignored": replaced(
        runners,
        "probabilities",
        lambda _: lambda logits, settings, history: softmax(logits / logits.dtype.type(settings.temperature)),
    ),
    "top-p drops the crossing token": replaced(sampling, "keep_top_p", MISTAKES["top-p-drops-crossing-token"].wrong),
    "activations not rounded": replaced(matrix, "round_activations", lambda _: lambda x, kind: x),
    "sums not rounded": replaced(matrix, "block_sums", unsummed),
    "matrices of the other layer": replaced(
        Weights, "layer", lambda layer: lambda weights, index: layer(weights, 1 - index)
    ),
    "logits of a step rolled": replaced(Model, "_forward", rolled),
    "last row constant": replaced(runners, "forward", constant_last_row),
}
