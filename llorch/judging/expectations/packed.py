"""Comparisons of the torch path only: packed matrices against llama.cpp, and llorch's kernels against torch's modules.

A packed matrix stays in its quantised type; a kernel decodes it in the product. Decoding is compared bit by bit, and
every product of the micro models within a tolerance.

llama.cpp multiplies rounded activations. So every kernel gets the golden's input (llama.cpp's), rounded as ggml rounds
it, and its product has the tolerance of NumPy's product. In half precision the tolerance is the error of rounding
inputs, weights and the output. Two modules are compared: the plain module, and the kernel that runs on the target.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from llorch.files import Weights, open_weights
from llorch.files.quant import ACTIVATION_TYPE, GGMLType, decode_compiled
from llorch.judging.compare import compare_exact, judge, with_load_paths
from llorch.judging.expectations.quantised import CHECKPOINT, ENGINE, suite_of, write_models, wrong_bits
from llorch.judging.expectations.quantised_models import MODELS
from llorch.judging.goldens.quantised import CASE, FOLDER, QuantisedGolden, read
from llorch.judging.tolerances.forward import WORST, product_error
from llorch.judging.tolerances.rounding import ARITHMETICS, FLOAT32
from llorch.judging.types import Comparison, Expectation
from llorch.ops.compiled.products import is_available
from llorch.ops.numerics import GGML
from llorch.ops.rounding import round_activations
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target
from llorch.pytorch.kernels.kernel_selection import speed_up, verdicts
from llorch.pytorch.kernels.packing import CPU_BLOCK_TYPES, PACKERS, decode, file_fields
from llorch.pytorch.kernels.table import kernels_for
from llorch.pytorch.load import load_packed, path_of
from llorch.runtime.builtin import goldens_folder
from llorch.stages.comparison import FAIL, PASS, Difference, Tolerance
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import Stage, input_keys, keys, matrix_of


def packed_types(target: Target) -> tuple[GGMLType, ...]:
    """List the types of ggml whose matrices stay packed on a device."""
    return tuple(PACKERS) if target.device.type == "cuda" else CPU_BLOCK_TYPES


def packed_models(target: Target) -> tuple[str, ...]:
    """List the models of the goldens whose matrices all stay packed on a device.

    Types whose activations have rounded sums are left out: the product with rounded activations differs from ggml's.
    """
    types = {kind for kind in packed_types(target) if ACTIVATION_TYPE[kind] != "Q8_1"}
    return tuple(name for name, recipe in MODELS.items() if recipe.types <= types)


def verify_quantised_torch(target: Target) -> Iterator[Comparison]:
    """Compare packed matrices with the stored goldens of quantised types; raise the errors of `read`.

    The stages are `decode.<type>`, `file`, and the isolated products of every model in `packed_models`.
    """
    golden = read(goldens_folder() / FOLDER)
    yield from compare_packed_decoding(golden, target)
    for name, path, comparison in write_models(golden, packed_models(target)):
        yield replace(comparison, backend=str(target))
        if comparison.verdict == PASS:
            yield from compare_products(name, path, golden, target)


def compare_packed_decoding(golden: QuantisedGolden, target: Target) -> Iterator[Comparison]:
    """Compare the bits of decoded blocks with ggml's; only the bits of a NaN may differ.

    On the CPU the compiled decoder runs, if there is one, as in products.
    """
    for kind in packed_types(target):
        values, raw = golden.blocks[f"{kind.name}.values"], golden.blocks[f"{kind.name}.blocks"].copy()
        if target.device.type == "cpu" and is_available():
            decoded = decode_compiled(raw, kind, values.shape)
        else:
            decoded = decode(file_fields(torch.from_numpy(raw).to(target.device), kind), kind).cpu().numpy()
        wrong = wrong_bits(decoded.reshape(values.shape), values)
        note = f"{int(wrong.sum())} of {wrong.size} values differ" if wrong.any() else ""
        stage_ref = StageRef(CHECKPOINT, "decode", part=kind.name)
        yield compare_exact(stage_ref, ENGINE, float(wrong.mean()), note, model=kind.name, backend=str(target))


def compare_products(name: str, path: Path, golden: QuantisedGolden, target: Target) -> Iterator[Comparison]:
    """Compare every product of one model, computed by the plain modules and by the target's kernels."""
    weights = open_weights(path).using(GGML)
    with closing(weights.source):
        model = load_packed(weights, dtype=target.dtype, device=target.device)
        load_paths = {name: output.load_path for name, output in golden.engine_outputs(name).items()}
        yield from with_load_paths(compare_kernels(name, weights, golden, model, target, f"{target}-plain"), load_paths)
        speed_up(model, target, "sdpa", compiled=False)
        yield from with_load_paths(compare_kernels(name, weights, golden, model, target, str(target)), load_paths)


