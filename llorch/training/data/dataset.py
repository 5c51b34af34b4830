"""Read a data set from files to examples, with a digest that identifies the data of a resumed run.

A run records one line per example, so that a resumed run can name the row that changed.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from llorch.files.new_file import new_file
from llorch.files.tokenizer.conversation import unnamed_ends
from llorch.model.model import OpenModel
from llorch.runtime.errors import FormatError
from llorch.training.batch import Example, Examples
from llorch.training.data.encode import Encoder
from llorch.training.data.formats import format_of, parse, unused_keys
from llorch.training.data.plan import PackedRows, best_fit
from llorch.training.data.read import find_splits, read_records
from llorch.training.settings import DataSettings

_REPORT_EVERY = 500  # rows between lines of progress


@dataclass(frozen=True)
class TrainingData:
    """Encoded data set."""

    train: Examples
    valid: Examples  # validation during training; empty without valid.jsonl
    test: Examples  # test after training; empty without test.jsonl
    settings: DataSettings  # settings of the encoding; `max_length` is at most the model's context
    digest: str  # SHA-256 of examples and settings
    notes: list[str]  # messages for the user, one per line

    def rows(self, examples: Examples) -> PackedRows:
        """Arrange the examples of one split in rows: packed, or one per row; see `plan`."""
        packed = best_fit(examples.lengths, room=self.settings.max_length) if self.settings.packing else None
        return PackedRows(examples, packed)


def read_data(
    path: str | Path, model: OpenModel, settings: DataSettings, *, progress: Callable[[str], None] = lambda line: None
) -> TrainingData:
    """Read a file of JSON lines, a .json list, or a folder with train.jsonl and optional valid.jsonl and test.jsonl.

    FormatError: a row cannot be used (named by file and line), or `settings.valid` asks to hold out rows although there
    are too few, or a valid.jsonl.
    """
    files = find_splits(Path(path))
    if settings.valid and "valid" in files:
        message = f"expected no valid={settings.valid:g}, because the data has a validation set; leave it out"
        raise FormatError("Inconsistent", message, path=files["valid"])
    notes = []
    context = model.config.max_position_embeddings
    if settings.max_length > context:
        settings = replace(settings, max_length=context)
        notes.append(f"max_length is {context}, the context of the model")
    splits = {split: Examples(_read_split(file, model, settings, notes, progress)) for split, file in files.items()}
    if settings.valid:
        splits |= _hold_out(splits["train"], settings.valid, files["train"], notes)
    train, valid, test = (splits.get(split, Examples()) for split in ("train", "valid", "test"))
    return TrainingData(train, valid, test, settings, _digest_of_data((train, valid, test), settings), notes)


def _read_split(
    file: Path, model: OpenModel, settings: DataSettings, notes: list[str], progress: Callable[[str], None]
) -> Iterator[Example]:
    """Yield the examples of a file; append its counts to `notes` at the end. FormatError if rows differ in format."""
    encoder = Encoder(model, settings)
    file_format, unused, n_rows, n_examples = "", set[str](), 0, 0
    for record in read_records(file):
        row_format = format_of(record)
        if row_format != (file_format or row_format):
            message = f"expected {file_format} like the rows before, got {row_format}; use one format in a file"
            raise FormatError("Inconsistent", message, path=record.where)
        file_format, n_rows, unused = row_format, n_rows + 1, unused | unused_keys(record, row_format)
        for example in encoder.encode(parse(record, file_format), record):
            n_examples += 1
            yield example
        if n_rows % _REPORT_EVERY == 0:
            progress(f"{file.name}: {n_rows} rows")
    if not n_examples:
        message = f"expected a row to train on, got none of {n_rows} within max_length; raise max_length"
        raise FormatError("Missing", message, path=file)
    notes += _format_notes(file.name, file_format, n_rows, n_examples, unused, encoder)


def _hold_out(train: Examples, share: float, file: Path, notes: list[str]) -> dict[str, Examples]:
    """Split examples by rows: the rows with the lowest digests, `share` of all, become the validation set.

    Equal rows stay together. Neither the order of the file nor the seed of the run changes the split.
    """
    digests = {}
    for example in train:
        digests.setdefault(example.source, hashlib.sha256()).update(json.dumps([example.ids, example.labels]).encode())
    ranked = sorted(digest.digest() for digest in digests.values())
    last = ranked[max(1, round(share * len(ranked))) - 1]
    parts: dict[str, list[Example]] = {"train": [], "valid": []}
    for example in train:
        parts["valid" if digests[example.source].digest() <= last else "train"].append(example)
    if not parts["train"]:
        message = f"expected a row to train on, got none of {len(ranked)}: valid is {share:g}; lower it"
        raise FormatError("Missing", message, path=file)
    n_held = sum(digest <= last for digest in ranked)
    notes.append(f"{file.name}: {n_held} of {len(ranked)} rows are held out for validation (valid {share:g})")
    return {split: Examples(examples) for split, examples in parts.items()}


def _format_notes(file: str, name: str, n_rows: int, n_examples: int, unused: set[str], encoder: Encoder) -> list[str]:
    ignored = f"; keys not used: {', '.join(sorted(unused))}" if unused else ""
    first = f"{file}: {n_rows} rows of {name}, {n_examples} examples{ignored}"
    return [first, *(f"{file}: {description}: {count}" for description, count in encoder.counts.items())]


def _digest_of_data(splits: tuple[Examples, ...], settings: DataSettings) -> str:
    """Hash all examples, and the settings whose effect may not show in their ids, such as packing."""
    in_ids = ("valid", "template_date", "chat_template_kwargs")  # settings that act only through the examples
    encoding = {name: value for name, value in asdict(settings).items() if name not in in_ids}
    digest = hashlib.sha256(json.dumps(encoding, sort_keys=True).encode())
    for examples in splits:
        for part in examples.content():
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


ROWS = "rows.txt"  # file in the folder of a run
_DIGITS = 16  # hexadecimal digits of a SHA-256, enough to detect a change


def write_rows(data: TrainingData, folder: Path) -> None:
    """Write a line with digest and source of each example into the folder of a run."""
    with new_file(folder / ROWS) as path, path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in _digest_lines(data))


def first_change(data: TrainingData, folder: Path) -> str:
    """Name the first example that differs from the run's record; empty if the run has no record."""
    try:
        saved = (folder / ROWS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    counts = f"{len(saved)} examples then, {len(data.train) + len(data.valid) + len(data.test)} now"
    for old_line, new_line in zip_longest(saved, _digest_lines(data)):
        if old_line is None:
            return f"{_parse_source(new_line)} is new ({counts})"
        if new_line is None:
            return f"{_parse_source(old_line)} is gone ({counts})"
        if old_line[:_DIGITS] != new_line[:_DIGITS]:
            return f"{_parse_source(new_line)} is the first example that differs ({counts})"
    return f"no example changed ({counts}), so the settings of the data differ"


def _digest_lines(data: TrainingData) -> Iterator[str]:
    for split in ("train", "valid", "test"):
        for example in getattr(data, split):
            content = np.array([example.ids, example.labels], "<i8").tobytes()
            digest = hashlib.sha256(split.encode() + content).hexdigest()[:_DIGITS]
            yield f"{digest} {split} {example.source}"


def _parse_source(line: str) -> str:
    return line.split(" ", 2)[-1]


def trained_ends(examples: Examples, model: OpenModel) -> list[int]:
    """Find the EOS tokens in the loss of examples; FormatError if the model has no vocabulary."""
    ends = model.tokenizer.eos_token_ids
    try:
        ends |= model.chats.end_ids
    except FormatError:
        pass  # without a readable chat template there are no conversations in the data
    return examples.ids_in_loss(ends)


def describe_unnamed_ends(ends: Collection[int], model: OpenModel) -> str:
    """Describe the EOS tokens at which transformers' `generate` does not stop; empty if it stops at each of them."""
    missing = unnamed_ends(ends, model.weights.path)
    if not missing:
        return ""
    texts = ", ".join(f"{model.tokenizer.decode([token_id], skip_special=False)} ({token_id})" for token_id in missing)
    message = f"transformers' generate() does not stop at {texts}"
    reason = "which the base's generation_config.json does not name; llorch lora merge writes the name"
    return f"{message}, {reason}; without a merge pass eos_token_id to generate()"
