"""Known mistakes in gated delta nets: short convolution, L2 norms, decay, delta rule and its state, gated norm.

Module `mistake` explains the fields of the mistakes. `past_conv` and `past_delta` are the states before the pass.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from llorch.diagnosis.mistakes.in_stage import IN_STAGE, LENGTHS
from llorch.diagnosis.mistakes.mistake import Mistake, Wrong
from llorch.diagnosis.mistakes.planting import Function, Replacement, instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import ModelConfig
from llorch.model.blocks.delta_net import heads
from llorch.ops.delta_rule import delta_rule, of_value_heads
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rounding import round_activations
from llorch.ops.short_conv import short_conv
from llorch.ops.sigmoid import sigmoid

RULE = ("delta_state", "delta_out")
# Values of `part`: functions that `wrong` replaces, see `in_stage`. Without `part`, `wrong` computes a stage from `s`.
CONVOLUTION, L2_NORM, DECAY, DELTA_RULE = "short_conv", "l2_norm", "log_decay", "delta_rule"
CHUNK = 64  # tokens of a chunk in transformers


class TokenState(NamedTuple):
    """Inputs of the delta rule at one token for all value heads, (v_heads, 1, width) each; decay is exp(log_decay)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    beta: np.ndarray
    decay: np.ndarray

    def correction(self, state: np.ndarray) -> np.ndarray:
        """Compute the correction to write: beta times the part of the value that the state lacks."""
        return self.beta * (self.v - self.k @ state)

    def add(self, state: np.ndarray, correction: np.ndarray) -> np.ndarray:
        """Add a correction to a state at the token's key."""
        return state + self.k.swapaxes(1, 2) * correction


Step = Callable[[np.ndarray, TokenState], tuple[np.ndarray, np.ndarray]]  # returns next state, state to read


def _silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def _has_groups(config: ModelConfig) -> bool:
    """Tell if a model has more value heads than key heads, so that their order matters."""
    net = config.delta_net
    return net is not None and 1 < net.n_key_heads < net.n_value_heads


def conv_not_causal(right: Function) -> Function:
    """Shift the window of the convolution to one token later."""

    def wrong(x: np.ndarray, kernel: np.ndarray, state: np.ndarray) -> np.ndarray:
        next_rows = np.concatenate([x[1:], np.zeros_like(x[:1])])
        return right(next_rows, kernel, np.concatenate([state, x])[1 : len(state) + 1])

    return wrong


