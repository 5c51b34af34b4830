"""Checks of an adapter: its use by other programs, its numbers, and its training run.

Some programs compute an adapter wrongly that PEFT computes correctly. The record of a llorch run shows if the data
taught the model to stop, and if the data has changed.

Source: vllm/lora/peft_helper.py; sglang issue 40835, vllm issues 9280 and 55193, llama.cpp issues 9065 and 11554, peft
issue 2018; runs against llama.cpp in tests/lora/test_gguf_format.py. peft issues 1142 and 1388, open-unlearning 178
(untrained B), peft 2502, torchtune 1101 (merged bf16). unsloth issue 416, trl issues 1623 and 734 (end token masked or
never appended: the model never stops).
"""

import math
from collections.abc import Collection
from itertools import islice
from pathlib import Path

import numpy as np

from llorch.apps.doctor.health import HealthCheck
from llorch.files import Weights
from llorch.files.quant import GGMLType, decode, encode
from llorch.files.strict_json import read_json
from llorch.lora.adapter import Adapter
from llorch.lora.initial import base_matrix
from llorch.lora.merge import merged_matrix, parts_of
from llorch.lora.summary import product_norm, stored_types
from llorch.model.model import Model, OpenModel
from llorch.runtime.builtin import find_data
from llorch.runtime.errors import FormatError
from llorch.training.batch import IGNORED, Example
from llorch.training.data import TrainingData, read_data
from llorch.training.data.dataset import describe_unnamed_ends, first_change, trained_ends
from llorch.training.merge_files import LARGEST_COMPARED
from llorch.training.settings import describe_base_dropout
from llorch.training.settings_file import settings_from

_SAFE = "llorch lora export BASE ADAPTER NEW --vllm-safe"
_MERGE = "llorch lora merge BASE ADAPTER NEW"


