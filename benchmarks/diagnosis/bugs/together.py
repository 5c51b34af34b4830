"""Two bugs in one engine: one after the other, or both in one stage."""

import math

from benchmarks.diagnosis.bugs.planting import BUGS, SCALED, WITH_BIAS, Bug, bug
from benchmarks.diagnosis.port import Port

BOTH = "q_rope k_rope"
_BEHIND = """
rows-left-in-pairs gelu-by-tanh micro-llama
biases-not-loaded base-of-old micro-qwen2
eps-of-no-file gate-and-up-exchanged micro-llama
neighbours-turned products-not-scaled micro-qwen3
keys-tiled last-norm-left-out micro-llama3
heads-not-normalised keys-kept-as-projected micro-qwen3
everything-visible attention-added-to-its-input story
not-stretched capped-at-50 micro-llama3
embeddings-times-root-of-width stale-row-of-a-token micro-qwen2
one-head-uninitialised silu-of-up micro-llama
output-rows-one-late positions-restart micro-qwen2
gain-is-one-plus-weight values-tiled story
mean-taken-away queries-transposed micro-qwen2
tied-without-being-so written-one-slot-early micro-qwen3
"""


def pairs() -> list[tuple[tuple[Bug, Bug], str]]:
    """List pairs of bugs, the second after the first, with the model into which they are injected."""
    lines = [line.split() for line in _BEHIND.strip().splitlines()]
    return [((BUGS[first], BUGS[second]), model) for first, second, model in lines]


@bug(BOTH, models="micro-qwen2 micro-qwen3")
def neighbours_turned_with_the_base_of_old(port: Port):
    """Rotate neighbours as pairs, and set theta to 10000."""
    BUGS["neighbours-turned"].inject(port)
    port.theta = 1e4


@bug(BOTH, models=SCALED)
def neighbours_turned_and_not_stretched(port: Port):
    """Rotate neighbours as pairs, and leave out the llama3 scaling."""
    BUGS["neighbours-turned"].inject(port)
    port.stretch = {}


@bug(BOTH)
def turned_backwards_from_one(port: Port):
    """Negate the sine, and count positions from 1."""
    BUGS["turned-backwards"].inject(port)
    port.start += 1


@bug("attn_scores")
def not_scaled_and_next_one_visible(port: Port):
    """Leave the products undivided, and begin the mask one diagonal too late."""
    BUGS["next-one-visible"].inject(port)
    port.scale = 1


@bug("attn_scores")
def keys_tiled_and_divided_twice(port: Port):
    """Let heads read the wrong keys, and divide the products by d."""
    BUGS["keys-tiled"].inject(port)
    port.scale /= math.sqrt(port.d)


@bug("attn_norm q_norm k_norm ffn_norm final_norm")
def one_plus_weight_with_another_eps(port: Port):
    """Use Gemma's gain, and an eps of 1e-3."""
    BUGS["gain-is-one-plus-weight"].inject(port)
    port.eps = 1e-3


@bug("q_proj k_proj", models=WITH_BIAS)
def rows_out_of_pairs_and_no_bias(port: Port):
    """Reorder rows of queries and keys as for a Llama file, and leave out their bias."""
    BUGS["rows-taken-out-of-pairs-needlessly"].inject(port)
    port.around("bias", lambda right, y, name: y if name in ("q", "k") else right(y, name))
