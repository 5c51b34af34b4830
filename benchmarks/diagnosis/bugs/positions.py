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
    """Dims 0 and 1, 2 and 3 ... are pairs."""

    def turn(right, x, places, name):
        cos, sin = port.tables(places)
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)

    port.around("turn", turn)


@bug(BOTH)
def turned_backwards(port: Port):
    """The sine has the other sign."""
    port.around("tables", lambda right, places: right(-places))


@bug(BOTH)
def cosine_and_sine_exchanged(port: Port):
    """The tables are returned in the other order."""
    port.around("tables", lambda right, places: right(places)[::-1])


@bug(BOTH, models=QWEN)
def base_of_old(port: Port):
    """Theta is 10000, the default of the code."""
    port.theta = 1e4


@bug(BOTH, models=SMALL_BASE)
def base_of_qwen(port: Port):
    """Theta is a million, the model before this one had it."""
    port.theta = 1e6


@bug(BOTH)
def base_of_nobody(port: Port):
    """Theta is 123456."""
    port.theta = 123456.0


@bug(BOTH, models=SCALED)
def base_of_old_under_a_scaling(port: Port):
    """Theta is 10000 where the file has 500000, and the scaling is applied to it."""
    port.theta = 1e4


@bug(BOTH)
def positions_from_one(port: Port):
    """The first token is at position 1."""
    port.start += 1


@bug(BOTH)
def positions_from_seven(port: Port):
    """Seven positions of a padding were not taken off."""
    port.start += 7


@bug(BOTH)
def position_of_the_first_token_for_all(port: Port):
    """All tokens of a pass have the position of its first."""
    port.around("places", lambda right, n: np.full(n, right(n)[0]))


@bug(BOTH)
def head_for_position(port: Port):
    """Axes of tokens and heads were exchanged: the angle grows from head to head."""

    def turn(right, x, places, name):
        return right(x.swapaxes(0, 1), np.arange(x.shape[1]) + port.start, name).swapaxes(0, 1)

    port.around("turn", turn)


@bug(BOTH, first_pass=1)
def positions_restart(port: Port):
    """Every pass begins at position 0: the tables are sliced from their beginning."""
    port.around("places", lambda right, n: np.arange(n) + port.start)


@bug(BOTH, plan="chunks", first_pass=1)
def positions_restart_in_chunks(port: Port):
    """The second chunk of the prompt begins at position 0."""
    port.around("places", lambda right, n: np.arange(n) + port.start)


@bug(BOTH, first_pass=1)
def position_is_the_step(port: Port):
    """The position of a step is its number, 1, 2, 3."""
    port.around("places", lambda right, n: np.arange(n) + port.start + port.n_pass)


@bug(BOTH, first_pass=1)
def position_of_a_step_one_early(port: Port):
    """A step is at the position of the last token of the prompt."""
    port.around("places", lambda right, n: right(n) - (port.n_pass > 0))


@bug(BOTH, plan="chunks", first_pass=1)
def positions_skip_to_the_end_of_a_padded_chunk(port: Port):
    """Chunks are padded to eight, and positions count the padding."""
    port.around("places", lambda right, n: np.arange(n) + port.start + 8 * port.n_pass)


@bug(BOTH, plan="far", models=LONG)
def positions_in_bfloat16(port: Port):
    """Positions are bfloat16, as the rest of the engine: above 256 they are no whole numbers any more."""
    port.around("places", lambda right, n: bfloat16(right(n)))


@bug(BOTH)
def first_half_of_heads_turned(port: Port):
    """A partial rotation: the second half of each head stays."""
    _partly(port, 2)


@bug(BOTH)
def quarter_of_heads_turned(port: Port):
    """A partial rotation of a quarter, as Qwen3-Next has it."""
    _partly(port, 4)


