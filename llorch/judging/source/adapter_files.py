"""Adapter files, compared with the adapter that they were made from.

Both formats are stated here a second time, independent of llorch's reader and writer:

    PEFT      `base_model.model.<module>.lora_A.weight` (r, in) and `.lora_B.weight` (out, r); `.lora_embedding_A`
              (r, vocab) and `.lora_embedding_B` (hidden, r); `.lora_magnitude_vector`. Experts: lora_A (experts * r,
              in), lora_B (out, r * experts). s = alpha / r, with rsLoRA alpha / sqrt(r)
    GGUF      `<tensor>.lora_a` (r, in) and `.lora_b` (out, r), experts in front; of the embedding (vocab, r) and
              (hidden, r). s = adapter.lora.alpha / r; without alpha s = 1

Source: peft/tuners/lora/layer.py (`ParamWrapper`), peft/utils/other.py (`get_pattern_key`), peft/tuners/tuners_utils.py
(`_inject_parameters`); llama.cpp src/llama-adapter.cpp (`get_scale`), src/llama-graph.cpp (`build_lora_mm`,
`build_inp_embd`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files.gguf import GGUFFile
from llorch.files.safetensors import SafetensorsFile
from llorch.files.strict_json import read_json
from llorch.judging.compare import compare_exact
from llorch.judging.source.forms import Form, folder_forms, gguf_forms
from llorch.judging.types import Comparison
from llorch.lora.adapter import Adapter
from llorch.runtime.fields import Fields
from llorch.stages.comparison import Difference
from llorch.stages.stage_ref import StageRef

_PRODUCT_ERROR = 1e-5  # of a row of s B A, relative to the norms of its factors: a writer may round s B to float32
_PEFT_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?P<kind>lora_[AB]\.weight|lora_embedding_[AB]|lora_magnitude_vector)"
)
_PARAMETERS = ("weight", "down_proj", "gate_up_proj")  # of routers and experts, no nn.Linear: in target_parameters
_CONFIG_LIMIT = 1 << 20  # bytes of adapter_config.json
_TINY = float(np.finfo(np.float64).tiny)


Factors = tuple[np.ndarray, np.ndarray]  # s B (experts, rows, r) and A (experts, r, columns), float64


@dataclass(frozen=True, eq=False)
class _Product:
    """Product s B A that an adapter adds to a tensor, as stored factors; a matrix is a stack of one expert."""

    left: np.ndarray  # factor with the rows of the tensor, (experts, rows, r)
    right: np.ndarray  # factor with the columns of the tensor, (experts, r, columns)
    scaling: float
    magnitude: np.ndarray | None = None  # of DoRA
    form: Form | None = None  # form of the weight that the tensor stores

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the tensor."""
        return (*self.left.shape[:2], self.right.shape[2])

    @property
    def is_zero(self) -> bool:
        """True if the adapter changes nothing."""
        return self.magnitude is None and not (self.left.any() and self.right.any())

    def factors(self) -> Factors:
        """Compute the factors of the product that is added to the weight."""
        left, right, form = self.left, self.right, self.form
        if form is not None and form.is_transposed:
            left, right = right.swapaxes(1, 2), left.swapaxes(1, 2)
        if form is not None and form.rows is not None:
            left = left.reshape(-1, left.shape[2])[form.rows].reshape(len(left), -1, left.shape[2])
        if form is not None and form.columns is not None:
            right = right[..., form.columns]
        return self.scaling * left.astype(np.float64), right.astype(np.float64)


Products = dict[str, _Product]  # by tensor, or by canonical weight
Faults = dict[str, str]  # tensor or module -> reason why the engine does not add its product to a weight


def compare_adapter_file(path: Path, adapter: Adapter, config: ModelConfig) -> list[Comparison]:
    """Compare s B A of each matrix of an adapter file, a LoRA GGUF file or a PEFT directory, with the source adapter.

    Stacks of experts, embedding and DoRA magnitudes are compared too. FormatError if the file cannot be read.
    """
    products, faults = _read_peft(path, config) if path.is_dir() else _read_gguf(path)
    actual, additional = _find_weights(products, config, is_gguf=not path.is_dir())
    expected, not_compared = _find_weights(_products_of(adapter), config, is_gguf=False)
    names = dict.fromkeys([*expected, *actual])
    comparisons = [_compare(name, actual.get(name), expected.get(name), str(path)) for name in names]
    notes = not_compared | faults | additional
    return comparisons + [_to_comparison(name, 1.0, note, str(path)) for name, note in notes.items()]


