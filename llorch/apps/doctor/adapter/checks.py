"""The checks of an adapter: what other programs make of it, whether its numbers do what trained ones do, its run.

Other programs: some compute wrongly what PEFT computes rightly. The record of a llorch run tells of its data: whether
the model learned to stop, and whether the data changed.

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
from llorch.training.data.dataset import first_change, say_unnamed, trained_ends
from llorch.training.merge_files import LARGEST_COMPARED
from llorch.training.settings import say_dropout
from llorch.training.settings_file import settings_from

_SAFE = "llorch lora export BASE ADAPTER NEW --vllm-safe"
_MERGE = "llorch lora merge BASE ADAPTER NEW"


def rslora_scale(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about rank-stabilised scales, which some servers ignore."""
    if not adapter.config.use_rslora:
        return HealthCheck("programs", "rsLoRA scale", "ok", "alpha / r, which every engine implements")
    times = math.sqrt(max(adapter.config.rank_of(target) for target in adapter.targets.values()))
    text = f"SGLang, TensorRT-LLM and llama.cpp's converter ignore use_rslora: there it is {times:.3g} times"
    return HealthCheck("programs", "rsLoRA scale", "warning", f"{text} too weak, without an error", _SAFE)


def patterns(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about ranks and alphas of single matrices, which only PEFT reads."""
    config = adapter.config
    names = [name for name in ("alpha_pattern", "rank_pattern") if getattr(config, name)]
    if not names:
        return HealthCheck("programs", "patterns", "ok", "all matrices have one rank and one alpha")
    text = f"vLLM ignores {' and '.join(names)}: it uses alpha / r = {config.lora_alpha / config.r:g} for all matrices"
    return HealthCheck("programs", "patterns", "warning", text, _SAFE)


def dora(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about magnitude vectors, which only PEFT supports."""
    if not adapter.config.use_dora:
        return HealthCheck("programs", "DoRA", "ok", "no magnitude vectors")
    return HealthCheck("programs", "DoRA", "warning", "vLLM and llama.cpp refuse it", _MERGE)


def embedding_and_output(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about adapters of the embedding or the output of a tied model: they act on one side only."""
    outer = [name for name in ("embed_tokens", "lm_head") if name in adapter.targets]
    if not outer:
        return HealthCheck("programs", "embedding and output", "ok", "the adapter changes neither")
    names = " and ".join(outer)
    if not weights.config.tie_word_embeddings:
        return HealthCheck("programs", "embedding and output", "warning", f"{names}: newer vLLM refuses them", _MERGE)
    text = f"{names}, tied in the base model: llama.cpp refuses the adapter or crashes, PEFT's merge changes both"
    return HealthCheck("programs", "embedding and output", "warning", text, _MERGE)


def base_dropout(adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about a dropout of the base, which PEFT trains with and llorch does not."""
    if told := say_dropout(weights):
        text = f"{told}; training elsewhere gives another adapter"
        return HealthCheck("programs", "base dropout", "warning", text)
    return HealthCheck("programs", "base dropout", "ok", "the base asks for none")


READER_CHECKS = (rslora_scale, patterns, dora, embedding_and_output, base_dropout)


_LARGE, _MOST = 1.0, 0.5  # of the base's norm; of the elements that the adapter moves


def trained(path: Path, adapter: Adapter, weights: Weights) -> HealthCheck:
    """Check that each product B A is not exactly 0: such a product was never trained."""
    zero = [name for name in adapter.tensors if _length(name, adapter) == 0]
    if adapter.config.use_dora:
        zero = [name for name in zero if _magnitude_is_that_of_the_base(name, adapter, weights)]
    if not zero:
        return HealthCheck("numbers", "trained", "ok", "no product B A is 0")
    if len(zero) == len(adapter.tensors):
        text = "every product B A is exactly 0: the adapter has no effect; did checkpointing cut the gradient?"
        return HealthCheck("numbers", "trained", "broken", text)
    text = f"{len(zero)} of {len(adapter.tensors)} products B A are 0, so they were not trained; first: {zero[0]}"
    return HealthCheck("numbers", "trained", "warning", text)


def size_of_change(path: Path, adapter: Adapter, weights: Weights) -> HealthCheck:
    """Compare each change with its base matrix: a change of the same norm is more often a wrong scale or base."""
    relative = {}
    for name, target in adapter.targets.items():
        base = math.hypot(*(float(np.linalg.norm(weights.read(part.name))) for part in target.parts))
        relative[name] = abs(adapter.scaling(name)) * _length(name, adapter) / base
    name, largest = max(relative.items(), key=lambda item: item[1])
    text = f"the largest is {largest:.2%} of the base's norm, in {name}"
    if largest <= _LARGE:
        return HealthCheck("numbers", "size of the change", "ok", text)
    return HealthCheck("numbers", "size of the change", "warning", f"{text}; check the scale and the base")


def merged_bfloat16(path: Path, adapter: Adapter, weights: Weights) -> HealthCheck:
    """Count the changes that a merge into bfloat16 loses: a small change of a weight rounds to no change."""
    vanished = {}
    for name in parts_of(adapter):
        before = weights.read(name if name in weights else "embed_tokens")
        exact = merged_matrix(before, adapter, name, where=path)
        moved = exact != before
        unseen = np.count_nonzero(moved & (_encoded_and_decoded(exact, path) == _encoded_and_decoded(before, path)))
        vanished[name] = unseen / max(1, np.count_nonzero(moved))
    name, worst = max(vanished.items(), key=lambda item: item[1])
    text = f"a merge into bfloat16 loses up to {worst:.1%} of a matrix's changes, in {name}"
    if worst <= _MOST:
        return HealthCheck("numbers", "merged bfloat16", "ok", text)
    return HealthCheck("numbers", "merged bfloat16", "warning", f"{text}; merge into F32, or do not merge")


def stored_dtype(path: Path, adapter: Adapter, weights: Weights) -> HealthCheck:
    """Warn about half precision, which changes an adapter by some thousandths."""
    narrow = [kind for kind in stored_types(path) if kind not in ("F32", "F64")]
    if not narrow:
        return HealthCheck("numbers", "stored dtype", "ok", "float32")
    text = f"tensors are stored as {', '.join(narrow)}: rounding changes logits by about 0.1 %"
    return HealthCheck("numbers", "stored dtype", "warning", f"{text}; llorch lora train writes float32")


def _length(name: str, adapter: Adapter) -> float:
    """Compute the Frobenius norm of B A, of all experts together."""
    lora = adapter.tensors[name]
    lora_A, lora_B = adapter.targets[name].by_expert(lora.lora_A, lora.lora_B)
    each = zip(lora_A, lora_B, strict=True) if lora_A.ndim == 3 else [(lora_A, lora_B)]
    return math.hypot(*(product_norm(*pair) for pair in each))


def _encoded_and_decoded(array: np.ndarray, path: Path) -> np.ndarray:
    """Round an array to bfloat16 as a GGUF file stores it."""
    kind = GGMLType.BF16
    return decode(np.concatenate([*encode(array, kind, name="merged", path=path)]), kind, array.shape)


def _magnitude_is_that_of_the_base(name: str, adapter: Adapter, weights: Weights) -> bool:
    magnitude = adapter.tensors[name].magnitude
    target = adapter.targets[name]
    lengths = np.linalg.norm(base_matrix(weights, target), axis=0 if target.is_embedding else 1)
    return magnitude is not None and bool(np.allclose(magnitude, lengths, rtol=1e-5))


NUMBER_CHECKS = (trained, size_of_change, merged_bfloat16, stored_dtype)


_RUN, _LIMIT = "run.json", 1 << 20


def check_run(adapter: Path, weights: Weights, *, generating: bool = False) -> list[HealthCheck]:
    """Look at the data that an adapter was trained on, if it lies in the folder of its run; it may answer a row."""
    record = adapter / _RUN
    if not record.is_file():
        return [HealthCheck("run", "end token", "absent", "the adapter is not in the folder of a llorch run")]
    try:
        values = read_json(record, limit=_LIMIT)
        data = _data(values, weights)
    except (FormatError, FileNotFoundError, ValueError) as error:
        return [HealthCheck("run", "end token", "absent", f"the data of the run cannot be read: {error}")]
    answered = [stops(data, adapter, weights)] if generating else []
    return [_end_token(data, OpenModel(weights)), *answered, _unchanged(data, values, adapter)]


def _data(values: dict, weights: Weights) -> TrainingData:
    """Read the training data again with the settings that the run recorded."""
    settings = settings_from((_RUN, values.get("settings", {})))
    config = weights.config
    settings = settings.with_defaults(hidden_size=config.hidden_size, context=config.max_position_embeddings)
    return read_data(find_data(settings.data), OpenModel(weights), settings.data_settings)


def _end_token(data: TrainingData, model: OpenModel) -> HealthCheck:
    """Check that some example trains a token that ends a text."""
    try:
        ends = trained_ends(data.train, model)
    except FormatError as error:
        return HealthCheck("run", "end token", "absent", f"the tokens that end a text are unknown: {error}")
    n_ending = sum(any(label in ends for label in example.labels) for example in data.train)
    text = f"{n_ending} of {len(data.train)} examples train a token that ends a text"
    if unnamed := say_unnamed(ends, model):
        return HealthCheck("run", "end token", "warning", f"{text}; {unnamed}")
    if n_ending:
        return HealthCheck("run", "end token", "ok", text)
    text = f"{text}: no example teaches to stop (is padding = end token masked?)"
    return HealthCheck("run", "end token", "broken", text)


def _unchanged(data: TrainingData, values: dict, run: Path) -> HealthCheck:
    """Check that the training data has the digest that the run recorded."""
    identity = values.get("identity")
    recorded = identity.get("data") if isinstance(identity, dict) else None
    if recorded == data.digest:
        return HealthCheck("run", "training data", "ok", "unchanged since the run began")
    row = first_change(data, run)
    text = f"changed since the run began{': ' * bool(row)}{row}; lines about the data may be wrong"
    return HealthCheck("run", "training data", "warning", text)


_ROWS, _MORE = 50, 64  # looked at; tokens beyond twice the answer of the row


def stops(data: TrainingData, adapter: Path, weights: Weights) -> HealthCheck:
    """Generate from the shortest of the first rows that end."""
    n_weights = sum(int(np.prod(weights.shape(name))) for name in weights)
    if n_weights > LARGEST_COMPARED:
        return HealthCheck("run", "stops", "absent", f"{n_weights / 1e6:.0f} M weights: takes long")
    try:
        model = Model(weights)
        ends = trained_ends(data.train, model)
        model.add_adapter("examined", adapter, any_base=True)
    except FormatError as error:
        return HealthCheck("run", "stops", "absent", str(error))
    rows = [row for row in islice(data.train, _ROWS) if any(label in ends for label in row.labels)]
    if not rows:
        text = f"none of the first {_ROWS} examples trains a token that ends a text"
        return HealthCheck("run", "stops", "absent", text)
    return _answer(min(rows, key=lambda row: len(row.ids)), ends, model)


def _answer(row: Example, ends: Collection[int], model: Model) -> HealthCheck:
    """Check that the model ends its answer to a training example within about twice the length of the example's."""
    first = max(1, next(place for place, label in enumerate(row.labels) if label != IGNORED))
    n_most = 2 * (len(row.ids) - first) + _MORE
    tokens = model.generate(row.ids[:first], max_tokens=n_most, ignore_eos=True, adapter="examined")
    n_tokens = 0
    for n_tokens, token in enumerate(tokens, start=1):
        if token.id in ends:
            unnamed = say_unnamed([token.id], model)
            text = f"the answer to {row.source} ends after {n_tokens} tokens{'; ' * bool(unnamed)}{unnamed}"
            return HealthCheck("run", "stops", "warning" if unnamed else "ok", text)
    text = f"the answer to {row.source} does not end within {n_tokens} tokens (in the data: {len(row.ids) - first})"
    return HealthCheck("run", "stops", "warning", f"{text}; train longer", "llorch data show  # do the rows end?")