def _partly(port: Port, share: int) -> None:
    def turn(right, x, places, name):
        first, rest = x[..., : port.d // share], x[..., port.d // share :]
        return np.concatenate([right(first, places, name), rest], axis=-1)

    port.around("exponents", lambda right: np.arange(0, port.d // share, 2) / (port.d // share))
    port.around("turn", turn)


@bug(BOTH)
def exponent_halved(port: Port):
    """The exponent of pair j is j / d."""
    port.around("exponents", lambda right: right() / 2)


@bug(BOTH, models=WITH_HEAD_NORM)
def exponent_by_hidden_over_heads(port: Port):
    """The fraction hidden / heads stands in the exponent where the model has a head_dim of its own."""
    port.around("exponents", lambda right: right() * port.d / (port.hidden // port.n_q))


@bug(BOTH, plan="far", models=LONG)
def speeds_in_bfloat16(port: Port):
    """Frequencies are rounded to bfloat16."""
    port.around("speeds", lambda right: bfloat16(right()))


@bug(BOTH)
def tables_in_half(port: Port):
    """Cosines and sines are float16."""
    port.around("tables", lambda right, places: right(places).astype(np.float16).astype(np.float32))


@bug(BOTH)
def tables_in_bfloat16(port: Port):
    """Cosines and sines are bfloat16."""
    port.around("tables", lambda right, places: bfloat16(right(places)))


@bug(BOTH, models=SCALED)
def not_stretched(port: Port):
    """The llama3 scaling is not there."""
    port.stretch = {}


@bug(BOTH, models=SCALED)
def all_stretched_alike(port: Port):
    """Every frequency is divided by 8."""
    port.around("slowed", lambda right, speeds: speeds / 8)


@bug(BOTH, models=SCALED)
def sped_up(port: Port):
    """Frequencies are multiplied by what they are to be divided by."""
    port.around("slowed", lambda right, speeds: speeds * (speeds / right(speeds)))


@bug(BOTH, models=SCALED)
def stretched_by_32(port: Port):
    """The factor of Llama 3.2 in a model of 3.1."""
    port.stretch["factor"] = 32


@bug(BOTH, models=SCALED)
def stretched_for_another_context(port: Port):
    """The original context is 4096 where the model has 8192."""
    port.stretch["context"] = 4096


@bug(BOTH, models=SCALED)
def stretched_to_another_high_factor(port: Port):
    """high_freq_factor is 8 where the model has 4."""
    port.stretch["high"] = 8


@bug(BOTH, models=SCALED)
def stretched_without_a_ramp(port: Port):
    """Between long and short waves there is a step."""
    port.around("slowed", lambda right, speeds: np.where(2 * math.pi / speeds < 8192, speeds, speeds / 8))


@bug(BOTH, models=NOT_SCALED)
def positions_divided_by_four(port: Port):
    """Linear scaling by 4 that the model does not have."""
    port.around("speeds", lambda right: right() / 4)


@bug(BOTH, models=NOT_SCALED)
def stretched_without_need(port: Port):
    """The llama3 scaling in a model that has none."""
    port.stretch = {"factor": 8, "low": 1, "high": 4, "context": 64}


@bug("k_rope")
def keys_not_turned(port: Port):
    """Only queries are rotated."""
    port.around("turn", lambda right, x, places, name: right(x, places, name) if name == "q" else x)


@bug(BOTH)
def nothing_turned(port: Port):
    """Neither queries nor keys are rotated."""
    port.around("turn", lambda right, x, places, name: x)


@bug(BOTH)
def turned_twice(port: Port):
    """Once in the attention module and once in its kernel."""
    port.around("turn", lambda right, x, places, name: right(right(x, places, name), places, name))


@bug("v_cache")
def values_turned(port: Port):
    """Values are rotated with the keys, before they are kept."""
    port.around("remember", lambda right, k, v: right(k, port.turn(v, port.places(len(v)), "v")))


@bug("q_rope", layer=1)
def queries_not_turned_in_one_block(port: Port):
    """A block is taken for one without positions."""
    port.around("turn", lambda right, x, places, name: right(x, places, name) if name == "k" else x, layer=1)


@bug(BOTH, plan="far", models=LONG)
def tables_end_at_512(port: Port):
    """The tables have 512 rows, and positions behind them take the last."""
    port.around("tables", lambda right, places: right(np.minimum(places, 511)))


@bug(BOTH, plan="far", models=LONG)
def angles_in_half(port: Port):
    """Angles are rounded to float16 before their cosine is taken."""

    def tables(right, places):
        angles = (places[:, None, None] * port.speeds()).astype(np.float16).astype(np.float64)
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    port.around("tables", tables)
