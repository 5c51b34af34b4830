"""A data set: from files to examples, with a digest that tells whether the data of a resumed run is the same.

One line for each example of a run lets a later run name the row that changed. `trained_ends` has the tokens that the
examples end with.
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

_REPORT_EVERY = 500  # rows


@dataclass(frozen=True)
class TrainingData:
    """Encoded data."""

    train: Examples
    valid: Examples  # to look at on the way; empty without valid.jsonl
    test: Examples  # to look at in the end; empty without test.jsonl
    settings: DataSettings  # how it was encoded; `max_length` is at most the context of the model
    digest: str  # SHA-256 of examples and settings; how they came apart is in the examples
    notes: list[str]  # what the user should know, a line each

    def rows(self, examples: Examples) -> PackedRows:
        """Arrange examples of one split as rows: packed, or one in each; see `Plan` and `batches`."""
        packed = best_fit(examples.lengths, room=self.settings.max_length) if self.settings.packing else None
        return PackedRows(examples, packed)


def read_data(
    path: str | Path, model: OpenModel, settings: DataSettings, *, progress: Callable[[str], None] = lambda line: None
) -> TrainingData:
    """Read a file of JSON lines, a .json list, or a folder of train.jsonl, perhaps valid.jsonl and test.jsonl.

    FormatError: a row cannot be used (named by file and line), or rows are to be held out and there are too few, or a
    valid.jsonl already.
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
        splits |= _held_out(splits["train"], settings.valid, files["train"], notes)
    train, valid, test = (splits.get(split, Examples()) for split in ("train", "valid", "test"))
    return TrainingData(train, valid, test, settings, _digest_of_data((train, valid, test), settings), notes)


def _read_split(
    file: Path, model: OpenModel, settings: DataSettings, notes: list[str], progress: Callable[[str], None]
) -> Iterator[Example]:
    """Yield the examples of a file, whose rows must have one format; `notes` get its counts at the end."""
    encoder = Encoder(model, settings)
    name, unused, n_rows, n_examples = "", set[str](), 0, 0
    for record in read_records(file):
        found = format_of(record)
        if found != (name or found):
            message = f"expected {name} like the rows before, got {found}; use one format in a file"
            raise FormatError("Inconsistent", message, path=record.where)
        name, n_rows, unused = found, n_rows + 1, unused | unused_keys(record, found)
        for example in encoder.encode(parse(record, name), record):
            n_examples += 1
            yield example
        if n_rows % _REPORT_EVERY == 0:
            progress(f"{file.name}: {n_rows} rows")
    if not n_examples:
        message = f"expected a row to train on, got none of {n_rows} within max_length; raise max_length"
        raise FormatError("Missing", message, path=file)
    notes += _notes(file.name, name, n_rows, n_examples, unused, encoder)


def _held_out(train: Examples, share: float, file: Path, notes: list[str]) -> dict[str, Examples]:
    """Split examples by rows: the share with the lowest digests is held out.

    Equal rows stay together, and neither the order of a file nor the seed of a run changes what is held out.
    """
    digests = {}
    for one in train:
        digests.setdefault(one.source, hashlib.sha256()).update(json.dumps([one.ids, one.labels]).encode())
    ranked = sorted(digest.digest() for digest in digests.values())
    last = ranked[max(1, round(share * len(ranked))) - 1]
    parts: dict[str, list[Example]] = {"train": [], "valid": []}
    for one in train:
        parts["valid" if digests[one.source].digest() <= last else "train"].append(one)
    if not parts["train"]:
        message = f"expected a row to train on, got none of {len(ranked)}: valid is {share:g}; lower it"
        raise FormatError("Missing", message, path=file)
    n_held = sum(digest <= last for digest in ranked)
    notes.append(f"{file.name}: {n_held} of {len(ranked)} rows are held out for validation (valid {share:g})")
    return {split: Examples(examples) for split, examples in parts.items()}


def _notes(file: str, name: str, n_rows: int, n_examples: int, unused: set[str], encoder: Encoder) -> list[str]:
    ignored = f"; keys not used: {', '.join(sorted(unused))}" if unused else ""
    first = f"{file}: {n_rows} rows of {name}, {n_examples} examples{ignored}"
    return [first, *(f"{file}: {what}: {count}" for what, count in encoder.counts.items())]


def _digest_of_data(splits: tuple[Examples, ...], settings: DataSettings) -> str:
    """Hash all examples, and the settings that their ids do not show."""
    in_ids = ("valid", "template_date", "chat_template_kwargs")  # settings whose effect the examples show
    encoding = {name: value for name, value in asdict(settings).items() if name not in in_ids}
    digest = hashlib.sha256(json.dumps(encoding, sort_keys=True).encode())
    for examples in splits:
        for part in examples.content():
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


ROWS = "rows.txt"
_DIGITS = 16  # of a SHA-256 in hexadecimal: enough to notice a change


def write_rows(data: TrainingData, folder: Path) -> None:
    """Write a digest and a source for each example into the folder of a run."""
    with new_file(folder / ROWS) as path, path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in _digest_lines(data))


def first_change(data: TrainingData, folder: Path) -> str:
    """Name the first example that is not as a run recorded it; empty where the run has no such record."""
    try:
        saved = (folder / ROWS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    counts = f"{len(saved)} examples then, {len(data.train) + len(data.valid) + len(data.test)} now"
    for old, new in zip_longest(saved, _digest_lines(data)):
        if old is None:
            return f"{_source(new)} is new ({counts})"
        if new is None:
            return f"{_source(old)} is gone ({counts})"
        if old[:_DIGITS] != new[:_DIGITS]:
            return f"{_source(new)} is the first example that differs ({counts})"
    return f"no example changed ({counts}), so the settings of the data differ"


def _digest_lines(data: TrainingData) -> Iterator[str]:
    for split in ("train", "valid", "test"):
        for example in getattr(data, split):
            content = np.array([example.ids, example.labels], "<i8").tobytes()
            digest = hashlib.sha256(split.encode() + content).hexdigest()[:_DIGITS]
            yield f"{digest} {split} {example.source}"


def _source(line: str) -> str:
    return line.split(" ", 2)[-1]


def trained_ends(examples: Examples, model: OpenModel) -> list[int]:
    """Find the end tokens that examples teach; FormatError where the model has no vocabulary."""
    ends = model.tokenizer.eos_token_ids
    try:
        ends |= model.chats.end_ids
    except FormatError:
        pass  # its chat template cannot be read, so no conversation was learned
    return examples.trained_among(ends)


def say_unnamed(ends: Collection[int], model: OpenModel) -> str:
    """Say where `generate` of transformers goes on although a text ends; nothing where it stops."""
    missing = unnamed_ends(ends, model.weights.path)
    if not missing:
        return ""
    texts = ", ".join(f"{model.tokenizer.decode([one], skip_special=False)} ({one})" for one in missing)
    message = f"transformers' generate() does not stop at {texts}"
    reason = "which the base's generation_config.json does not name; llorch lora merge writes the name"
    return f"{message}, {reason}; without a merge pass eos_token_id to generate()"
