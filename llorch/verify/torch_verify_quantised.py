"""Packed matrices on the torch path against llama.cpp: decoding bit by bit, and every product of the micro models.

What llama.cpp multiplies are rounded activations. So every leaf is given the golden's input, rounded as ggml rounds it,
and its product is held to the limit that NumPy's is held to. In half precision the limit is what rounding inputs,
weights and the result costs. Both leaves are judged: the plain one, and the one that runs on the target.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from llorch.builtin import goldens_folder
from llorch.files import Weights, open_weights
from llorch.files.names import inventory
from llorch.files.quant import ACTIVATION_TYPE
from llorch.numerics import GGML
from llorch.ops.rounding import round_activations
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target
from llorch.pytorch.load import load_packed
from llorch.pytorch.model import speed_up
from llorch.pytorch.packing import PACKERS, decode, pack
from llorch.stages import Stage, input_key, matrix_of
from llorch.verify.compare import Tolerance
from llorch.verify.foundation import fingerprint
from llorch.verify.quantised import CHECKPOINT, PRODUCER, QuantisedVerifier
from llorch.verify.quantised_goldens import CASE, FOLDER, QuantisedGolden, read
from llorch.verify.quantised_models import MODELS, write_model
from llorch.verify.quantised_stored import file_row
from llorch.verify.sums import spread
from llorch.verify.verifier import WORST, Row, exact_row

PACKED_MODELS = tuple(name for name, recipe in MODELS.items() if recipe.types <= PACKERS.keys())
HALF_UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # of one rounding, on the average


def verify_quantised_torch(target: Target) -> Iterator[Row]:
    """Judge packed matrices against the stored goldens of checkpoint 13.

    Args:
        target: Device and dtype.

    Yields:
        Rows of the stages `decode.<type>`, `file`, and for every model in `PACKED_MODELS` its products, isolated.

    Raises:
        FileNotFoundError: A golden is missing.
        ValueError: A part of one is missing.
    """
    golden = read(goldens_folder() / FOLDER)
    yield from decode_rows(golden, target)
    with tempfile.TemporaryDirectory(prefix="llorch-") as folder:
        for name in PACKED_MODELS:
            path = write_model(name, Path(folder))
            yield replace(file_row(name, path, golden), backend=str(target))
            if fingerprint(path) == golden.files[name]:
                yield from product_rows(name, path, golden, target)
            path.unlink()


def decode_rows(golden: QuantisedGolden, target: Target) -> Iterator[Row]:
    """Blocks that are packed and decoded have the bits of ggml's C; only the payload of a NaN is free."""
    for kind in PACKERS:
        values = golden.blocks[f"{kind.name}.values"]
        raw = torch.from_numpy(golden.blocks[f"{kind.name}.blocks"].copy()).to(target.device)
        ours = decode(pack(raw, kind), kind).cpu().numpy().reshape(values.shape)
        wrong = (ours.view(np.uint32) != values.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(values))
        note = f"{int(wrong.sum())} of {wrong.size} values differ" if wrong.any() else ""
        stage, share = f"decode.{kind.name}", float(wrong.mean())
        yield exact_row(kind.name, CHECKPOINT, stage, PRODUCER, share, note, backend=str(target))


def product_rows(name: str, path: Path, golden: QuantisedGolden, target: Target) -> Iterator[Row]:
    """Every product of one model, by the plain leaves and by those of the target.

    Args:
        name: In `PACKED_MODELS`.
        path: Its file.
        golden: With its trace.
        target: Device and dtype.

    Yields:
        Rows of checkpoint 13.
    """
    weights = open_weights(path).using(GGML)
    with closing(weights.source):
        model = load_packed(weights, dtype=target.dtype, device=target.device)
        verifier = LeafVerifier(name, weights, {CASE: golden.case}, golden.evidence(name))
        yield from verifier.product_rows(model, target, f"{target}-plain")
        speed_up(model, target, "sdpa", compiled=False)
        yield from verifier.product_rows(model, target, str(target))


class LeafVerifier(QuantisedVerifier):
    """Judges the leaves of a torch model on golden inputs; limits are those of the NumPy products."""

    def product_rows(self, model: CausalLM, target: Target, backend: str) -> Iterator[Row]:
        """Every product by the leaves of a model.

        Args:
            model: Loaded, on the target.
            target: Its device and dtype.
            backend: Name in the rows.

        Yields:
            One row for each product.
        """
        self.backend = backend
        for case, limits in self._limits.items():
            trace = self._golden.traces[case]
            for key, stage, layer in self._keys:
                if not stage.matrix:
                    continue
                x = rounded_input(self.weights, stage, layer, trace)
                ours, allowed = multiply(leaf_of(model, stage, layer), x, target), limits.isolated[key]
                if target.dtype in HALF_UNIT:
                    allowed = self._half(x, stage, layer, trace[key], HALF_UNIT[target.dtype])
                row = self._against(trace[key], ours, stage, layer, case, "isolated", allowed)
                yield replace(row, checkpoint=CHECKPOINT)

    def _half(self, x: np.ndarray, stage: Stage, layer: int | None, golden: np.ndarray, unit: float) -> Tolerance:
        """Input and weight of each term and the result are rounded independently; 4 times the average is granted."""
        weights = self.weights if layer is None else self.weights.layer(layer)
        terms = spread(x, weights[matrix_of(stage, self.weights.config)], golden)
        error = 4 * unit * math.sqrt(2 * terms**2 + 1)
        return Tolerance(error, WORST * error)


def rounded_input(weights: Weights, stage: Stage, layer: int | None, trace: Mapping[str, np.ndarray]) -> np.ndarray:
    """The golden's input of a product, rounded as ggml does it for the type of the matrix."""
    name = matrix_of(stage, weights.config)
    kind = weights.stored_type(name if layer is None else f"layers.{layer}.{name}")
    return round_activations(trace[input_key(stage.inputs[0], layer, weights.config)], ACTIVATION_TYPE[kind])


def leaf_of(model: CausalLM, stage: Stage, layer: int | None) -> nn.Module:
    """The module that makes a product."""
    if layer is None:
        return model.lm_head
    row = inventory(model.config)[f"layers.{layer}.{stage.matrix}"]
    return model.get_submodule(row.huggingface.removesuffix(".weight"))


def multiply(leaf: nn.Module, x: np.ndarray, target: Target) -> np.ndarray:
    """What a leaf makes of some rows, as float32; it must have run where it was asked to."""
    with torch.inference_mode():
        y = leaf(torch.from_numpy(x).to(target.device, target.dtype))
    assert (y.device.type, y.dtype) == (target.device.type, target.dtype)
    return y.float().cpu().numpy()