def compare_kernels(
    name: str, weights: Weights, golden: QuantisedGolden, model: CausalLM, target: Target, backend: str
) -> Iterator[Comparison]:
    """Compare every product of a model's kernels for the golden's inputs."""
    trace, tolerances = golden.traces[name], suite_of(name, weights, golden).tolerances(CASE)
    for key, stage, layer in keys(weights.config):
        if stage.matrix:
            x = rounded_input(weights, stage, layer, trace)
            tolerance = tolerances.isolated(key)
            arithmetic = ARITHMETICS.get(target.dtype_name, FLOAT32)  # the golden is float32
            if arithmetic.is_half:
                matrix = (weights if layer is None else weights.layer(layer))[matrix_of(stage, weights.config)]
                error = product_error(x, matrix, trace[key], arithmetic)
                tolerance = Tolerance(error, WORST * error)
            stage_ref = StageRef(CHECKPOINT, stage.name, layer, CASE)
            expectation = Expectation(stage_ref, "isolated", ENGINE, trace[key], tolerance, stage=stage)
            yield judge(expectation, multiply(kernel_at(model, stage, layer), x, target), model=name, backend=backend)


def rounded_input(weights: Weights, stage: Stage, layer: int | None, trace: Mapping[str, np.ndarray]) -> np.ndarray:
    """Round the golden's input of a product as ggml rounds it for the type of the matrix."""
    name = matrix_of(stage, weights.config)
    kind = weights.as_stored(name if layer is None else f"layers.{layer}.{name}").ggml
    return round_activations(trace[input_keys(stage, layer, weights.config)[0]], ACTIVATION_TYPE[kind])


def kernel_at(model: CausalLM, stage: Stage, layer: int | None) -> nn.Module:
    """Return the module of a stage that is a matrix product."""
    if layer is None:
        return model.lm_head
    return model.get_submodule(path_of(f"layers.{layer}.{stage.matrix}").removesuffix(".weight"))


def multiply(module: nn.Module, x: np.ndarray, target: Target) -> np.ndarray:
    """Compute the kernel's output for some rows, as float32; assert the target's device and dtype."""
    with torch.inference_mode():
        y = module(torch.from_numpy(x).to(target.device, target.dtype))
    assert (y.device.type, y.dtype) == (target.device.type, target.dtype)
    return y.float().cpu().numpy()


def compare_own_kernels(target: Target) -> Iterator[Comparison]:
    """Check every kernel again; its error is a share of the tolerance, and the note compares its time with torch's."""
    kinds = [*kernels_for(target.device, target.dtype, required=True)]
    for kind, verdict in (verdicts(target, kinds, anew=True) if kinds else {}).items():
        fault, note = verdict.fault(timed=False), f"{verdict.slow:.2f} times the time of torch's kernel"
        yield Comparison(
            "kernels", StageRef("14", kind, case="tried"), "isolated", "torch", str(target),
            Difference(verdict.off, verdict.off), Tolerance(1.0, 1.0), FAIL if fault else PASS, note=fault or note,
        )  # fmt: skip
