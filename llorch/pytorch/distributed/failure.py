"""The end of the ranks of a mesh: all end with the line and the exit code of the rank that failed first.

A rank that fails leaves both in the store of the launcher, and ends. The others, whose messages then do not arrive,
find them there. If there is nothing, a rank was lost: the remaining ranks say that they are there, and a rank that does
not say so is the lost one. On every machine one rank tells the user.

Source: torch.distributed.Store, which outlives the ranks.
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from llorch.runtime.errors import RankFailed, RankLost
from llorch.runtime.launched_rank import ranks_here, speak

GRACE = timedelta(seconds=5)  # in which a rank that failed has left its line, and one that is there has said so
_OF_MESSAGES = ("gloo", "Connection", "Timed out", "timed out", "NCCL", "recv", "Socket")
_LATE = ("Timed out", "timed out", "Timeout", "timeout")


class Ending:
    """The messages that the ranks of one start leave about the reason why they end."""

    def __init__(self, store: Any, *, rank: int, n_ranks: int, timeout: timedelta) -> None:
        """Join as one of the ranks; `timeout` is how long it waits for a message."""
        self._store, self._rank, self._n_ranks = store, rank, n_ranks
        self._seconds = f"{timeout.total_seconds():g} s"

    def of(self, error: BaseException, code: int, line: str) -> BaseException:
        """Return the exception with which this rank ends, given its own with the exit code and the line of that one."""
        try:
            said = self._why(error, code, line)
            here = self._here() if said is None else {}
        except (dist.DistError, RuntimeError):  # the store is gone
            if self._rank == ranks_here(self._n_ranks)[0]:
                speak()
            who = "the other ranks and the machine that started them"
            return RankFailed(f"{self._tried(error)} {who}: {_message_of(error)}", None)
        if self._rank == min(set(ranks_here(self._n_ranks)) & (here.keys() or {*range(self._n_ranks)})):
            speak()
        if said is None:
            return self._lost(error, here)
        if said["rank"] == self._rank or said["line"] == line:
            return error
        return RankFailed(f"rank {said['rank']}: {said['line']}", said["code"])

    def _why(self, error: BaseException, code: int, line: str) -> Mapping[str, Any] | None:
        """Return the message of the first rank that failed, which may be this rank; None where there is no message."""
        if isinstance(error, KeyboardInterrupt):  # also of a launcher that has lost a rank
            return self._read() or {"rank": self._rank}
        return self._awaited(error) if is_of_messages(error) else self._left(code, line)

    def _left(self, code: int, line: str) -> Mapping[str, Any]:
        """Leave a line, unless somebody was faster; the one that stands there."""
        mine = json.dumps({"rank": self._rank, "code": code, "line": line})
        return json.loads(self._store.compare_set("first", "", mine))

    def _read(self) -> Mapping[str, Any] | None:
        """Read the message that another rank has left; None where there is none."""
        return json.loads(self._store.get("first")) if self._store.check(["first"]) else None

    def _awaited(self, error: BaseException) -> Mapping[str, Any] | None:
        """Wait for the message of another rank; meanwhile the other ranks learn that this rank is there."""
        self._store.set(f"here {self._rank}", "late" if _is_late(error) else "")
        end = time.monotonic() + GRACE.total_seconds()
        while (said := self._read()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return said

    def _here(self) -> Mapping[int, bool]:
        """Map each rank that reported to True if it waited in vain."""
        names = {rank: f"here {rank}" for rank in range(self._n_ranks)}
        return {rank: self._store.get(name) == b"late" for rank, name in names.items() if self._store.check([name])}

    def _lost(self, error: BaseException, here: Mapping[int, bool]) -> RankFailed:
        """Return the error for ranks that left no message: their process ended, or it hangs."""
        missing = [rank for rank in range(self._n_ranks) if rank not in here]
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self._n_ranks}"
        if not missing:
            return RankFailed(f"{self._tried(error)} another rank, but all ranks still run: {_message_of(error)}", None)
        if any(here.values()):
            return RankFailed(f"{who} did not answer for {self._seconds}; its process or its machine may hang", None)
        return RankLost(f"lost {who}, whose process ended: {_message_of(error)}", None)

    def _tried(self, error: BaseException) -> str:
        """Name the kind of loss, a timeout or a broken connection, as the beginning of a message."""
        return f"no answer for {self._seconds} from" if _is_late(error) else "lost"


def is_of_messages(error: BaseException) -> bool:
    """Return whether a message was not sent or did not arrive, or another rank failed instead of sending it."""
    if isinstance(error, (RankFailed, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_MESSAGES)


def _is_late(error: BaseException) -> bool:
    return any(word in str(error) for word in _LATE)


def _message_of(error: BaseException) -> str:
    """Return the message of an error of torch, without the place in torch's sources."""
    text = " ".join(str(error).split()).partition(". ")[0]
    return text.rpartition(".cc:")[2].partition("] ")[2][:120] or text[:120]