def conv_without_silu(x: np.ndarray, kernel: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Return the sums of the convolution without SiLU."""
    rows = np.concatenate([state, x])
    return np.sum([rows[j : j + len(x)] * kernel[:, j] for j in range(kernel.shape[1])], axis=0)


def _length(x: np.ndarray) -> np.ndarray:
    """Compute the Euclidean norm over the last axis, (..., 1)."""
    return np.sqrt((x * x).sum(-1, keepdims=True))


def _divide_by(divisor: Callable[[np.ndarray], np.ndarray]) -> Replacement:
    return instead(lambda x: x / divisor(x))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def _with_step(step: Step) -> Replacement:
    """Make the replacement that runs the delta rule token by token; `step` updates all value heads at once."""

    def wrong(
        q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, g: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        q, k, v, beta, g, state = of_value_heads(q, k, v, beta, g, state)
        outputs = []
        for t in range(v.shape[1]):
            rates = beta[:, t, None, None], np.exp(g[:, t])[:, None, None]
            token = TokenState(q[:, t, None], k[:, t, None], v[:, t, None], *rates)
            state, read_state = step(state, token)
            outputs.append((token.q @ read_state)[:, 0])
        return np.stack(outputs), state

    return instead(wrong)


def _token_by_token(update: Callable[[np.ndarray, TokenState], np.ndarray]) -> Replacement:
    """Make the replacement that runs the delta rule token by token; the query reads the state of `update`."""

    def step(state: np.ndarray, token: TokenState) -> tuple[np.ndarray, np.ndarray]:
        new = update(state, token)
        return new, new

    return _with_step(step)


def _with_inputs(change: Callable[..., dict[str, np.ndarray]]) -> Replacement:
    """Make the replacement that runs the right rule on changed inputs."""
    return lambda right: lambda **inputs: right(**inputs | change(**inputs))


def read_before_write(state: np.ndarray, token: TokenState) -> tuple[np.ndarray, np.ndarray]:
    """Read the state with each query before the token is written."""
    decayed = token.decay * state
    return token.add(decayed, token.correction(decayed)), decayed


def _tile(q: np.ndarray, k: np.ndarray, beta: np.ndarray, **unused: np.ndarray) -> dict[str, np.ndarray]:
    """Use key head h % k_heads for value head h."""
    n_repeats = beta.shape[1] // q.shape[1]
    return {"q": np.tile(q, (1, n_repeats, 1)), "k": np.tile(k, (1, n_repeats, 1))}


def _state_in_bfloat16(state: np.ndarray, token: TokenState) -> np.ndarray:
    new = token.add(token.decay * state, token.correction(token.decay * state))
    return round_activations(new.astype(np.float32), "BF16").astype(state.dtype)


def state_in_bfloat16(s: StageInputs, stage: str) -> np.ndarray:
    """Round the state to bfloat16 after each token."""
    return IN_STAGE[DELTA_RULE](_token_by_token(_state_in_bfloat16), s, stage)


def forgotten_between_chunks(s: StageInputs, stage: str) -> np.ndarray:
    """Start every chunk with an empty state."""
    inputs = [s["q_l2"], s["k_l2"], heads(s["conv_out"], s.config)[2], s["beta"], s["log_decay"]]
    starts, out = range(0, len(inputs[0]), CHUNK), []
    state = s["past_delta"]
    for start in starts:
        initial = state if start == 0 else np.zeros_like(state)
        q, k, v, beta, g = (x[start : start + CHUNK] for x in inputs)
        chunk_out, state = delta_rule(q, k, v, beta, g, initial)
        out.append(chunk_out)
    return state if stage == "delta_state" else np.concatenate(out)


def _gated_mistake(
    compute: Callable[[StageInputs, np.ndarray, np.ndarray, np.ndarray], np.ndarray],
) -> Wrong[StageInputs]:
    """Make a wrong gated norm from a function of inputs, heads, gates (before the activation) and gain."""

    def wrong(s: StageInputs, stage: str) -> np.ndarray:
        x = s["delta_out"].astype(np.float64)
        return compute(s, x, s["z_in"].reshape(x.shape), s.weights["delta_norm"]).reshape(s["z_in"].shape)

    return wrong


def _normalise(s: StageInputs, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return rms_norm(x, gain.astype(np.float64), eps=s.config.rms_norm_eps)


def values_tiled(s: StageInputs, stage: str) -> np.ndarray:
    """Order value heads as Qwen3.5's GGUF files do: value head h belongs to key head h % k_heads."""
    net, matrix = s.config.delta_net, {"qkv_in": "in_qkv", "z_in": "in_z", "b_in": "in_b", "a_in": "in_a"}[stage]
    assert net is not None
    rows = linear(s["attn_norm"], s.weights[matrix])
    queries_and_keys, values = np.split(rows, [2 * net.key_width if stage == "qkv_in" else 0], axis=1)
    grouped = values.reshape(len(rows), net.n_key_heads, net.n_value_heads // net.n_key_heads, -1)
    return np.concatenate([queries_and_keys, grouped.swapaxes(1, 2).reshape(values.shape)], axis=1)


def columns_tiled(s: StageInputs, stage: str) -> np.ndarray:
    """Leave the columns of the output matrix in the order of Qwen3.5's GGUF files."""
    net, x = s.config.delta_net, s["gated_norm"]
    assert net is not None
    grouped = x.reshape(len(x), net.n_key_heads, -1, net.value_head_dim)
    return linear(np.ascontiguousarray(grouped.swapaxes(1, 2)).reshape(x.shape), s.weights["out_proj"])


def _last_rows(s: StageInputs, rows: np.ndarray) -> np.ndarray:
    """Append rows to the state of the convolution, and return as many of the last rows as the state has."""
    return np.concatenate([s["past_conv"], rows])[-len(s["past_conv"]) :]


DELTA_NET: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="delta-value-heads-tiled-in-file", stages=("qkv_in", "z_in", "b_in", "a_in"), wrong=values_tiled,
        applies_to=_has_groups,
        diagnosis="Value heads are in the order of Qwen3.5's GGUF files (one of every key head in turn); undo it once, "
        "or let value head h read key head h % k_heads throughout.",
    ),
    Mistake(
        name="delta-output-columns-tiled", stages=("linear_out",), wrong=columns_tiled, applies_to=_has_groups,
        diagnosis="The columns of out_proj are in the order of Qwen3.5's GGUF files; undo that order once.",
    ),
    Mistake(
        name="conv-state-newest-first", stages=("conv_state",), wrong=lambda s, _: _last_rows(s, s["qkv_in"])[::-1],
        diagnosis="The state of the convolution has the newest token first; the oldest token must be first.",
    ),
    Mistake(
        name="conv-state-one-token-early", stages=("conv_state",), wrong=lambda s, _: _last_rows(s, s["qkv_in"][:-1]),
        diagnosis="The newest token is not in the state of the convolution; it holds the last inputs of the pass.",
    ),
    Mistake(
        name="conv-state-behind-convolution", stages=("conv_state",),
        wrong=lambda s, _: _last_rows(s, short_conv(s["qkv_in"], s.weights["conv"], s["past_conv"])),
        diagnosis="The outputs of the convolution were stored; its state holds its inputs.",
    ),
    Mistake(
        name="conv-taps-reversed", stages=("conv_out",), part=CONVOLUTION,
        wrong=lambda right: lambda x, kernel, state: right(x, kernel[:, ::-1], state),
        diagnosis="The kernel was reversed; its last number belongs to the newest token.",
    ),
    Mistake(
        name="conv-not-causal", stages=("conv_out",), part=CONVOLUTION, wrong=conv_not_causal,
        diagnosis="The convolution saw the next token: pad only in front, by the length of the kernel minus 1.",
    ),
    Mistake(
        name="conv-silu-missing", stages=("conv_out",), part=CONVOLUTION, wrong=instead(conv_without_silu),
        diagnosis="SiLU is missing after the sums of the convolution.",
    ),
    Mistake(
        name="conv-past-forgotten", stages=("conv_out",), after_cached=True, part=CONVOLUTION,
        wrong=lambda right: lambda x, kernel, state: right(x, kernel, np.zeros_like(state)),
        diagnosis="The convolution began with zeros in this pass; it continues with the previous pass's last inputs.",
    ),
    Mistake(
        name="l2-norm-missing", stages=LENGTHS, part=L2_NORM, wrong=instead(lambda x: x),
        diagnosis="Queries and keys of the delta rule were not divided by their length.",
    ),
    Mistake(
        name="l2-norm-by-mean", stages=LENGTHS, part=L2_NORM,
        wrong=_divide_by(lambda x: np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6)),
        diagnosis="Heads were divided by the root of the mean of squares (RMSNorm); divide by the root of their sum.",
    ),
    Mistake(
        name="l2-norm-eps-outside", stages=LENGTHS, part=L2_NORM, wrong=_divide_by(lambda x: _length(x) + 1e-6),
        diagnosis="eps was added to the length; it is added to the sum of squares, inside the root.",
    ),
    Mistake(
        name="l2-norm-of-heads-together", stages=LENGTHS, part=L2_NORM,
        wrong=_divide_by(lambda x: np.sqrt((x * x).sum((-2, -1), keepdims=True) + 1e-6)),
        diagnosis="All heads of a token were scaled to length 1 together; scale each head separately.",
    ),
    Mistake(
        name="beta-sigmoid-missing", stages=("beta",), wrong=lambda s, _: s["b_in"],
        diagnosis="The projection was used as beta; apply a sigmoid first.",
    ),
    Mistake(
        name="beta-doubled", stages=("beta",), wrong=lambda s, _: 2 * sigmoid(s["b_in"]),
        diagnosis="beta was doubled, as other delta nets do (negative eigenvalues); Qwen takes the sigmoid alone.",
    ),
    Mistake(
        name="beta-from-a", stages=("beta",), reads=("a_in",), wrong=lambda s, _: sigmoid(s["a_in"]),
        diagnosis="beta was made from a; the projections b and a were exchanged (b comes first in the fused matrix).",
    ),
    Mistake(
        name="decay-sign-flipped", stages=("log_decay",), part=DECAY,
        wrong=instead(lambda a, dt_bias, decay: -decay * _softplus(a + dt_bias)),
        diagnosis="The logarithm of the decay is positive, so the state grows; it is -exp(A_log) * softplus(...).",
    ),
    Mistake(
        name="decay-softplus-missing", stages=("log_decay",), part=DECAY,
        wrong=instead(lambda a, dt_bias, decay: decay * (a + dt_bias)),
        diagnosis="a + dt_bias was used as it is; it goes through a softplus first.",
    ),
    Mistake(
        name="decay-a-log-not-exponentiated", stages=("log_decay",), part=DECAY,
        wrong=instead(lambda a, dt_bias, decay: -np.log(-decay) * _softplus(a + dt_bias)),
        diagnosis="A_log was used as the rate; the rate is exp(A_log) (GGUF files hold -exp(A_log) already).",
    ),
    Mistake(
        name="decay-exponentiated-twice", stages=("log_decay",), part=DECAY,
        wrong=instead(lambda a, dt_bias, decay: -np.exp(-decay) * _softplus(a + dt_bias)),
        diagnosis="The rate was exponentiated once more; GGUF files hold -exp(A_log), not A_log.",
    ),
    Mistake(
        name="decay-bias-missing", stages=("log_decay",), part=DECAY,
        wrong=instead(lambda a, dt_bias, decay: decay * _softplus(a)),
        diagnosis="dt_bias was not added to a.",
    ),
    Mistake(
        name="decay-bias-behind-softplus", stages=("log_decay",), part=DECAY,
        wrong=instead(lambda a, dt_bias, decay: decay * (_softplus(a) + dt_bias)),
        diagnosis="dt_bias was added after the softplus; add it to a before.",
    ),
    Mistake(
        name="decay-given-as-factor", stages=("log_decay",), part=DECAY,
        wrong=instead(lambda a, dt_bias, decay: np.exp(decay * _softplus(a + dt_bias))),
        diagnosis="This is the factor of the decay; the stage is its logarithm.",
    ),
    Mistake(
        name="delta-query-not-scaled", stages=("delta_out",), part=DELTA_RULE,
        wrong=_with_inputs(lambda q, **unused: {"q": q * q.dtype.type(q.shape[-1] ** 0.5)}),
        diagnosis="Queries were not divided by sqrt(key_dim).",
    ),
    Mistake(
        name="delta-decay-missing", stages=RULE, part=DELTA_RULE,
        wrong=_with_inputs(lambda g, **unused: {"g": np.zeros_like(g)}),
        diagnosis="The state did not decay; it is multiplied by exp(log_decay) before each token.",
    ),
    Mistake(
        name="delta-decay-after-write", stages=RULE, part=DELTA_RULE,
        wrong=_token_by_token(lambda state, t: t.decay * t.add(state, t.correction(state))),
        diagnosis="The state decayed after the token was written; it decays before, so that the newest stays whole.",
    ),
    Mistake(
        name="delta-correction-before-decay", stages=RULE, part=DELTA_RULE,
        wrong=_token_by_token(lambda state, t: t.add(t.decay * state, t.correction(state))),
        diagnosis="The state was read at the key before it decayed; it decays first.",
    ),
    Mistake(
        name="delta-correction-missing", stages=RULE, part=DELTA_RULE,
        wrong=_token_by_token(lambda state, t: t.add(t.decay * state, t.beta * t.v)),
        diagnosis="Values were added whole (plain linear attention); subtract the state's value at the key.",
    ),
    Mistake(
        name="delta-beta-on-value-only", stages=RULE, part=DELTA_RULE,
        wrong=_token_by_token(lambda state, t: t.add(t.decay * state, t.beta * t.v - t.k @ (t.decay * state))),
        diagnosis="beta multiplied the value alone; it multiplies the value minus the state's value at the key.",
    ),
    Mistake(
        name="delta-read-before-write", stages=("delta_out",), part=DELTA_RULE, wrong=_with_step(read_before_write),
        diagnosis="Queries read the state before their token was written; write the token first.",
    ),
    Mistake(
        name="delta-value-heads-tiled", stages=RULE, part=DELTA_RULE, wrong=_with_inputs(_tile), applies_to=_has_groups,
        diagnosis="Value head h read key head h % k_heads; it is h // (v_heads / k_heads).",
    ),
    Mistake(
        name="delta-state-in-bfloat16", stages=RULE, wrong=state_in_bfloat16, rounds=True,
        diagnosis="The state was rounded to bfloat16 at every token; keep it in float32.",
    ),
    Mistake(
        name="delta-state-reset-between-chunks", stages=RULE, wrong=forgotten_between_chunks, cases=("near",),
        diagnosis="The state was emptied every 64 tokens; a chunk continues with the state of the previous chunk.",
    ),
    Mistake(
        name="delta-past-forgotten", stages=RULE, after_cached=True, part=DELTA_RULE,
        wrong=_with_inputs(lambda state, **unused: {"state": np.zeros_like(state)}),
        diagnosis="The state was empty at the start of this pass; it continues with the state of the previous pass.",
    ),
    Mistake(
        name="delta-state-transposed", stages=("delta_state",),
        wrong=lambda s, stage: IN_STAGE[DELTA_RULE](lambda right: right, s, stage).swapaxes(1, 2),
        diagnosis="The state lies as (value_dim, key_dim), as in ggml; here it is (key_dim, value_dim).",
    ),
    Mistake(
        name="gated-norm-gated-first", stages=("gated_norm",),
        wrong=_gated_mistake(lambda s, x, z, gain: _normalise(s, x * _silu(z), gain)),
        diagnosis="Heads were gated and then normalised; the norm comes first.",
    ),
    Mistake(
        name="gated-norm-gain-plus-one", stages=("gated_norm",),
        wrong=_gated_mistake(lambda s, x, z, gain: _normalise(s, x, 1 + gain) * _silu(z)),
        diagnosis="The gain was applied as 1 + weight; only this norm of the model stores the gain itself.",
    ),
    Mistake(
        name="gated-norm-sigmoid", stages=("gated_norm",),
        wrong=_gated_mistake(lambda s, x, z, gain: _normalise(s, x, gain) * sigmoid(z)),
        diagnosis="Heads were multiplied by sigmoid(z); it is silu(z) = z * sigmoid(z).",
    ),
    Mistake(
        name="gated-norm-gate-missing", stages=("gated_norm",),
        wrong=_gated_mistake(lambda s, x, z, gain: _normalise(s, x, gain)),
        diagnosis="Heads were normalised but not gated by silu(z).",
    ),
    Mistake(
        name="gated-norm-of-heads-together", stages=("gated_norm",),
        wrong=_gated_mistake(
            lambda s, x, z, gain: x / np.sqrt(np.mean(x * x, (-2, -1), keepdims=True) + s.config.rms_norm_eps)
            * gain * _silu(z)
        ),
        diagnosis="All heads of a token were normalised together; normalise each head separately.",
    ),
)  # fmt: skip
