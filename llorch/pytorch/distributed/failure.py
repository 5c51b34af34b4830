"""Failure of a mesh: all ranks (processes) end with the message and the exit code of the rank that failed first.

A rank that fails writes both to the launcher's key-value store, and ends. The other ranks, whose communication then
fails, read them there. Without a message, a rank was lost: the remaining ranks report that they are alive, and the rank
without a report is the lost one. On every machine one rank tells the user.

Source: torch.distributed.Store, which outlives the ranks.
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from llorch.runtime.errors import RankFailed, RankLost
from llorch.runtime.launched_rank import local_ranks, restore_stderr

GRACE = timedelta(seconds=5)  # time for a failed rank's message and the reports of living ranks
_COMMUNICATION_WORDS = ("gloo", "Connection", "Timed out", "timed out", "NCCL", "recv", "Socket")
_LATE_WORDS = ("Timed out", "timed out", "Timeout", "timeout")


class Ending:
    """Messages that the ranks of one launch exchange about the reason of their end."""

    def __init__(self, store: Any, *, rank: int, n_ranks: int, timeout: timedelta) -> None:
        """Join as one of the ranks; `timeout` is the time that it waits for communication."""
        self._store, self._rank, self._n_ranks = store, rank, n_ranks
        self._seconds = f"{timeout.total_seconds():g} s"

    def of(self, error: BaseException, code: int, line: str) -> BaseException:
        """Return the exception with which this rank ends, from its own error, exit code and message line."""
        try:
            message = self._first_message(error, code, line)
            alive = self._alive_ranks() if message is None else {}
        except (dist.DistError, RuntimeError):  # the store is gone, and with it the process that held it
            if self._rank == local_ranks(self._n_ranks)[0]:
                restore_stderr()
            peers = "the other ranks and the machine that started them"
            return RankFailed(f"{self._loss(error)} {peers}: {_message_of(error)}", None)
        # one rank of each machine tells the user: its first, or its first living one if a rank was lost
        if self._rank == min(set(local_ranks(self._n_ranks)) & (alive.keys() or {*range(self._n_ranks)})):
            restore_stderr()
        if message is None:
            return self._lost(error, alive)
        if message["rank"] == self._rank or message["line"] == line:
            return error
        return RankFailed(f"rank {message['rank']}: {message['line']}", message["code"])

    def _first_message(self, error: BaseException, code: int, line: str) -> Mapping[str, Any] | None:
        """Write or read the message of the rank that failed first, perhaps this rank; None if there is none."""
        if isinstance(error, KeyboardInterrupt):  # also sent by a launcher that has lost a rank
            return self._read() or {"rank": self._rank}
        return self._wait_for_message(error) if is_communication_error(error) else self._write(code, line)

    def _write(self, code: int, line: str) -> Mapping[str, Any]:
        """Write a message unless another rank was first; return the stored message."""
        message = json.dumps({"rank": self._rank, "code": code, "line": line})
        return json.loads(self._store.compare_set("first", "", message))

    def _read(self) -> Mapping[str, Any] | None:
        """Return the stored message; None if there is none."""
        return json.loads(self._store.get("first")) if self._store.check(["first"]) else None

    def _wait_for_message(self, error: BaseException) -> Mapping[str, Any] | None:
        """Report this rank as alive, then wait up to `GRACE` for the message of another rank; None if none comes."""
        self._store.set(f"here {self._rank}", "late" if _is_late(error) else "")
        end = time.monotonic() + GRACE.total_seconds()
        while (message := self._read()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return message

    def _alive_ranks(self) -> Mapping[int, bool]:
        """Map each rank that reported to True if its communication timed out."""
        names = {rank: f"here {rank}" for rank in range(self._n_ranks)}
        return {rank: self._store.get(name) == b"late" for rank, name in names.items() if self._store.check([name])}

    def _lost(self, error: BaseException, alive: Mapping[int, bool]) -> RankFailed:
        """Return the error for ranks that left no message: their process ended, or it hangs; `alive`: see above."""
        missing = [rank for rank in range(self._n_ranks) if rank not in alive]
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self._n_ranks}"
        if not missing:
            return RankFailed(f"{self._loss(error)} another rank, but all ranks still run: {_message_of(error)}", None)
        if any(alive.values()):
            return RankFailed(f"{ranks} did not answer for {self._seconds}; its process or its machine may hang", None)
        return RankLost(f"lost {ranks}, whose process ended: {_message_of(error)}", None)

    def _loss(self, error: BaseException) -> str:
        """Return the first words of a message: a timeout, or a lost connection."""
        return f"no answer for {self._seconds} from" if _is_late(error) else "lost"


def is_communication_error(error: BaseException) -> bool:
    """Tell if communication with another rank failed, by the words in torch's message."""
    if isinstance(error, (RankFailed, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _COMMUNICATION_WORDS)


def _is_late(error: BaseException) -> bool:
    return any(word in str(error) for word in _LATE_WORDS)


def _message_of(error: BaseException) -> str:
    """Return the message of an error of torch, without its position in torch's sources."""
    text = " ".join(str(error).split()).partition(". ")[0]
    return text.rpartition(".cc:")[2].partition("] ")[2][:120] or text[:120]
