"""Dumps of training: optimizer steps of anybody's LoRA run, as arrays under these names, any subset of them.

    input_ids, labels                (rows, tokens) of a micro-batch; a label stands at its own token, or is -100
    attention_mask, position_ids     likewise; without a mask all are tokens, positions begin again in packed rows
    logits, token_losses             (rows, tokens, vocab); (rows, tokens), row t is of the prediction of token t + 1,
                                     or without the last column, or the learned ones alone
    loss, grad_norm, lr              one number of a step
    grad.TENSOR                      gradient before clipping; clipped.TENSOR after it
    exp_avg.TENSOR  exp_avg_sq.TENSOR  param.TENSOR      moments and tensor after the step
    betas, eps, weight_decay, max_grad_norm, label_smoothing      settings of the run; torch's where nothing is said

TENSOR is PEFT's name, `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, or ours, `l0.q_proj.lora_A`.
`step3.` before a name says of which optimizer step it is, counted over the whole run (1 where nothing is said), and
`micro2.` after that of which micro-batch. A step without ids only says where the next one starts. Where there are no
arrays `input_ids`, every pass of the dump is a micro-batch of one row.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.files.tensor_names import path_alone
from llorch.lora.adapter import LORA_A, LORA_B, MAGNITUDE, Adapter
from llorch.runtime.errors import UserError
from llorch.training.batch import IGNORED, PADDING, Batch

OF_TENSORS = {  # prefix -> group of the table of training stages
    "grad": "gradient", "clipped": "clipped", "exp_avg_sq": "second_moment", "exp_avg": "first_moment",
    "param": "parameters",
}  # fmt: skip
OF_TOKENS = {"logits": "adapted_logits", "token_losses": "token_losses"}
OF_STEPS = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
OF_ROWS = ("input_ids", "labels", "attention_mask", "position_ids")
_NAME = re.compile(r"(?:step(\d{1,9})[./])?(?:micro(\d{1,9})[./])?(.+)", re.DOTALL)
_KINDS = {"lora_A": LORA_A, "lora_B": LORA_B, "lora_magnitude_vector": MAGNITUDE, "magnitude": MAGNITUDE,
          "lora_embedding_A": LORA_A, "lora_embedding_B": LORA_B}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Of the optimizer and the loss; torch's defaults."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = math.inf
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class StepArray:
    """One array of a step.

    Attributes:
        name: As the engine calls it.
        stored: The dtype it was stored in.
        array: Float64; of tokens: those of all documents in a row, logits or losses.
        rows: Which of these tokens it has, where it is of tokens.
    """

    name: str
    stored: str
    array: np.ndarray
    rows: np.ndarray | None = None


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step.

    Attributes:
        number: Counted over the whole run, from 1.
        batches: Its micro-batches; none where the step only says where the next one starts.
        shown: By group of stages and tensor, `("gradient", "layers.0.q_proj.lora_A")`.
        lr: Its learning rate.
    """

    number: int
    batches: tuple[Batch, ...]
    shown: Mapping[tuple[str, str], StepArray]
    lr: float


@dataclass(frozen=True)
class TrainingDump:
    """Optimizer steps in a row, with their settings; `said` are those that the dump gives."""

    source: str
    steps: Sequence[TrainingStep]
    settings: Settings
    said: frozenset[str]
    dtype: str = ""  # that the engine says of its activations
    notes: Sequence[str] = field(default=())

    def as_clipped(self) -> "TrainingDump":
        """Copy the dump with its gradients renamed to gradients after clipping."""
        names = {"gradient": "clipped"}
        steps = [
            replace(step, shown={(names.get(group, group), name): s for (group, name), s in step.shown.items()})
            for step in self.steps
        ]
        return replace(self, steps=steps)


def training_dump(raw: RawDump, adapter: Adapter) -> TrainingDump:
    """Read the arrays of a dump as those of training.

    ValueError for a name, a shape or a setting that fits nothing, for a step without ids between others, and where
    nothing is left to judge.
    """
    reader = _StepReader(raw, adapter)
    settings, said = _read_settings(reader.numbers)
    found = sorted({step for step, *_ in reader.arrays} | {1 if reader.passes else 0} - {0})
    steps = [reader.step(number, settings) for number in found]
    if not any(step.batches for step in steps) or not any(step.shown for step in steps):
        expected = "expected token ids and training arrays, got one of the two or neither"
        raise UserError(f"training dump: {expected} ({raw.source})")
    run = [step.number for step in steps if step.batches]
    if run != list(range(run[0], run[0] + len(run))):
        raise UserError(f"training dump: expected token ids for consecutive steps, got steps {run} ({raw.source})")
    kept = tuple(step for step in steps if step.batches or step.number == run[0] - 1)
    return TrainingDump(raw.source, kept, settings, said, raw.features.dtype, reader.notes)


