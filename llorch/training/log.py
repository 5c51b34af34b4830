"""Log of a run: a JSON line per step (bit-identical in equal runs), wall times in a second file, TensorBoard events."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from llorch.files.new_file import new_file
from llorch.runtime.errors import FormatError, MissingExtra

LOG, TIMING, EVENTS = "log.jsonl", "timing.jsonl", "tensorboard"
_STYLE: Any = {
    "svg.hashsalt": "llorch",  # fixed seed of the ids in the file, which are random otherwise
    "svg.fonttype": "none",  # text stays text, independent of installed fonts
    "font.family": "sans-serif",
}


class NoLog:
    """Log of ranks other than 0, which writes nothing."""

    def step(self, record: Mapping[str, Any], *, seconds: float) -> None:
        """See `RunLog`."""

    def validation(self, record: Mapping[str, Any]) -> None:
        """See `RunLog`."""

    def synced(self) -> int:
        """See `RunLog`."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


class RunLog(NoLog):
    """Log of one run, open for writing."""

    def __init__(self, folder: Path, *, offset: int, tensorboard: bool) -> None:
        """Open the log and drop the lines after byte `offset`, from a snapshot: a resumed run writes them again.

        Offset 0 begins a new log. FormatError if the log is shorter, so that it does not belong to the snapshot.
        """
        self._log = _open_at(folder / LOG, offset)
        self._timing = (folder / TIMING).open("ab" if offset else "wb")
        self._events = _event_writer(folder / EVENTS) if tensorboard else None

    def step(self, record: Mapping[str, Any], *, seconds: float) -> None:
        """Log one optimizer step: a record with `step` and reproducible values, and the wall time in `seconds`."""
        self._line(record)
        self._timing.write(_json({"step": record["step"], "seconds": round(seconds, 6)}))
        self._timing.flush()

    def validation(self, record: Mapping[str, Any]) -> None:
        """Log a validation, with its `step` and `valid_loss`."""
        self._line(record)

    def synced(self) -> int:
        """Sync all lines to disk; return the offset after them, for a snapshot."""
        self._log.flush()
        os.fsync(self._log.fileno())
        return self._log.tell()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._log.close()
        self._timing.close()
        if self._events is not None:
            self._events.close()

    def _line(self, record: Mapping[str, Any]) -> None:
        self._log.write(_json(record))
        self._log.flush()
        if self._events is not None:
            for name in record.keys() - {"step"}:
                self._events.add_scalar(name, record[name], record["step"])


def read_log(path: Path) -> Sequence[Mapping[str, Any]]:
    """Read the records of a log in the order of the run; FormatError if a line is no JSON object with a step."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise FormatError("Malformed", f"log: line {number} is no JSON: {error}", path=path) from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise FormatError("Malformed", f"log: expected a step in line {number}, got {line[:60]}", path=path)
        records.append(record)
    return records


def _open_at(path: Path, offset: int) -> Any:
    """Open a file for writing, truncated to its first `offset` bytes; FormatError Truncated if it is shorter."""
    file = path.open("r+b" if offset else "wb")
    size = file.seek(0, os.SEEK_END)
    if size < offset:
        file.close()
        message = f"log: expected at least {offset} bytes as the snapshot recorded, got {size}"
        raise FormatError("Truncated", message, path=path)
    file.truncate(offset)
    file.seek(offset)
    return file


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def require_tensorboard() -> None:
    """Raise MissingExtra if tensorboard is not installed."""
    try:
        import tensorboard  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("tensorboard", "tensorboard") from None


def _event_writer(folder: Path) -> Any:
    require_tensorboard()
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder))


def draw_curve(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw training and validation loss over the steps of `log.jsonl`, as an SVG file."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra("train", "matplotlib") from None
    with rc_context(_STYLE):
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for name, label, style in (("loss", "training", "-"), ("valid_loss", "validation", "o-")):
            points = [(record["step"], record[name]) for record in records if name in record]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
        axes.set(title=title, xlabel="optimizer step", ylabel="loss per trained token (nats)")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        with new_file(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
