"""Dumps of a right engine that runs several prompts at once, with junk in the padding."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.files import open_weights
from llorch.model.blocks import forward
from llorch.model.cache import KVCache
from llorch.runtime.builtin import builtin_path
from llorch.stages.table import BY_NAME

MODEL = "micro-llama"
PROMPTS = ((3, 1, 4, 15, 9), (2, 6, 5, 33, 17, 21, 40, 8, 30), (7, 11, 13, 22, 19, 25, 31))
STEPS = (12, 34, 56)  # the next token of each row
Trace = Mapping[str, np.ndarray]
Change = Callable[[int, int, str, np.ndarray], np.ndarray]  # row, pass, stage key, array


def unchanged(_row: int, _number: int, _name: str, array: np.ndarray) -> np.ndarray:
    return array


def run_rows(change: Change = unchanged, starts: Sequence[int] = (0, 0, 0)) -> list[list[Trace]]:
    """Trace the prompt and one step of each row, from these positions; the first index is the pass."""
    weights = open_weights(builtin_path(MODEL))
    rows = []
    for row, (prompt, step) in enumerate(zip(PROMPTS, STEPS, strict=True)):
        cache, traces = KVCache(weights.config, np.float32, first_position=starts[row]), []
        for number, ids in enumerate((prompt, (step,))):
            trace: dict[str, np.ndarray] = {}

            def keep(name: str, array: np.ndarray, trace: dict = trace) -> np.ndarray:
                trace[name] = array.copy()
                return array

            forward(np.array(ids), weights, cache, keep=keep)
            traces.append({name: change(row, number, name, array) for name, array in trace.items()})
        rows.append(traces)
    return [list(traces) for traces in zip(*rows, strict=True)]


def masks(*, on_the_left: bool) -> list[list[int]]:
    """Mark the tokens of the prompts, of which shorter ones are padded."""
    width = max(map(len, PROMPTS))
    rows = [[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in PROMPTS]
    return [row[::-1] for row in rows] if on_the_left else rows


def padded(traces: Sequence[Trace], mask: np.ndarray, all_masks: np.ndarray) -> Trace:
    """Join a pass of all rows in a new first axis, with random numbers where a token or a key is padding."""
    rng, joined = np.random.default_rng(0), {}
    for name, first in traces[0].items():
        axes = BY_NAME[name.rpartition(".")[2]].axes.split()
        sizes = {"seq": mask.shape[1], "ctx": all_masks.shape[1]}
        shape = [sizes.get(axis, size) for axis, size in zip(axes, first.shape, strict=True)]
        array = rng.normal(size=(len(traces), *shape)).astype(first.dtype)
        for row, trace in enumerate(traces):
            real = {"seq": np.flatnonzero(mask[row]), "ctx": np.flatnonzero(all_masks[row])}
            indices = [real.get(axis, np.arange(size)) for axis, size in zip(axes, first.shape, strict=True)]
            array[row][np.ix_(*indices)] = trace[name]
        joined[name] = array
    return joined


def write_padded(
    folder: Path, *, on_the_left: bool, change: Change = unchanged, is_flat: bool = False,
    starts: Sequence[int] = (0, 0, 0),
) -> Path:  # fmt: skip
    """Write the prompts, padded, and a step of all rows; `is_flat` joins rows and tokens where they are neighbours."""
    mask = np.array(masks(on_the_left=on_the_left))
    prompt, step = run_rows(change, starts)
    ids = np.zeros_like(mask)
    for row, tokens in enumerate(PROMPTS):
        ids[row][mask[row] == 1] = tokens
    wide = np.concatenate([mask, np.ones((len(PROMPTS), 1), int)], axis=1)
    with DumpWriter(folder, engine="mine") as writer:
        for pass_ids, pass_mask, arrays in (
            (ids, mask, padded(prompt, mask, mask)), (np.array(STEPS)[:, None], wide, padded(step, wide[:, -1:], wide)),
        ):  # fmt: skip
            writer.begin(pass_ids, attention_mask=pass_mask)
            for name, array in arrays.items():
                is_joined = is_flat and BY_NAME[name.rpartition(".")[2]].axes.startswith("seq")
                writer.add(name, array.reshape(-1, *array.shape[2:]) if is_joined else array)
    return folder


def write_ragged(folder: Path, change: Change = unchanged) -> Path:
    """Write the prompts and a step without padding: all tokens in the first axis."""
    with DumpWriter(folder, engine="mine") as writer:
        for ids, traces in zip((PROMPTS, [(step,) for step in STEPS]), run_rows(change), strict=True):
            writer.begin(ids)
            for name in traces[0]:
                if BY_NAME[name.rpartition(".")[2]].axes.startswith("seq"):
                    writer.add(name, np.concatenate([trace[name] for trace in traces]))
    return folder