def _products_of(adapter: Adapter) -> Products:
    """Compute the products of an adapter, by the tensor of a folder that each is added to."""
    products = Products()
    for name, target in adapter.targets.items():
        lora, n_experts = adapter.tensors[name], max(1, target.n_experts)
        product = _make_product(lora.lora_A, lora.lora_B, adapter.scaling(name), n_experts, target.is_embedding)
        tensor = target.path if target.is_parameter else f"{target.path}.weight"
        products[tensor] = replace(product, magnitude=lora.magnitude)
    return products


def _make_product(
    lora_A: np.ndarray, lora_B: np.ndarray, scaling: float, n_experts: int, is_embedding: bool
) -> _Product:
    """Make a product from arrays in the layout of PEFT."""
    left = lora_B.reshape(len(lora_B), -1, n_experts).transpose(2, 0, 1)
    right = lora_A.reshape(n_experts, -1, lora_A.shape[1])
    left, right = (right.swapaxes(1, 2), left.swapaxes(1, 2)) if is_embedding else (left, right)
    return _Product(left, right, scaling)


def _find_weights(products: Products, config: ModelConfig, *, is_gguf: bool) -> tuple[Products, Faults]:
    """Return the products by canonical weight, and the tensors of no weight."""
    shapes = {tensor: product.shape for tensor, product in products.items()}
    forms = (gguf_forms if is_gguf else folder_forms)(shapes, config)
    by_weight, used = Products(), set[str]()
    for weight, form in forms.items():
        tensor, *other_experts = form.tensors
        if not other_experts and shapes[tensor] == form.shape:
            by_weight[weight] = replace(products[tensor], form=form)
            used.add(tensor)
    note = "no weight of this model has this name and shape"
    return by_weight, {tensor: f"{note} {shape}" for tensor, shape in shapes.items() if tensor not in used}


def _read_gguf(path: Path) -> tuple[Products, Faults]:
    """Read the product of each pair of a LoRA GGUF file."""
    with GGUFFile(path) as file:
        alpha = Fields(file.metadata, path).number("adapter.lora.alpha", default=0.0)
        arrays = {name: file.array(name) for name in file.tensors}
    products, faults = Products(), Faults()
    for tensor in dict.fromkeys(re.sub(r"\.lora_[ab]$", "", name) for name in arrays):
        lora_a, lora_b = (arrays.get(f"{tensor}.lora_{half}") for half in "ab")
        if lora_a is None or lora_b is None or lora_a.ndim != lora_b.ndim or lora_a.ndim not in (2, 3):
            faults[tensor] = "expected the matrices lora_a and lora_b"
            continue
        scaling = alpha / lora_b.shape[-1] if alpha else 1.0
        left, right = (lora_a, lora_b.T) if tensor == "token_embd.weight" else (lora_b, lora_a)
        if left.shape[-1] != right.shape[-2]:
            faults[tensor] = f"expected factors of one rank, got lora_a {lora_a.shape} and lora_b {lora_b.shape}"
            continue
        left, right = (array.reshape(-1, *array.shape[-2:]) for array in (left, right))
        products[tensor] = _Product(left, right, scaling)
    return products, faults


def _read_peft(folder: Path, config: ModelConfig) -> tuple[Products, Faults]:
    """Read the product of each module and parameter of a PEFT directory, by the tensor that it is added to."""
    settings: dict[str, Any] = read_json(folder / "adapter_config.json", limit=_CONFIG_LIMIT)
    modules: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    products, faults = Products(), Faults()
    with SafetensorsFile(folder / "adapter_model.safetensors") as file:
        for name in file.tensors:
            if match := _PEFT_TENSOR.fullmatch(name):
                modules[match["module"]][match["kind"]] = file.array(name)
            else:
                faults[name] = "expected a tensor of a LoRA adapter"
    for module, arrays in modules.items():
        path = _selected_path(module, settings)
        product = _read_module(module, path, arrays, settings, config)
        if isinstance(product, str):
            faults[module] = product
        else:
            products[f"{path}.weight" if path == module else path] = product
    return products, faults


def _read_module(
    module: str, path: str, arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any], config: ModelConfig
) -> _Product | str:
    """Compute the product of a module from its arrays by kind, or return the reason why PEFT does not add it."""
    if not path:
        return "PEFT does not load it: target_modules and target_parameters do not select it"
    is_embedding = module.endswith("embed_tokens")
    kinds = ["lora_embedding_A", "lora_embedding_B"] if is_embedding else ["lora_A.weight", "lora_B.weight"]
    kinds += ["lora_magnitude_vector"] if settings.get("use_dora") else []
    if arrays.keys() != set(kinds):
        return f"expected {', '.join(kinds)}, got {', '.join(sorted(arrays))}"
    lora_A, lora_B = (arrays[kind] for kind in kinds[:2])
    rank = _value_for(settings.get("rank_pattern"), path, settings["r"])
    alpha = _value_for(settings.get("alpha_pattern"), path, settings["lora_alpha"])
    is_stack = config.experts is not None and module.removesuffix(".base_layer").endswith(".experts")
    n_experts = config.experts.n_experts if config.experts is not None and is_stack else 1
    if not len(lora_A) == lora_B.shape[1] == rank * n_experts:
        return f"expected rank {rank}, as in adapter_config.json, got A {lora_A.shape} and B {lora_B.shape}"
    scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    product = _make_product(lora_A, lora_B, scaling, n_experts, is_embedding)
    return replace(product, magnitude=arrays.get("lora_magnitude_vector"))


