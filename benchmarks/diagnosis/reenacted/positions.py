"""Positions that restart, and tokens that differ from the prompt."""

import numpy as np

from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.reenacted.reporting import HEADS, report


@report("huggingface/transformers#43082", "chunked prefill is another text than a whole one", HEADS,
        "rope-position-restarts", model="micro-llama", plan="chunks", first_pass=1)  # fmt: skip
def chunks_begin_at_zero(port: Port) -> None:
    """Start the position ids of a later chunk at 0 again."""
    port.around("places", lambda right, n: np.arange(n) + port.start)


@report("Blaizzy/mlx-vlm#1983", "the answer repeats itself", HEADS, "rope-position-restarts", model="micro-qwen2",
        first_pass=1)  # fmt: skip
def steps_at_zero(port: Port) -> None:
    """Run every decode step at position 0."""
    port.around("places", lambda right, n: right(n) if n > 1 else np.zeros(1, int))


@report("keras-team/keras-hub#1544", "generation degrades", HEADS, "rope-position-restarts", model="story",
        first_pass=1)  # fmt: skip
def start_index_ignored(port: Port) -> None:
    """Slice the tables from their first row in every pass."""
    port.around("tables", lambda right, places: right(places - places[0]))


@report("InfiniTensor/InfiniLM#389", "answers are a little off", ("embed",), "embedding-first-token-twice",
        model="micro-llama", plan="whole")  # fmt: skip
def bos_twice(port: Port) -> None:
    """Let template and tokenizer both add the beginning token, and cut the last token off to the old length."""
    port.around("embed", lambda right, ids: right(np.concatenate([ids[:1], ids[:-1]])))
