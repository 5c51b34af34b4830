"""Dumps of training: optimizer steps of any LoRA trainer, as arrays with any subset of these names.

    input_ids, labels                (rows, tokens) of a micro-batch; a label is not shifted, -100 if masked
    attention_mask, position_ids     (rows, tokens); no mask: no padding; positions restart in packed rows
    document_ids or cu_seqlens       documents of packed rows, if positions do not restart: (rows, tokens), a document
                                     starts where the number changes; or (documents + 1,), first tokens and total
    logits, token_losses             (rows, tokens, vocab); (rows, tokens), column t predicts token t + 1; losses may
                                     lack the last column, or have only the tokens in the loss
    loss, grad_norm, lr              one number of a step
    grad.TENSOR                      gradient before clipping; clipped.TENSOR after it
    exp_avg.TENSOR  exp_avg_sq.TENSOR  param.TENSOR      moments and tensor after the step
    betas, eps, weight_decay, max_grad_norm, label_smoothing      settings of the run; default: torch's

TENSOR is PEFT's name, `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, or llorch's,
`l0.q_proj.lora_A`. The prefix `step3.` is the number of the optimizer step in the whole run (default 1). `micro2.`
after it is the number of the micro-batch. A step without ids only defines the start of the next step. If there are no
arrays named `input_ids`, every pass of the dump is a micro-batch of one row.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.files.tensor_names import to_text_only
from llorch.lora.adapter import LORA_A, LORA_B, MAGNITUDE, Adapter
from llorch.runtime.errors import UserError
from llorch.training.batch import IGNORED, PADDING, Batch

OF_TENSORS = {  # prefix in the dump -> name in the table of training stages, a group of one array per tensor
    "grad": "gradient", "clipped": "clipped", "exp_avg_sq": "second_moment", "exp_avg": "first_moment",
    "param": "parameters",
}  # fmt: skip
OF_TOKENS = {"logits": "adapted_logits", "token_losses": "token_losses"}
OF_STEPS = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
OF_ROWS = ("input_ids", "labels", "attention_mask", "position_ids", "document_ids", "cu_seqlens")
_NAME = re.compile(r"(?:step(\d{1,9})[./])?(?:micro(\d{1,9})[./])?(.+)", re.DOTALL)
# Suffix of a name in PEFT or llorch -> kind of adapter tensor.
_KINDS = {"lora_A": LORA_A, "lora_B": LORA_B, "lora_magnitude_vector": MAGNITUDE, "magnitude": MAGNITUDE,
          "lora_embedding_A": LORA_A, "lora_embedding_B": LORA_B}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the optimizer and the loss; the defaults are torch's."""

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
        name: Name in the dump.
        stored: Dtype in the dump.
        array: Float64 array; logits and losses have one row per token, all micro-batches concatenated, no padding.
        rows: Mask of the rows that the dump has, for logits and losses.
    """

    name: str
    stored: str
    array: np.ndarray
    rows: np.ndarray | None = None


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step.

    Attributes:
        number: Number in the whole run, from 1.
        batches: Micro-batches; empty if the dump has no ids of the step, only the start values of the next step.
        shown: Dumped arrays by group and tensor, like `("gradient", "layers.0.q_proj.lora_A")`; else `("loss", "")`.
        lr: Learning rate.
    """

    number: int
    batches: tuple[Batch, ...]
    shown: Mapping[tuple[str, str], StepArray]
    lr: float


@dataclass(frozen=True)
class TrainingDump:
    """Consecutive optimizer steps with their settings; `declared` names the settings that the dump declares."""

    source: str
    steps: Sequence[TrainingStep]
    settings: Settings
    declared: frozenset[str]
    last_position: int  # largest position that the trainer may have used
    dtype: str = ""  # declared dtype of the activations
    notes: Sequence[str] = field(default=())

    def as_clipped(self) -> "TrainingDump":
        """Copy the dump with its gradients renamed to gradients after clipping."""
        names = {"gradient": "clipped"}
        steps = [
            replace(step, shown={(names.get(group, group), name): array for (group, name), array in step.shown.items()})
            for step in self.steps
        ]
        return replace(self, steps=steps)


