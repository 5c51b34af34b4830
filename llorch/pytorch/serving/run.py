"""One job in a batch: what is read and made of it, and what it holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llorch.model.generate import Job
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.serving.choosing import Choosing
from llorch.pytorch.serving.paged_cache import SequenceRow
from llorch.pytorch.serving.pages import PAGE, Lease, next_key


@dataclass
class ServedJob:
    """A job on its way."""

    job: Job
    module: CausalLM  # that of its adapter, as it was when the job joined
    choosing: Choosing
    keys: list[bytes]  # of its prefixes of so many whole pages, none to begin with
    ids: list[int] = field(default_factory=list)  # of prompt and answer
    lease: Lease = field(default_factory=Lease)
    state: int = -1  # the row of its states
    n_done: int = 0  # tokens that the cache has
    n_cached: int = 0
    failed: bool = False

    def __post_init__(self) -> None:
        """Begin with the prompt."""
        self.extend(self.job.ids)

    @property
    def is_reading(self) -> bool:
        """True if there is more of the prompt to read."""
        return not self.failed and self.n_done < len(self.job.ids)

    @property
    def goes_on(self) -> bool:
        """True if the last token of the job is to be fed."""
        return not (self.failed or self.is_reading) and len(self.ids) < len(self.job.ids) + self.job.max_tokens

    @property
    def row(self) -> SequenceRow:
        """The places of the job's tokens."""
        return SequenceRow(self.lease.pages, self.state, self.n_done)

    @property
    def sharable(self) -> list[bytes]:
        """Keys of pages that others may have computed: one token of the prompt at least is to be read."""
        return self.keys[1 : (len(self.job.ids) - 1) // PAGE + 1]

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens, and the keys of pages that they fill."""
        self.ids.extend(ids)
        for start in range((len(self.keys) - 1) * PAGE, len(self.ids) - PAGE + 1, PAGE):
            self.keys.append(next_key(self.keys[-1], self.ids[start : start + PAGE]))

    def skip(self) -> None:
        """Pass over tokens that the cache has already."""
        self.n_cached += len(self.lease.pages) * PAGE - self.n_done
        self.n_done = len(self.lease.pages) * PAGE
