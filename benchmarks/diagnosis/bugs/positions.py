"""Bugs of positions, angles and rotations."""

import math

import numpy as np

from benchmarks.diagnosis.bugs.norms import bfloat16
from benchmarks.diagnosis.bugs.planting import QWEN, SCALED, WITH_HEAD_NORM, bug
from benchmarks.diagnosis.port import Port

BOTH = "q_rope k_rope"
SMALL_BASE = "micro-llama story"  # theta is 1e4
NOT_SCALED = "micro-llama micro-qwen2 micro-qwen3 story"
LONG = "micro-llama micro-llama3 micro-qwen2 micro-qwen3"  # contexts of thousands of tokens


@bug(BOTH)
def neighbours_turned(port: Port):
    """Rotate neighbours as pairs: dims 0 and 1, 2 and 3 ..."""

    def turn(right, x, places, name):
        cos, sin = port.tables(places)
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)

    port.around("turn", turn)


@bug(BOTH)
def turned_backwards(port: Port):
    """Rotate backwards: negate the sine."""
    port.around("tables", lambda right, places: right(-places))


@bug(BOTH)
def cosine_and_sine_exchanged(port: Port):
    """Return the tables of cosine and sine in the wrong order."""
    port.around("tables", lambda right, places: right(places)[::-1])


@bug(BOTH, models=QWEN)
def base_of_old(port: Port):
    """Set theta to 10000, the default of the code."""
    port.theta = 1e4


@bug(BOTH, models=SMALL_BASE)
def base_of_qwen(port: Port):
    """Set theta to a million, the value of the model that was loaded before."""
    port.theta = 1e6


@bug(BOTH)
def base_of_nobody(port: Port):
    """Set theta to 123456."""
    port.theta = 123456.0


@bug(BOTH, models=SCALED)
def base_of_old_under_a_scaling(port: Port):
    """Set theta to 10000 where the file has 500000, and apply the scaling to it."""
    port.theta = 1e4


@bug(BOTH)
def positions_from_one(port: Port):
    """Count positions from 1."""
    port.start += 1


@bug(BOTH)
def positions_from_seven(port: Port):
    """Keep seven positions of a padding that should have been subtracted."""
    port.start += 7


@bug(BOTH)
def position_of_the_first_token_for_all(port: Port):
    """Give all tokens of a pass the position of the first one."""
    port.around("places", lambda right, n: np.full(n, right(n)[0]))


@bug(BOTH)
def head_for_position(port: Port):
    """Exchange the axes of tokens and heads, so that the angle grows from head to head."""

    def turn(right, x, places, name):
        return right(x.swapaxes(0, 1), np.arange(x.shape[1]) + port.start, name).swapaxes(0, 1)

    port.around("turn", turn)


@bug(BOTH, first_pass=1)
def positions_restart(port: Port):
    """Start every pass at position 0: slice the tables from their beginning."""
    port.around("places", lambda right, n: np.arange(n) + port.start)


@bug(BOTH, plan="chunks", first_pass=1)
def positions_restart_in_chunks(port: Port):
    """Start the second chunk of the prompt at position 0."""
    port.around("places", lambda right, n: np.arange(n) + port.start)


@bug(BOTH, first_pass=1)
def position_is_the_step(port: Port):
    """Use the number of a step, 1, 2, 3, as its position."""
    port.around("places", lambda right, n: np.arange(n) + port.start + port.n_pass)


@bug(BOTH, first_pass=1)
def position_of_a_step_one_early(port: Port):
    """Place each step one position too early: the first step gets that of the last token of the prompt."""
    port.around("places", lambda right, n: right(n) - (port.n_pass > 0))


@bug(BOTH, plan="chunks", first_pass=1)
def positions_skip_to_the_end_of_a_padded_chunk(port: Port):
    """Count the padding of chunks, which are padded to eight, as positions."""
    port.around("places", lambda right, n: np.arange(n) + port.start + 8 * port.n_pass)


@bug(BOTH, plan="far", models=LONG)
def positions_in_bfloat16(port: Port):
    """Round positions to bfloat16, the type of the engine: above 256 not every whole number exists."""
    port.around("places", lambda right, n: bfloat16(right(n)))


@bug(BOTH)
def first_half_of_heads_turned(port: Port):
    """Rotate only the first half of each head."""
    _partly(port, 2)


@bug(BOTH)
def quarter_of_heads_turned(port: Port):
    """Rotate only the first quarter of each head, as Qwen3-Next does."""
    _partly(port, 4)


