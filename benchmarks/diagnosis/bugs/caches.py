"""Bugs of the cache: of what passes leave to each other."""

import numpy as np

from benchmarks.diagnosis.bugs.planting import bug
from benchmarks.diagnosis.port import Port

BOTH = "k_cache v_cache"


def _kept(port: Port, change) -> None:
    """Change what the cache gives; the change is made to keys and to values, (kv heads, tokens, d)."""
    port.around("remember", lambda right, k, v: tuple(change(kept, len(k)).copy() for kept in right(k, v)))


@bug(BOTH, first_pass=1, shapes=False)
def past_forgotten(port: Port):
    """Every pass sees its own tokens only."""
    _kept(port, lambda kept, n: kept[:, -n:])


@bug(BOTH, plan="chunks", first_pass=1, shapes=False)
def past_forgotten_between_chunks(port: Port):
    """The second chunk of a prompt sees its own tokens only."""
    _kept(port, lambda kept, n: kept[:, -n:])


@bug(BOTH, first_pass=1)
def cache_allocated_anew(port: Port):
    """Every pass has a new cache of zeros: the slots of the past are there and empty."""

    def remember(right, k, v):
        port.all_keys[port.layer] = port.all_values[port.layer] = 0
        return right(k, v)

    port.around("remember", remember)


def _write_at(port: Port, slot) -> None:
    """Write new rows from another slot on than the first free one."""

    def remember(right, k, v):
        end, at = port.filled + len(k), slot()
        for store, new in ((port.all_keys, k), (port.all_values, v)):
            store[port.layer, at : at + len(k)] = new
        return port.all_keys[port.layer, :end].swapaxes(0, 1), port.all_values[port.layer, :end].swapaxes(0, 1)

    port.around("remember", remember)


@bug(BOTH, first_pass=1)
def written_from_the_start(port: Port):
    """New tokens are written over the first ones."""
    _write_at(port, lambda: 0)


@bug(BOTH, plan="chunks", first_pass=1)
def second_chunk_over_the_first(port: Port):
    """The offset of a chunk is not passed on to the cache."""
    _write_at(port, lambda: 0)


@bug(BOTH, first_pass=1)
def written_one_slot_early(port: Port):
    """New tokens lie over the last one of the pass before."""
    _write_at(port, lambda: max(port.filled - 1, 0))


@bug(BOTH, first_pass=1)
def written_one_slot_late(port: Port):
    """A gap of one slot of zeros, and the newest token is behind the end."""
    _write_at(port, lambda: port.filled + (port.n_pass > 0))


@bug(BOTH, first_pass=1)
def newest_in_front(port: Port):
    """New tokens are put before the old ones."""
    _kept(port, lambda kept, n: np.concatenate([kept[:, -n:], kept[:, :-n]], axis=1))


@bug(BOTH)
def read_before_written(port: Port):
    """Attention reads the slots of its own tokens before they are written."""

    def change(kept, n):
        kept = kept.copy()
        kept[:, -n:] = 0
        return kept

    _kept(port, change)


@bug("v_cache")
def values_written_late(port: Port):
    """The newest values are written behind the attention that needs them."""

    def remember(right, k, v):
        keys, values = right(k, v)
        values = values.copy()
        values[:, -len(v) :] = 0
        return keys, values

    port.around("remember", remember)


@bug(BOTH, shapes=False)
def warm_up_left(port: Port):
    """Two tokens of a warm-up are in front; positions begin anew."""
    port.run([5, 9])
    port.tape.clear()
    port.n_pass, port.start = 0, port.start - 2


@bug("k_cache")
def keys_kept_as_projected(port: Port):
    """Keys are kept before the rotation."""
    name = "k_unit" if "k_unit" in port.layers[0] else "k_lin"
    port.around("remember", lambda right, k, v: right(port.noted(name).reshape(k.shape), v))


@bug(BOTH)
def heads_repeated_before_they_are_kept(port: Port):
    """Heads are repeated for the queries, and as many as fit are kept."""
    port.around(
        "remember",
        lambda right, k, v: right(*(np.repeat(x, port.n_q // port.n_kv, axis=1)[:, : port.n_kv] for x in (k, v))),
    )


@bug(BOTH)
def keys_kept_as_values(port: Port):
    """Keys and values lie in each other's cache."""
    port.around("remember", lambda right, k, v: right(v, k))


@bug("v_cache")
def keys_kept_twice(port: Port):
    """The keys are written into both caches."""
    port.around("remember", lambda right, k, v: right(k, k))


@bug(BOTH)
def rows_kept_without_a_transpose(port: Port):
    """(tokens, heads) is read as (heads, tokens)."""
    port.around("remember", lambda right, k, v: right(*(x.swapaxes(0, 1).reshape(x.shape) for x in (k, v))))


@bug(BOTH, first_pass=1)
def one_cache_for_all_blocks(port: Port):
    """The block's number is not in the address: blocks write over each other."""
    shared = port.all_keys[0], port.all_values[0]
    shape = (len(port.layers), *shared[0].shape)
    port.all_keys, port.all_values = (np.lib.stride_tricks.as_strided(x, shape, (0, *x.strides)) for x in shared)


@bug(BOTH, plan="long", first_pass=1)
def ring_of_sixteen(port: Port):
    """The cache has 16 slots and begins anew behind them: what a slot held is gone."""

    def change(kept, n):
        slots = np.arange(kept.shape[1])
        newest = slots + (kept.shape[1] - 1 - slots) // 16 * 16
        return kept[:, newest]

    _kept(port, change)


@bug(BOTH, first_pass=1)
def newest_token_of_the_past_lost(port: Port):
    """Between prompt and steps one token is never kept: its slot is zero."""

    def remember(right, k, v):
        kept = [x.copy() for x in right(k, v)]
        if port.n_pass == 0:
            port.all_keys[port.layer, len(k) - 1] = port.all_values[port.layer, len(k) - 1] = 0
        return kept

    port.around("remember", remember)
