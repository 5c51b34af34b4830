"""Bugs of the cache, which passes share."""

import numpy as np

from benchmarks.diagnosis.bugs.planting import bug
from benchmarks.diagnosis.port import Port

BOTH = "k_cache v_cache"


def _change_cache(port: Port, change) -> None:
    """Change the arrays that the cache returns; `change` gets keys and values, (kv heads, tokens, d)."""
    port.around("remember", lambda right, k, v: tuple(change(array, len(k)).copy() for array in right(k, v)))


@bug(BOTH, first_pass=1, shapes=False)
def past_forgotten(port: Port):
    """Let every pass see only its own tokens."""
    _change_cache(port, lambda array, n: array[:, -n:])


@bug(BOTH, plan="chunks", first_pass=1, shapes=False)
def past_forgotten_between_chunks(port: Port):
    """Let the second chunk of a prompt see only its own tokens."""
    _change_cache(port, lambda array, n: array[:, -n:])


@bug(BOTH, first_pass=1)
def cache_allocated_anew(port: Port):
    """Give every pass a new cache of zeros: the slots of the past exist and are empty."""

    def remember(right, k, v):
        port.all_keys[port.layer] = port.all_values[port.layer] = 0
        return right(k, v)

    port.around("remember", remember)


def _write_at(port: Port, slot) -> None:
    """Write new rows from another slot than the first free one."""

    def remember(right, k, v):
        end, start = port.filled + len(k), slot()
        for store, rows in ((port.all_keys, k), (port.all_values, v)):
            store[port.layer, start : start + len(k)] = rows
        return port.all_keys[port.layer, :end].swapaxes(0, 1), port.all_values[port.layer, :end].swapaxes(0, 1)

    port.around("remember", remember)


@bug(BOTH, first_pass=1)
def written_from_the_start(port: Port):
    """Write new tokens over the first ones."""
    _write_at(port, lambda: 0)


@bug(BOTH, plan="chunks", first_pass=1)
def second_chunk_over_the_first(port: Port):
    """Write the second chunk over the first: the cache does not get the offset of the chunk."""
    _write_at(port, lambda: 0)


@bug(BOTH, first_pass=1)
def written_one_slot_early(port: Port):
    """Write new tokens over the last token of the pass before."""
    _write_at(port, lambda: max(port.filled - 1, 0))


@bug(BOTH, first_pass=1)
def written_one_slot_late(port: Port):
    """Write new tokens one slot too late: a slot of zeros stays, and the newest token lies after the end."""
    _write_at(port, lambda: port.filled + (port.n_pass > 0))


@bug(BOTH, first_pass=1)
def newest_in_front(port: Port):
    """Put new tokens before the old ones."""
    _change_cache(port, lambda array, n: np.concatenate([array[:, -n:], array[:, :-n]], axis=1))


@bug(BOTH)
def read_before_written(port: Port):
    """Read the slots of a pass's own tokens before they are written."""

    def change(array, n):
        array = array.copy()
        array[:, -n:] = 0
        return array

    _change_cache(port, change)


@bug("v_cache")
def values_written_late(port: Port):
    """Write the newest values after the attention that needs them."""

    def remember(right, k, v):
        keys, values = right(k, v)
        values = values.copy()
        values[:, -len(v) :] = 0
        return keys, values

    port.around("remember", remember)


@bug(BOTH, shapes=False)
def warm_up_left(port: Port):
    """Leave two tokens of a warm-up at the front of the cache; positions start again."""
    port.run([5, 9])
    port.tape.clear()
    port.n_pass, port.start = 0, port.start - 2


@bug("k_cache")
def keys_kept_as_projected(port: Port):
    """Store keys before the rotation."""
    name = "k_unit" if "k_unit" in port.layers[0] else "k_lin"
    port.around("remember", lambda right, k, v: right(port.noted(name).reshape(k.shape), v))


@bug(BOTH)
def heads_repeated_before_they_are_kept(port: Port):
    """Repeat heads for the queries, then store only as many as fit."""
    port.around(
        "remember",
        lambda right, k, v: right(*(np.repeat(x, port.n_q // port.n_kv, axis=1)[:, : port.n_kv] for x in (k, v))),
    )


@bug(BOTH)
def keys_kept_as_values(port: Port):
    """Exchange keys and values when they are stored."""
    port.around("remember", lambda right, k, v: right(v, k))


@bug("v_cache")
def keys_kept_twice(port: Port):
    """Write the keys into both caches."""
    port.around("remember", lambda right, k, v: right(k, k))


@bug(BOTH)
def rows_kept_without_a_transpose(port: Port):
    """Read (tokens, heads) as (heads, tokens)."""
    port.around("remember", lambda right, k, v: right(*(x.swapaxes(0, 1).reshape(x.shape) for x in (k, v))))


@bug(BOTH, first_pass=1)
def one_cache_for_all_blocks(port: Port):
    """Let all blocks write over each other: the block's number is missing in the address."""
    shared = port.all_keys[0], port.all_values[0]
    shape = (len(port.layers), *shared[0].shape)
    port.all_keys, port.all_values = (np.lib.stride_tricks.as_strided(x, shape, (0, *x.strides)) for x in shared)


@bug(BOTH, plan="long", first_pass=1)
def ring_of_sixteen(port: Port):
    """Write over the 16 slots of the cache from the first again, so that older tokens are lost."""

    def change(array, n):
        slots = np.arange(array.shape[1])
        newest = slots + (array.shape[1] - 1 - slots) // 16 * 16
        return array[:, newest]

    _change_cache(port, change)


@bug(BOTH, first_pass=1)
def newest_token_of_the_past_lost(port: Port):
    """Lose one token between the prompt and the steps: its slot is zero."""

    def remember(right, k, v):
        arrays = [x.copy() for x in right(k, v)]
        if port.n_pass == 0:
            port.all_keys[port.layer, len(k) - 1] = port.all_values[port.layer, len(k) - 1] = 0
        return arrays

    port.around("remember", remember)