class _StepReader:
    """Arrays of a dump by step, micro-batch and name."""

    def __init__(self, raw: RawDump, adapter: Adapter) -> None:
        self.source, self.adapter, self.notes = raw.source, adapter, list[str]()
        self.numbers: dict[str, RawArray] = {}
        self.arrays: dict[tuple[int, int, str], RawArray] = {}
        self.passes = () if any(_split_name(a.name, 0)[2] == "input_ids" for _, a in raw.arrays) else raw.passes
        self.tensors = _tensor_names(adapter)
        for n_pass, array in raw.arrays:
            step, micro, name = _split_name(array.name, n_pass + 1 if self.passes else 1)
            if name in {f.name for f in fields(Settings)} and name != "lr":
                self.numbers[name] = array
            else:
                self.arrays[step, micro, name if array.layer is None else f"l{array.layer}.{name}"] = array
        if (1, 1, "lr") in self.arrays:
            self.numbers["lr"] = self.arrays[1, 1, "lr"]

    def step(self, number: int, settings: Settings) -> TrainingStep:
        """Read one step with all of its micro-batches."""
        own = {(micro, name): array for (step, micro, name), array in self.arrays.items() if step == number}
        micros = sorted(
            {micro for micro, name in own if name == "input_ids"}
            | ({*range(1, len(self.passes) + 1)} if number == 1 else set())
        )
        batches = tuple(self._batch(number, micro, own) for micro in micros)
        shown: dict[tuple[str, str], StepArray] = {}
        parts: dict[str, dict[int, RawArray]] = defaultdict(dict)
        for (micro, name), array in own.items():
            if name in OF_ROWS:
                continue
            if name in OF_TOKENS:
                parts[name][micro] = array
            elif name in OF_STEPS:
                shown[OF_STEPS[name], ""] = _one(array)
            else:
                shown[self._tensor(name)] = self._read_tensor(name, array)
        for name, of_micros in parts.items():
            if sorted(of_micros) != micros:
                message = f"expected micro-batches {micros}, got {sorted(of_micros)} ({self.source})"
                raise UserError(f"training dump: {name} of step {number}: {message}")
            arrays = [of_micros[micro] for micro in micros]
            shown[OF_TOKENS[name], ""] = StepArray(arrays[0].name, arrays[0].stored, *placed(name, arrays, batches))
        lr = shown.pop(("learning_rate", ""), None)
        return TrainingStep(number, batches, shown, settings.lr if lr is None else float(lr.array))

    def _batch(self, step: int, micro: int, own: Mapping[tuple[int, str], RawArray]) -> Batch:
        given = {name: own[micro, name].read() for name in OF_ROWS if (micro, name) in own}
        rows = {name: np.atleast_2d(array).astype(np.int64) for name, array in given.items()}
        if "input_ids" not in rows:
            rows["input_ids"] = np.array([self.passes[micro - 1].ids], np.int64)
        if any(array.shape != rows["input_ids"].shape for array in rows.values()):
            shapes = ", ".join(f"{name} {array.shape}" for name, array in rows.items())
            raise UserError(f"training dump: expected arrays of one shape, got {shapes} in step {step} ({self.source})")
        batch, n_left_out = documents_of(**rows)
        if n_left_out:
            self.notes.append(f"{n_left_out} documents of step {step} have no token to learn; llorch left them out")
        return batch

    def _tensor(self, name: str) -> tuple[str, str]:
        """Group and tensor of a name."""
        kind, _, tensor = name.partition(".")
        if name.endswith(".grad"):
            kind, tensor = "grad", name.removesuffix(".grad")
        elif name.startswith("l") and tensor.partition(".")[0] in OF_TENSORS:  # the layer stands beside the name
            tensor, kind = f"{kind}.{tensor.partition('.')[2]}", tensor.partition(".")[0]
        if kind not in OF_TENSORS or _name_without_wrappers(tensor) not in self.tensors:
            raise UserError(
                f"training dump: expected one of {', '.join((*OF_ROWS, *OF_TOKENS, *OF_STEPS))}, or one of "
                f"{', '.join(OF_TENSORS)} with a point and a tensor of the adapter, got {name!r} ({self.source})"
            )
        return OF_TENSORS[kind], self.tensors[_name_without_wrappers(tensor)]

    def _read_tensor(self, name: str, array: RawArray) -> StepArray:
        """Read an array of an adapter's tensor in float64; ValueError if it has another shape than the tensor."""
        tensor = self._tensor(name)[1]
        wanted = self.adapter.flat()[tensor].shape
        if array.shape != wanted:
            raise UserError(f"training dump: {array.name}: expected {wanted}, got {array.shape} ({self.source})")
        return StepArray(array.name, array.stored, array.read().astype(np.float64))


def _split_name(name: str, micro: int) -> tuple[int, int, str]:
    """Split `step2/micro1/name` into numbers and name; the step defaults to 1, the micro-batch to `micro`."""
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1] or 1), int(found[2] or micro), found[3]


def _name_without_wrappers(name: str) -> str:
    return path_alone(name.removesuffix(".weight").replace(".default", "").replace("base_model.model.", "", 1))