def rslora_scale(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about rank-stabilised scalings, which some servers ignore."""
    if not adapter.config.use_rslora:
        return HealthCheck("programs", "rsLoRA scale", "ok", "alpha / r, which every engine implements")
    factor = math.sqrt(max(adapter.config.rank_of(target) for target in adapter.targets.values()))
    text = f"SGLang, TensorRT-LLM and llama.cpp's converter ignore use_rslora: there it is {factor:.3g} times"
    return HealthCheck("programs", "rsLoRA scale", "warning", f"{text} too weak, without an error", _SAFE)


def patterns(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about ranks and alphas of single matrices, which only PEFT supports."""
    config = adapter.config
    names = [name for name in ("alpha_pattern", "rank_pattern") if getattr(config, name)]
    if not names:
        return HealthCheck("programs", "patterns", "ok", "all matrices have one rank and one alpha")
    text = f"vLLM ignores {' and '.join(names)}: it uses alpha / r = {config.lora_alpha / config.r:g} for all matrices"
    return HealthCheck("programs", "patterns", "warning", text, _SAFE)


def dora(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about DoRA's magnitude vectors, which only PEFT supports."""
    if not adapter.config.use_dora:
        return HealthCheck("programs", "DoRA", "ok", "no magnitude vectors")
    return HealthCheck("programs", "DoRA", "warning", "vLLM and llama.cpp refuse it", _MERGE)


def embedding_and_output(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about adapters of the embedding or the output; with tied embeddings they change only one of them."""
    affected = [name for name in ("embed_tokens", "lm_head") if name in adapter.targets]
    if not affected:
        return HealthCheck("programs", "embedding and output", "ok", "the adapter changes neither")
    names = " and ".join(affected)
    if not weights.config.tie_word_embeddings:
        return HealthCheck("programs", "embedding and output", "warning", f"{names}: newer vLLM refuses them", _MERGE)
    text = f"{names}, tied in the base model: llama.cpp refuses the adapter or crashes, PEFT's merge changes both"
    return HealthCheck("programs", "embedding and output", "warning", text, _MERGE)


def base_dropout(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about dropout in the base's config, which PEFT applies in training and llorch does not."""
    if dropout := describe_base_dropout(weights):
        text = f"{dropout}; training elsewhere gives another adapter"
        return HealthCheck("programs", "base dropout", "warning", text)
    return HealthCheck("programs", "base dropout", "ok", "the base asks for none")


READER_CHECKS = (rslora_scale, patterns, dora, embedding_and_output, base_dropout)


_MAX_CHANGE, _MAX_LOST = 1.0, 0.5  # above: a warning; shares of the base's norm, and of the changed elements


def trained(path: Path, adapter: Adapter, weights: Weights) -> HealthCheck:
    """Check that no product B A is exactly 0: B starts at 0, so such a product was never trained."""
    zero = [name for name in adapter.tensors if _product_norm(name, adapter) == 0]
    if adapter.config.use_dora:
        zero = [name for name in zero if _has_initial_magnitude(name, adapter, weights)]
    if not zero:
        return HealthCheck("numbers", "trained", "ok", "no product B A is 0")
    if len(zero) == len(adapter.tensors):
        text = "every product B A is exactly 0: the adapter has no effect; did checkpointing cut the gradient?"
        return HealthCheck("numbers", "trained", "broken", text)
    text = f"{len(zero)} of {len(adapter.tensors)} products B A are 0, so they were not trained; first: {zero[0]}"
    return HealthCheck("numbers", "trained", "warning", text)


def size_of_change(path: Path, adapter: Adapter, weights: Weights) -> HealthCheck:
    """Compare the norms of each change and its base matrix: if they are equal, mostly the scaling or base is wrong."""
    relative = {}
    for name, target in adapter.targets.items():
        base = math.hypot(*(float(np.linalg.norm(weights.read(part.name))) for part in target.parts))
        relative[name] = abs(adapter.scaling(name)) * _product_norm(name, adapter) / base
    name, largest = max(relative.items(), key=lambda pair: pair[1])
    text = f"the largest is {largest:.2%} of the base's norm, in {name}"
    if largest <= _MAX_CHANGE:
        return HealthCheck("numbers", "size of the change", "ok", text)
    return HealthCheck("numbers", "size of the change", "warning", f"{text}; check the scale and the base")


def merged_bfloat16(path: Path, adapter: Adapter, weights: Weights) -> HealthCheck:
    """Compute the share of changed weights whose change a merge into bfloat16 rounds away, for the worst matrix."""
    lost_shares = {}
    for name in parts_of(adapter):
        base = weights.read(name if name in weights else "embed_tokens")
        merged = merged_matrix(base, adapter, name, where=path)
        is_changed = merged != base
        n_lost = np.count_nonzero(is_changed & (_round_to_bfloat16(merged, path) == _round_to_bfloat16(base, path)))
        lost_shares[name] = n_lost / max(1, np.count_nonzero(is_changed))
    name, worst = max(lost_shares.items(), key=lambda pair: pair[1])
    text = f"a merge into bfloat16 loses up to {worst:.1%} of a matrix's changes, in {name}"
    if worst <= _MAX_LOST:
        return HealthCheck("numbers", "merged bfloat16", "ok", text)
    return HealthCheck("numbers", "merged bfloat16", "warning", f"{text}; merge into F32, or do not merge")


def stored_dtype(path: Path, adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about an adapter stored in half precision, which changes logits by about 0.1 %."""
    half_types = [dtype for dtype in stored_types(path) if dtype not in ("F32", "F64")]
    if not half_types:
        return HealthCheck("numbers", "stored dtype", "ok", "float32")
    text = f"tensors are stored as {', '.join(half_types)}: rounding changes logits by about 0.1 %"
    return HealthCheck("numbers", "stored dtype", "warning", f"{text}; llorch lora train writes float32")


def _product_norm(name: str, adapter: Adapter) -> float:
    """Compute the Frobenius norm of B A, over all experts."""
    lora = adapter.tensors[name]
    lora_A, lora_B = adapter.targets[name].by_expert(lora.lora_A, lora.lora_B)
    pairs = zip(lora_A, lora_B, strict=True) if lora_A.ndim == 3 else [(lora_A, lora_B)]
    return math.hypot(*(product_norm(*pair) for pair in pairs))


def _round_to_bfloat16(array: np.ndarray, path: Path) -> np.ndarray:
    """Round an array to bfloat16 as a GGUF file stores it."""
    bfloat16 = GGMLType.BF16
    return decode(np.concatenate([*encode(array, bfloat16, name="merged", path=path)]), bfloat16, array.shape)


def _has_initial_magnitude(name: str, adapter: Adapter, weights: Weights) -> bool:
    magnitude = adapter.tensors[name].magnitude
    target = adapter.targets[name]
    lengths = np.linalg.norm(base_matrix(weights, target), axis=0 if target.is_embedding else 1)
    return magnitude is not None and bool(np.allclose(magnitude, lengths, rtol=1e-5))


NUMBER_CHECKS = (trained, size_of_change, merged_bfloat16, stored_dtype)


_RUN_FILE, _MAX_RUN_BYTES = "run.json", 1 << 20  # record of the training run


def check_run(adapter: Path, weights: Weights, *, generating: bool = False) -> list[HealthCheck]:
    """Check the training data of an adapter that is in the folder of its run; with `generating`, also its answer."""
    run_file = adapter / _RUN_FILE
    if not run_file.is_file():
        return [HealthCheck("run", "end token", "absent", "the adapter is not in the folder of a llorch run")]
    try:
        values = read_json(run_file, limit=_MAX_RUN_BYTES)
        data = _read_run_data(values, weights)
    except (FormatError, FileNotFoundError, ValueError) as error:
        return [HealthCheck("run", "end token", "absent", f"the data of the run cannot be read: {error}")]
    answer_checks = [stops(data, adapter, weights)] if generating else []
    return [_check_end_token(data, OpenModel(weights)), *answer_checks, _check_unchanged(data, values, adapter)]


def _read_run_data(values: dict, weights: Weights) -> TrainingData:
    """Read the training data again with the settings that the run recorded."""
    settings = settings_from((_RUN_FILE, values.get("settings", {})))
    config = weights.config
    settings = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
    return read_data(find_data(settings.data), OpenModel(weights), settings.data_settings)


def _check_end_token(data: TrainingData, model: OpenModel) -> HealthCheck:
    """Check that some example has a token in the loss that ends a text."""
    try:
        ends = trained_ends(data.train, model)
    except FormatError as error:
        return HealthCheck("run", "end token", "absent", f"the tokens that end a text are unknown: {error}")
    n_ending = sum(any(label in ends for label in example.labels) for example in data.train)
    text = f"{n_ending} of {len(data.train)} examples train a token that ends a text"
    if unnamed := describe_unnamed_ends(ends, model):
        return HealthCheck("run", "end token", "warning", f"{text}; {unnamed}")
    if n_ending:
        return HealthCheck("run", "end token", "ok", text)
    text = f"{text}: no example teaches to stop (is padding = end token masked?)"
    return HealthCheck("run", "end token", "broken", text)


def _check_unchanged(data: TrainingData, values: dict, run: Path) -> HealthCheck:
    """Check that the training data has the digest that the run recorded."""
    identity = values.get("identity")
    recorded = identity.get("data") if isinstance(identity, dict) else None
    if recorded == data.digest:
        return HealthCheck("run", "training data", "ok", "unchanged since the run began")
    row = first_change(data, run)
    text = f"changed since the run began{': ' * bool(row)}{row}; lines about the data may be wrong"
    return HealthCheck("run", "training data", "warning", text)


_N_EXAMPLES, _N_EXTRA_TOKENS = 50, 64  # examples searched; tokens generated besides twice the example's answer


def stops(data: TrainingData, adapter: Path, weights: Weights) -> HealthCheck:
    """Check that the model ends its answer to the shortest of the first examples with an end token."""
    n_weights = sum(int(np.prod(weights.shape(name))) for name in weights)
    if n_weights > LARGEST_COMPARED:
        return HealthCheck("run", "stops", "absent", f"{n_weights / 1e6:.0f} M weights: takes long")
    try:
        model = Model(weights)
        ends = trained_ends(data.train, model)
        model.add_adapter("examined", adapter, any_base=True)
    except FormatError as error:
        return HealthCheck("run", "stops", "absent", str(error))
    rows = [row for row in islice(data.train, _N_EXAMPLES) if any(label in ends for label in row.labels)]
    if not rows:
        text = f"none of the first {_N_EXAMPLES} examples trains a token that ends a text"
        return HealthCheck("run", "stops", "absent", text)
    return _check_answer(min(rows, key=lambda row: len(row.ids)), ends, model)


def _check_answer(row: Example, ends: Collection[int], model: Model) -> HealthCheck:
    """Check that the model ends its answer to an example within about twice the length of the example's answer."""
    first = max(1, next(index for index, label in enumerate(row.labels) if label != IGNORED))
    max_tokens = 2 * (len(row.ids) - first) + _N_EXTRA_TOKENS
    tokens = model.generate(row.ids[:first], max_tokens=max_tokens, ignore_eos=True, adapter="examined")
    n_tokens = 0
    for n_tokens, token in enumerate(tokens, start=1):
        if token.id in ends:
            unnamed = describe_unnamed_ends([token.id], model)
            text = f"the answer to {row.source} ends after {n_tokens} tokens{'; ' * bool(unnamed)}{unnamed}"
            return HealthCheck("run", "stops", "warning" if unnamed else "ok", text)
    text = f"the answer to {row.source} does not end within {n_tokens} tokens (in the data: {len(row.ids) - first})"
    return HealthCheck("run", "stops", "warning", f"{text}; train longer", "llorch data show  # do the rows end?")
