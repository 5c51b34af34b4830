"""The torch path alone: packed matrices against llama.cpp, and llorch's kernels against torch's own modules.

Decoding of packed matrices is compared bit by bit, and so is every product of the micro models.

llama.cpp multiplies rounded activations. So every kernel gets the golden's input, rounded as ggml rounds it, and its
product has the tolerance of NumPy's product. In half precision the tolerance is the cost of rounding inputs, weights
and the result. Both modules are judged: the plain one, and the kernel that runs on the target.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from llorch.files import Weights, open_weights
from llorch.files.quant import ACTIVATION_TYPE
from llorch.judging.compare import compare_exact, judge, with_load_paths
from llorch.judging.expectations.quantised import CHECKPOINT, ENGINE, made_models, other_bits, suite_of
from llorch.judging.expectations.quantised_models import MODELS
from llorch.judging.goldens.quantised import CASE, FOLDER, QuantisedGolden, read
from llorch.judging.tolerances.forward import WORST, product_error
from llorch.judging.tolerances.rounding import ARITHMETICS, FLOAT32
from llorch.judging.types import Comparison, Expectation
from llorch.ops.numerics import GGML
from llorch.ops.rounding import round_activations
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target
from llorch.pytorch.kernels.kernel_selection import speed_up, verdicts
from llorch.pytorch.kernels.packing import PACKERS, decode, pack
from llorch.pytorch.kernels.table import kernels_for
from llorch.pytorch.load import load_packed, path_of
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import FAIL, PASS, Difference, Tolerance
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import Stage, input_keys, keys, matrix_of

PACKED_MODELS = tuple(name for name, recipe in MODELS.items() if recipe.types <= PACKERS.keys())


def verify_quantised_torch(target: Target) -> Iterator[Comparison]:
    """Judge packed matrices against the stored goldens of checkpoint 13; see `read` for the exceptions.

    The stages are `decode.<type>`, `file`, and for every model in `PACKED_MODELS` its products, isolated.
    """
    golden = read(goldens_folder() / FOLDER)
    yield from packed_decode_rows(golden, target)
    for name, path, comparison in made_models(golden, PACKED_MODELS):
        yield replace(comparison, backend=str(target))
        if comparison.verdict == PASS:
            yield from product_rows(name, path, golden, target)


def packed_decode_rows(golden: QuantisedGolden, target: Target) -> Iterator[Comparison]:
    """Compare blocks, repacked and then decoded, with the bits of ggml's C; only the payload of a NaN is free."""
    for kind in PACKERS:
        values = golden.blocks[f"{kind.name}.values"]
        raw = torch.from_numpy(golden.blocks[f"{kind.name}.blocks"].copy()).to(target.device)
        wrong = other_bits(decode(pack(raw, kind), kind).cpu().numpy().reshape(values.shape), values)
        note = f"{int(wrong.sum())} of {wrong.size} values differ" if wrong.any() else ""
        stage_ref = StageRef(CHECKPOINT, "decode", part=kind.name)
        yield compare_exact(stage_ref, ENGINE, float(wrong.mean()), note, model=kind.name, backend=str(target))


def product_rows(name: str, path: Path, golden: QuantisedGolden, target: Target) -> Iterator[Comparison]:
    """Compare every product of one model, by the plain kernels and by the target's kernels."""
    weights = open_weights(path).using(GGML)
    with closing(weights.source):
        model = load_packed(weights, dtype=target.dtype, device=target.device)
        routes = {name: shown.load_path for name, shown in golden.engine_outputs(name).items()}
        yield from with_load_paths(kernel_rows(name, weights, golden, model, target, f"{target}-plain"), routes)
        speed_up(model, target, "sdpa", compiled=False)
        yield from with_load_paths(kernel_rows(name, weights, golden, model, target, str(target)), routes)


def kernel_rows(
    name: str, weights: Weights, golden: QuantisedGolden, model: CausalLM, target: Target, backend: str
) -> Iterator[Comparison]:
    """Compare every product of a model's kernels on golden inputs.

    In float32 the tolerances are those of NumPy's products.
    """
    trace, tolerances = golden.traces[name], suite_of(name, weights, golden).tolerances(CASE)
    for key, stage, layer in keys(weights.config):
        if stage.matrix:
            x = rounded_input(weights, stage, layer, trace)
            allowed = tolerances.isolated(key)
            arithmetic = ARITHMETICS.get(target.dtype_name, FLOAT32)  # the golden is float32
            if arithmetic.is_half:
                matrix = (weights if layer is None else weights.layer(layer))[matrix_of(stage, weights.config)]
                error = product_error(x, matrix, trace[key], arithmetic)
                allowed = Tolerance(error, WORST * error)
            stage_ref = StageRef(CHECKPOINT, stage.name, layer, CASE)
            expectation = Expectation(stage_ref, "isolated", ENGINE, trace[key], allowed, stage=stage)
            yield judge(expectation, multiply(kernel_at(model, stage, layer), x, target), model=name, backend=backend)


def rounded_input(weights: Weights, stage: Stage, layer: int | None, trace: Mapping[str, np.ndarray]) -> np.ndarray:
    """Round the golden's input of a product as ggml does it for the type of the matrix."""
    name = matrix_of(stage, weights.config)
    kind = weights.as_stored(name if layer is None else f"layers.{layer}.{name}").ggml
    return round_activations(trace[input_keys(stage, layer, weights.config)[0]], ACTIVATION_TYPE[kind])


def kernel_at(model: CausalLM, stage: Stage, layer: int | None) -> nn.Module:
    """Find the module that computes a product."""
    if layer is None:
        return model.lm_head
    return model.get_submodule(path_of(f"layers.{layer}.{stage.matrix}").removesuffix(".weight"))


def multiply(module: nn.Module, x: np.ndarray, target: Target) -> np.ndarray:
    """Compute the kernel's output for some rows, as float32; assert that it ran on the target's device and dtype."""
    with torch.inference_mode():
        y = module(torch.from_numpy(x).to(target.device, target.dtype))
    assert (y.device.type, y.dtype) == (target.device.type, target.dtype)
    return y.float().cpu().numpy()


def compare_own_kernels(target: Target) -> Iterator[Comparison]:
    """Try every kernel anew; an error is a part of what is allowed, and the note has the time beside torch's."""
    kinds = [*kernels_for(target.device, target.dtype, required=True)]
    for kind, verdict in (verdicts(target, kinds, anew=True) if kinds else {}).items():
        fault, note = verdict.fault(timed=False), f"{verdict.slow:.2f} times the time of torch's kernel"
        yield Comparison(
            "kernels", StageRef("14", kind, case="tried"), "isolated", "torch", str(target),
            Difference(verdict.off, verdict.off), Tolerance(1.0, 1.0), FAIL if fault else PASS, note=fault or note,
        )  # fmt: skip