def training_dump(raw: RawDump, adapter: Adapter) -> TrainingDump:
    """Read the arrays of a training dump; drop steps without ids, except the one before the first step with ids.

    Raise UserError for an unknown name, a wrong shape or setting, a gap in the steps with ids, or if ids or training
    arrays are missing.
    """
    reader = _StepReader(raw, adapter)
    settings, declared = _read_settings(reader.numbers)
    step_numbers = sorted({step for step, *_ in reader.arrays} | {1 if reader.passes else 0} - {0})
    steps = [reader.step(number, settings) for number in step_numbers]
    if not any(step.batches for step in steps) or not any(step.shown for step in steps):
        expected = "expected token ids and training arrays, got one of the two or neither"
        raise UserError(f"training dump: {expected} ({raw.source})")
    with_ids = [step.number for step in steps if step.batches]
    if with_ids != list(range(with_ids[0], with_ids[0] + len(with_ids))):
        raise UserError(f"training dump: expected token ids for consecutive steps, got steps {with_ids} ({raw.source})")
    relevant_steps = tuple(step for step in steps if step.batches or step.number == with_ids[0] - 1)
    last_position, dtype = reader.last_position, raw.features.dtype
    return TrainingDump(raw.source, relevant_steps, settings, declared, last_position, dtype, reader.notes)