def _tensor_names(adapter: Adapter) -> dict[str, str]:
    """Map every name of a tensor, without PEFT's prefixes and suffixes, to llorch's name."""
    names: dict[str, str] = {}
    for flat in adapter.flat():
        target, _, kind = flat.rpartition(".")
        short = re.sub(r"^layers\.(\d+)\.", r"l\1.", target)
        for path in (target, short, adapter.targets[target].path):
            names |= {f"{path}.{other}": flat for other, ours in _KINDS.items() if ours == kind}
    return names


def _read_settings(numbers: Mapping[str, RawArray]) -> tuple[Settings, frozenset[str]]:
    """Read the optimizer settings that the dump states, and the names of those."""
    found: dict[str, float | tuple[float, ...]] = {}
    for name, array in numbers.items():
        values = tuple(map(float, np.ravel(array.read())))
        wanted, least = (2 if name == "betas" else 1), (1e-300 if name in ("lr", "max_grad_norm") else 0.0)
        if len(values) != wanted or not all(value >= least for value in values) or (wanted == 2 and max(values) >= 1):
            expected = "2 numbers from 0 to below 1" if wanted == 2 else f"1 number {'above 0' if least else 'from 0'}"
            raise UserError(f"training dump: {name}: expected {expected}, got {values[:3]}")
        found[name] = values if wanted == 2 else values[0]
    return Settings(**found), frozenset(found)  # type: ignore[arg-type]


def _one(array: RawArray) -> StepArray:
    """Read an array of exactly one number in float64."""
    read = np.asarray(array.read(), np.float64)
    if read.size != 1:
        raise UserError(f"training dump: {array.name}: expected one number, got {array.shape}")
    return StepArray(array.name, array.stored, read.reshape(()))


def documents_of(
    input_ids: np.ndarray, labels: np.ndarray | None = None, attention_mask: np.ndarray | None = None,
    position_ids: np.ndarray | None = None,
) -> tuple[Batch, int]:  # fmt: skip
    """Split rows into documents, without those that have nothing to learn; also return how many were left out."""
    held = np.ones(input_ids.shape, bool) if attention_mask is None else attention_mask != 0
    labels = np.where(held, input_ids if labels is None else labels, IGNORED)
    starts = held & (np.cumsum(held, axis=1) == 1)
    if position_ids is not None:
        starts |= held & (position_ids == 0)
    documents = np.where(held, np.cumsum(starts, axis=1) - 1, PADDING)
    labels = np.where(starts, IGNORED, labels)
    positions, n_left_out = np.full(input_ids.shape, PADDING), 0
    for row in range(len(input_ids)):
        kept = 0
        for document in range(int(documents[row].max()) + 1):
            own = documents[row] == document
            empty = not (labels[row, own] != IGNORED).any()
            n_left_out += empty
            documents[row, own], positions[row, own] = (PADDING, PADDING) if empty else (kept, np.arange(own.sum()))
            kept += not empty
    samples = np.arange(len(input_ids))
    return Batch(np.where(documents >= 0, input_ids, 0), labels, positions, documents, samples), n_left_out


def placed(name: str, arrays: Sequence[RawArray], batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Join the arrays of all micro-batches, one row per token of the documents, and mark the rows that are known."""
    place: Callable[[RawArray, Batch], tuple[np.ndarray, np.ndarray]] = _logits_rows if name == "logits" else _losses
    rows, known = zip(*(place(array, batch) for array, batch in zip(arrays, batches, strict=True)), strict=True)
    return np.concatenate(rows), np.concatenate(known)


def _logits_rows(array: RawArray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of all tokens but padding, and a mask that is True for each of them."""
    held, read = batch.documents >= 0, array.read().astype(np.float64)
    read = read[None] if read.ndim == 2 else read
    if read.shape[:-1] != held.shape:
        raise UserError(f"training dump: {array.name}: expected rows of {held.shape} tokens, got {array.shape}")
    return read[held], np.ones(int(held.sum()), bool)


def _losses(array: RawArray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return one loss for each token that is no padding, and a mask of those that the dump states."""
    held, read = batch.documents >= 0, array.read().astype(np.float64)
    n_rows, n_tokens = held.shape
    learned = np.append(batch.labels[:, 1:], np.full((n_rows, 1), IGNORED), axis=1) != IGNORED
    losses, known = np.zeros(held.shape), np.zeros(held.shape, bool)
    if read.size == learned.sum() and read.ndim == 1:
        losses[learned], known[learned] = read, True
    elif read.size in (held.size, n_rows * (n_tokens - 1)):
        width = read.size // n_rows
        losses[:, :width], known[:, :width] = read.reshape(n_rows, width), True
    else:
        expected = f"losses for {held.shape} tokens, or for the {learned.sum()} learned tokens only"
        raise UserError(f"training dump: {array.name}: expected {expected}, got {array.shape}")
    return losses[held], known[held]