def _selected_path(module: str, settings: Mapping[str, Any]) -> str:
    """Return the path of a module, or of its parameter, that the settings select; empty if they select neither.

    If a module has two adapted parameters, PEFT nests the first of them, gate_up_proj.
    """
    owner, nesting, _ = module.partition(".base_layer")
    paths = [f"{owner}.{parameter}" for parameter in (("gate_up_proj",) if nesting else _PARAMETERS)]
    for path in paths:
        if any(f".{path}".endswith(f".{name}") for name in settings.get("target_parameters") or ()):
            return path
    names = settings["target_modules"]
    if isinstance(names, str):
        return module if re.fullmatch(names, module) else ""
    return module if any(f".{module}".endswith(f".{name}") for name in names) else ""


def _value_for(patterns: Mapping[str, float] | None, path: str, default: float) -> float:
    """Return the value of the first pattern that matches the last names of a path."""
    items = (patterns or {}).items()
    return next((value for pattern, value in items if re.fullmatch(rf"(.*\.)?({pattern})", path)), default)


def _compare(name: str, actual: _Product | None, expected: _Product | None, model: str) -> Comparison:
    """Compare the products that the file and the source add to a weight; a missing zero changes nothing."""
    if actual is None:
        return _to_comparison(name, float(expected is not None and not expected.is_zero), "missing in the file", model)
    if expected is None:
        return _to_comparison(name, float(not actual.is_zero), "additional: the source has none", model)
    if not np.array_equal(actual.magnitude, expected.magnitude):  # pyright: ignore[reportArgumentType]
        return _to_comparison(name, 1.0, "the DoRA magnitudes differ: the rows get other norms", model)
    left, right = factors = expected.factors()
    actual_rows, expected_rows = _rows_in_one_basis(actual.factors(), factors)
    errors = np.linalg.norm(actual_rows - expected_rows, axis=2)
    scales = np.linalg.norm(left, axis=2) * np.linalg.norm(right, axis=(1, 2))[:, None]
    is_right = errors <= _PRODUCT_ERROR * scales  # False for NaN
    note = "" if is_right.all() else _describe(actual_rows, expected_rows, int((~is_right).sum()))
    share = float((~is_right).mean())
    error = float(np.linalg.norm(errors)) / max(float(np.linalg.norm(expected_rows)), _TINY)
    return replace(_to_comparison(name, share, note, model), difference=Difference(error, share))


def _rows_in_one_basis(first: Factors, second: Factors) -> Factors:
    """Compute the rows of two products as coordinates in an orthonormal basis, (experts, rows, at most both ranks).

    With A^T = Q T, the rows of s B A = (s B T^T) Q^T have the coordinates s B T^T. Norms and differences stay, and the
    whole product, which may be larger than the memory, is never computed.
    """
    (first_left, first_right), (second_left, second_right) = first, second
    rights = np.concatenate([first_right, second_right], axis=1)
    basis = np.asarray(np.linalg.qr(rights.swapaxes(1, 2), mode="r")).swapaxes(1, 2)
    rank = first_right.shape[1]
    return first_left @ basis[:, :rank], second_left @ basis[:, rank:]


def _describe(actual: np.ndarray, expected: np.ndarray, n_wrong: int) -> str:
    """Describe a wrong product, and its factor if it is a multiple of the expected product."""
    norms = [float(np.linalg.norm(rows)) for rows in (expected, actual)]
    factor = float(np.vdot(expected, actual)) / max(norms[0] ** 2, _TINY)
    note = f"s B A: expected norm {norms[0]:.4g}, got {norms[1]:.4g}; {n_wrong} of {actual[..., 0].size} rows differ"
    is_multiple = np.linalg.norm(actual - factor * expected) <= _PRODUCT_ERROR * norms[1]
    return f"{note}: the product is {factor:.4g} times that of the source" if is_multiple else note


def _to_comparison(name: str, share: float, note: str, model: str) -> Comparison:
    ref = StageRef("00", "weights", part=name)
    return compare_exact(ref, "source", share, note, model=model, backend="file")