def _partly(port: Port, share: int) -> None:
    def turn(right, x, places, name):
        first, tail = x[..., : port.d // share], x[..., port.d // share :]
        return np.concatenate([right(first, places, name), tail], axis=-1)

    port.around("exponents", lambda right: np.arange(0, port.d // share, 2) / (port.d // share))
    port.around("turn", turn)


@bug(BOTH)
def exponent_halved(port: Port):
    """Use j / d as the exponent of pair j, half the right one."""
    port.around("exponents", lambda right: right() / 2)


@bug(BOTH, models=WITH_HEAD_NORM)
def exponent_by_hidden_over_heads(port: Port):
    """Use hidden / heads in the exponent of a model whose head_dim differs from it."""
    port.around("exponents", lambda right: right() * port.d / (port.hidden // port.n_q))


@bug(BOTH, plan="far", models=LONG)
def speeds_in_bfloat16(port: Port):
    """Round frequencies to bfloat16."""
    port.around("speeds", lambda right: bfloat16(right()))


@bug(BOTH)
def tables_in_half(port: Port):
    """Round cosines and sines to float16."""
    port.around("tables", lambda right, places: right(places).astype(np.float16).astype(np.float32))


@bug(BOTH)
def tables_in_bfloat16(port: Port):
    """Round cosines and sines to bfloat16."""
    port.around("tables", lambda right, places: bfloat16(right(places)))


@bug(BOTH, models=SCALED)
def not_stretched(port: Port):
    """Leave out the llama3 scaling."""
    port.stretch = {}


@bug(BOTH, models=SCALED)
def all_stretched_alike(port: Port):
    """Divide every frequency by 8."""
    port.around("slowed", lambda right, speeds: speeds / 8)


@bug(BOTH, models=SCALED)
def sped_up(port: Port):
    """Multiply frequencies by the factors that should divide them."""
    port.around("slowed", lambda right, speeds: speeds * (speeds / right(speeds)))


@bug(BOTH, models=SCALED)
def stretched_by_32(port: Port):
    """Use the factor of Llama 3.2, 32, in a model of Llama 3.1."""
    port.stretch["factor"] = 32


@bug(BOTH, models=SCALED)
def stretched_for_another_context(port: Port):
    """Use an original context of 4096 where the model has 8192."""
    port.stretch["context"] = 4096


@bug(BOTH, models=SCALED)
def stretched_to_another_high_factor(port: Port):
    """Set high_freq_factor to 8 where the model has 4."""
    port.stretch["high"] = 8


@bug(BOTH, models=SCALED)
def stretched_without_a_ramp(port: Port):
    """Replace the ramp between long and short waves by a step."""
    port.around("slowed", lambda right, speeds: np.where(2 * math.pi / speeds < 8192, speeds, speeds / 8))


@bug(BOTH, models=NOT_SCALED)
def positions_divided_by_four(port: Port):
    """Apply a linear scaling by 4 that the model does not have."""
    port.around("speeds", lambda right: right() / 4)


@bug(BOTH, models=NOT_SCALED)
def stretched_without_need(port: Port):
    """Apply the llama3 scaling to a model that has none."""
    port.stretch = {"factor": 8, "low": 1, "high": 4, "context": 64}


@bug("k_rope")
def keys_not_turned(port: Port):
    """Rotate only the queries."""
    port.around("turn", lambda right, x, places, name: right(x, places, name) if name == "q" else x)


@bug(BOTH)
def nothing_turned(port: Port):
    """Rotate neither queries nor keys."""
    port.around("turn", lambda right, x, places, name: x)


@bug(BOTH)
def turned_twice(port: Port):
    """Rotate twice, in the attention module and in its kernel."""
    port.around("turn", lambda right, x, places, name: right(right(x, places, name), places, name))


@bug("v_cache")
def values_turned(port: Port):
    """Rotate values with the keys, before they are stored."""
    port.around("remember", lambda right, k, v: right(k, port.turn(v, port.places(len(v)), "v")))


@bug("q_rope", layer=1)
def queries_not_turned_in_one_block(port: Port):
    """Leave queries of one block without rotation, like a block without positions."""
    port.around("turn", lambda right, x, places, name: right(x, places, name) if name == "k" else x, layer=1)


@bug(BOTH, plan="far", models=LONG)
def tables_end_at_512(port: Port):
    """End the tables after 512 rows; later positions use the last row."""
    port.around("tables", lambda right, places: right(np.minimum(places, 511)))


@bug(BOTH, plan="far", models=LONG)
def angles_in_half(port: Port):
    """Round angles to float16 before the cosine."""

    def tables(right, places):
        angles = (places[:, None, None] * port.speeds()).astype(np.float16).astype(np.float64)
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    port.around("tables", tables)