class _StepReader:
    """Reader of the arrays of a dump by step, micro-batch and name; without `input_ids`, `passes` are micro-batches."""

    def __init__(self, raw: RawDump, adapter: Adapter) -> None:
        self.source, self.adapter, self.notes, self.last_position = raw.source, adapter, list[str](), 0
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
        """Read one step with all micro-batches."""
        step_arrays = {(micro, name): array for (step, micro, name), array in self.arrays.items() if step == number}
        micros = sorted(
            {micro for micro, name in step_arrays if name == "input_ids"}
            | ({*range(1, len(self.passes) + 1)} if number == 1 else set())
        )
        batches = tuple(self._read_batch(number, micro, step_arrays) for micro in micros)
        shown: dict[tuple[str, str], StepArray] = {}
        parts: dict[str, dict[int, RawArray]] = defaultdict(dict)
        for (micro, name), array in step_arrays.items():
            if name in OF_ROWS:
                continue
            if name in OF_TOKENS:
                parts[name][micro] = array
            elif name in OF_STEPS:
                shown[OF_STEPS[name], ""] = _read_number(array)
            else:
                shown[self._parse_tensor(name)] = self._read_tensor(name, array)
        for name, by_micro in parts.items():
            if sorted(by_micro) != micros:
                message = f"expected micro-batches {micros}, got {sorted(by_micro)} ({self.source})"
                raise UserError(f"training dump: {name} of step {number}: {message}")
            arrays = [by_micro[micro] for micro in micros]
            shown[OF_TOKENS[name], ""] = StepArray(arrays[0].name, arrays[0].stored, *join_rows(name, arrays, batches))
        lr = shown.pop(("learning_rate", ""), None)
        return TrainingStep(number, batches, shown, settings.lr if lr is None else float(lr.array))

    def _read_batch(self, step: int, micro: int, step_arrays: Mapping[tuple[int, str], RawArray]) -> Batch:
        raw_rows = {name: step_arrays[micro, name].read() for name in OF_ROWS if (micro, name) in step_arrays}
        rows = {name: np.atleast_2d(array).astype(np.int64) for name, array in raw_rows.items()}
        if "input_ids" not in rows:
            rows["input_ids"] = np.array([self.passes[micro - 1].ids], np.int64)
        if "cu_seqlens" in rows:
            rows["document_ids"] = self._number_documents(rows.pop("cu_seqlens")[0], rows["input_ids"].shape)
        if any(array.shape != rows["input_ids"].shape for array in rows.values()):
            shapes = ", ".join(f"{name} {array.shape}" for name, array in rows.items())
            raise UserError(f"training dump: expected arrays of one shape, got {shapes} in step {step} ({self.source})")
        batch, n_left_out = split_documents(**rows)
        last_position = int(batch.positions.max())
        if "document_ids" in rows:  # positions may run on through the row
            last_position = int(rows["position_ids"].max()) if "position_ids" in rows else batch.ids.shape[1] - 1
        self.last_position = max(self.last_position, last_position)
        if n_left_out:
            self.notes.append(f"{n_left_out} documents of step {step} have no token to learn; llorch left them out")
        return batch

    def _number_documents(self, starts: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the document of every token of rows of `shape`, from the first token of each, and the total."""
        lengths, total = np.diff(starts), math.prod(shape)
        if starts[0] != 0 or starts[-1] != total or (lengths < 0).any():
            expected = f"numbers that rise from 0 to {total}, the number of tokens"
            raise UserError(f"training dump: cu_seqlens: expected {expected}, got {starts.tolist()} ({self.source})")
        return np.repeat(np.arange(len(lengths)), lengths).reshape(shape)

    def _parse_tensor(self, name: str) -> tuple[str, str]:
        """Return the group of stages and the tensor of a name."""
        kind, _, tensor = name.partition(".")
        if name.endswith(".grad"):
            kind, tensor = "grad", name.removesuffix(".grad")
        elif name.startswith("l") and tensor.partition(".")[0] in OF_TENSORS:  # `l0.grad.q_proj...`, see __init__
            tensor, kind = f"{kind}.{tensor.partition('.')[2]}", tensor.partition(".")[0]
        if kind not in OF_TENSORS or _name_without_wrappers(tensor) not in self.tensors:
            raise UserError(
                f"training dump: expected one of {', '.join((*OF_ROWS, *OF_TOKENS, *OF_STEPS))}, or one of "
                f"{', '.join(OF_TENSORS)} with a point and a tensor of the adapter, got {name!r} ({self.source})"
            )
        return OF_TENSORS[kind], self.tensors[_name_without_wrappers(tensor)]

    def _read_tensor(self, name: str, array: RawArray) -> StepArray:
        """Read the array of an adapter tensor in float64; raise UserError if it has another shape than the tensor."""
        tensor = self._parse_tensor(name)[1]
        expected = self.adapter.flat()[tensor].shape
        if array.shape != expected:
            raise UserError(f"training dump: {array.name}: expected {expected}, got {array.shape} ({self.source})")
        return StepArray(array.name, array.stored, array.read().astype(np.float64))


def _split_name(name: str, micro: int) -> tuple[int, int, str]:
    """Split `step2/micro1/name` into numbers and name; the step defaults to 1 and the micro-batch to `micro`."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1] or 1), int(match[2] or micro), match[3]


def _name_without_wrappers(name: str) -> str:
    return to_text_only(name.removesuffix(".weight").replace(".default", "").replace("base_model.model.", "", 1))


def _tensor_names(adapter: Adapter) -> dict[str, str]:
    """Map every possible tensor name, without PEFT's prefixes and suffixes, to llorch's name."""
    names: dict[str, str] = {}
    for flat in adapter.flat():
        target, _, kind = flat.rpartition(".")
        short = re.sub(r"^layers\.(\d+)\.", r"l\1.", target)
        for path in (target, short, adapter.targets[target].path):
            names |= {f"{path}.{suffix}": flat for suffix, kind_of_name in _KINDS.items() if kind_of_name == kind}
    return names


def _read_settings(numbers: Mapping[str, RawArray]) -> tuple[Settings, frozenset[str]]:
    """Read the settings that the dump declares, and return their names, too."""
    settings: dict[str, float | tuple[float, ...]] = {}
    for name, array in numbers.items():
        floats = tuple(map(float, np.ravel(array.read())))
        # 1e-300 excludes 0 only: with it, nothing would be trained.
        size, low = (2 if name == "betas" else 1), (1e-300 if name in ("lr", "max_grad_norm") else 0.0)
        if len(floats) != size or not all(x >= low for x in floats) or (size == 2 and max(floats) >= 1):
            expected = "2 numbers from 0 to below 1" if size == 2 else f"1 number {'above 0' if low else 'from 0'}"
            raise UserError(f"training dump: {name}: expected {expected}, got {floats[:3]}")
        settings[name] = floats if size == 2 else floats[0]
    return Settings(**settings), frozenset(settings)  # type: ignore[arg-type]


def _read_number(array: RawArray) -> StepArray:
    """Read an array of exactly one number as float64."""
    read = np.asarray(array.read(), np.float64)
    if read.size != 1:
        raise UserError(f"training dump: {array.name}: expected one number, got {array.shape}")
    return StepArray(array.name, array.stored, read.reshape(()))


def split_documents(
    input_ids: np.ndarray, labels: np.ndarray | None = None, attention_mask: np.ndarray | None = None,
    position_ids: np.ndarray | None = None, document_ids: np.ndarray | None = None,
) -> tuple[Batch, int]:  # fmt: skip
    """Build a batch of documents, and mask the label of their first token.

    A document starts where `document_ids` change, or, without them, where positions restart at 0. Drop documents
    without a token in the loss; return the number of dropped ones, too.
    """
    is_token = np.ones(input_ids.shape, bool) if attention_mask is None else attention_mask != 0
    labels = np.where(is_token, input_ids if labels is None else labels, IGNORED)
    starts = is_token & (np.cumsum(is_token, axis=1) == 1)
    if document_ids is not None:
        starts[:, 1:] |= is_token[:, 1:] & (np.diff(document_ids) != 0)
    elif position_ids is not None:
        starts |= is_token & (position_ids == 0)
    documents = np.where(is_token, np.cumsum(starts, axis=1) - 1, PADDING)
    labels = np.where(starts, IGNORED, labels)
    positions, n_left_out = np.full(input_ids.shape, PADDING), 0
    for row in range(len(input_ids)):
        number = 0
        for document in range(int(documents[row].max()) + 1):
            mask = documents[row] == document
            empty = not (labels[row, mask] != IGNORED).any()
            n_left_out += empty
            documents[row, mask], positions[row, mask] = (
                (PADDING, PADDING) if empty else (number, np.arange(mask.sum()))
            )
            number += not empty
    samples = np.arange(len(input_ids))
    return Batch(np.where(documents >= 0, input_ids, 0), labels, positions, documents, samples), n_left_out


def join_rows(name: str, arrays: Sequence[RawArray], batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the arrays of all micro-batches, one row per token, and return a mask of the dumped tokens."""
    read: Callable[[RawArray, Batch], tuple[np.ndarray, np.ndarray]] = _logits_rows if name == "logits" else _loss_rows
    rows, masks = zip(*(read(array, batch) for array, batch in zip(arrays, batches, strict=True)), strict=True)
    return np.concatenate(rows), np.concatenate(masks)


def _logits_rows(array: RawArray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of all tokens without padding, and a mask that is True for each token."""
    is_token, logits = batch.documents >= 0, array.read().astype(np.float64)
    logits = logits[None] if logits.ndim == 2 else logits
    if logits.shape[:-1] != is_token.shape:
        raise UserError(f"training dump: {array.name}: expected rows of {is_token.shape} tokens, got {array.shape}")
    return logits[is_token], np.ones(int(is_token.sum()), bool)


def _loss_rows(array: RawArray, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return one loss per token without padding, 0 if the dump lacks it, and a mask of the losses that it has."""
    is_token, dumped = batch.documents >= 0, array.read().astype(np.float64)
    n_rows, n_tokens = is_token.shape
    in_loss = np.append(batch.labels[:, 1:], np.full((n_rows, 1), IGNORED), axis=1) != IGNORED
    losses, is_dumped = np.zeros(is_token.shape), np.zeros(is_token.shape, bool)
    if dumped.size == in_loss.sum() and dumped.ndim == 1:
        losses[in_loss], is_dumped[in_loss] = dumped, True
    elif dumped.size in (is_token.size, n_rows * (n_tokens - 1)):
        width = dumped.size // n_rows
        losses[:, :width], is_dumped[:, :width] = dumped.reshape(n_rows, width), True
    else:
        expected = f"losses for {is_token.shape} tokens, or for the {in_loss.sum()} learned tokens only"
        raise UserError(f"training dump: {array.name}: expected {expected}, got {array.shape}")
    return losses[is_token], is_dumped[is_token]
