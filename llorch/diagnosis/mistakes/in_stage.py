"""Compute a stage (named array of the forward pass) with the function of a mistake instead of the right one.

`IN_STAGE` maps `Mistake.part`, the name of the replaced function, to the code of its stages. Learners write these
functions in lessons, and they are called with keyword arguments only. `wrong` maps the right function to the wrong one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llorch.diagnosis.mistakes.planting import Replacement, replaced
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.families.config import YarnScaling
from llorch.model.blocks import forward
from llorch.model.blocks.delta_net import heads
from llorch.model.blocks.positions import seen_from
from llorch.model.cache import KVCache
from llorch.ops.attention import attention_context, attention_probs, attention_scores
from llorch.ops.delta_rule import delta_rule, l2_norm, log_decay
from llorch.ops.embedding import embedding
from llorch.ops.linear import linear
from llorch.ops.rms_norm import rms_norm
from llorch.ops.rope import frequencies, scale_frequencies
from llorch.ops.routing import linear_by_expert, mixed, top_k, topk_weights
from llorch.ops.sampling import greedy, probabilities
from llorch.ops.short_conv import short_conv
from llorch.ops.swiglu import swiglu
from llorch.stages.table import BY_NAME, DENSE_PRODUCTS, STAGES, output_matrix, rope_input

InStage = Callable[[Replacement, Any, str], np.ndarray]  # (replacement, stage inputs, stage name) to array

# stage (also the name of its gain) -> stage that it normalises
NORMS = {stage.name: stage.dense_input for stage in STAGES if stage.function == "llorch.ops.rms_norm.rms_norm"}
PROJECTIONS = {stage.name: (stage.inputs[0], stage.matrix) for stage in DENSE_PRODUCTS if stage.in_layer}
HEAD_NORMS = ("q_norm", "k_norm")
QUERY_AND_KEY = BY_NAME["attn_scores"].inputs
(KEY,) = BY_NAME["k_cache"].inputs
LENGTHS = ("q_l2", "k_l2")
ROTATED = ("q_rope", "k_rope")
BY_EXPERT = {"expert_gate": "gate_proj", "expert_up": "up_proj", "expert_out": "down_proj"}  # stage -> matrix


def normalised_rows(s: StageInputs, stage: str) -> np.ndarray:
    """Return the input rows of a norm, in float64."""
    return (s.heads(NORMS[stage]) if stage in HEAD_NORMS else s[NORMS[stage]]).astype(np.float64)


def projected(s: StageInputs, stage: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return input, weight and bias of a projection."""
    if stage == "logits":
        return s["final_norm"], s.weights[output_matrix(s.config)], None
    x, projection = PROJECTIONS[stage]
    return s[x], s.weights[projection], s.weights.get(f"{projection.removesuffix('_proj')}_bias")


def rotated_heads(s: StageInputs, stage: str) -> np.ndarray:
    """Return the queries or keys before RoPE, (seq, heads, head_dim)."""
    return s.heads(rope_input(stage[0], s.config))


def unscaled_frequencies(s: StageInputs) -> np.ndarray:
    """Compute the frequencies of RoPE without the model's scaling."""
    return frequencies(s.config.rotated, s.config.rope_theta)


def scaled_frequencies(s: StageInputs) -> np.ndarray:
    """Compute the frequencies of RoPE with the model's scaling."""
    head_dim, theta = s.config.rotated, s.config.rope_theta
    return scale_frequencies(frequencies(head_dim, theta), s.config.rope_scaling, head_dim=head_dim, theta=theta)


def rotate(s: StageInputs, x: np.ndarray, inv_freq: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
    """Apply RoPE with other frequencies, or at other positions."""
    return s.turn(x, *apply_gain(s, *rope_tables(s.positions if positions is None else positions, inv_freq)))


def rope_tables(positions: np.ndarray, inv_freq: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute cosines and sines of every position and pair, (seq, half)."""
    angle = positions[:, None] * inv_freq
    return np.cos(angle), np.sin(angle)


def apply_gain(s: StageInputs, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Multiply cosines and sines by the model's YaRN attention factor."""
    gain = s.config.rope_scaling.attention_factor if isinstance(s.config.rope_scaling, YarnScaling) else 1.0
    return gain * cos, gain * sin


def key_heads(s: StageInputs, stage: str) -> np.ndarray:
    """Return queries or keys of a delta net before their norm, in float64."""
    return heads(s["conv_out"], s.config)[LENGTHS.index(stage)].astype(np.float64)


def rows_of_cache(s: StageInputs, stage: str) -> tuple[np.ndarray, np.ndarray]:
    """Return cached and new rows of one cache, (kv_heads, tokens, head_dim) each."""
    past, new = ("past_k", KEY) if stage == "k_cache" else ("past_v", "v_proj")
    return s[past], s.heads(new).swapaxes(0, 1)


def _rms_norm(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    gain = s.weights[stage].astype(np.float64)
    return wrong(rms_norm)(x=normalised_rows(s, stage), weight=gain, eps=s.config.rms_norm_eps)


def _frequencies(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Return the heads after RoPE with its frequencies replaced, without the model's scaling."""
    inv_freq = wrong(frequencies)(head_dim=s.config.rotated, theta=s.config.rope_theta)
    return rotate(s, rotated_heads(s, stage), inv_freq)


def _scale_frequencies(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Return the heads after RoPE with the scaling of its frequencies replaced."""
    inv_freq = unscaled_frequencies(s)
    scale = wrong(lambda inv_freq, factors: inv_freq / factors)
    return rotate(s, rotated_heads(s, stage), scale(inv_freq=inv_freq, factors=inv_freq / scaled_frequencies(s)))


def _rope_tables(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Return the heads after RoPE with its tables of cosines and sines replaced."""
    tables = wrong(rope_tables)(positions=s.positions, inv_freq=scaled_frequencies(s))
    return s.turn(rotated_heads(s, stage), *apply_gain(s, *tables))


def _rope(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    cos, sin = apply_gain(s, *rope_tables(s.positions, scaled_frequencies(s)))
    return wrong(s.turn)(x=rotated_heads(s, stage), cos=cos, sin=sin)


def _append(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Compute one of the two caches, `k_cache` or `v_cache`, with the append replaced."""
    past, new = rows_of_cache(s, stage)
    return wrong(lambda past, new: np.concatenate([past, new], axis=1))(past=past, new=new)


def _attention_scores(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Compute the scores with this function replaced, masked to the layer's window, or the probabilities from them."""
    keys = s["k_cache"]
    scores = wrong(attention_scores)(q=s.heads(QUERY_AND_KEY[0]), k=keys)
    first = seen_from(s.kind, s.positions, keys.shape[1])
    if first is not None:
        scores = np.where(np.arange(keys.shape[1]) < first[:, None], -np.inf, scores)
    return scores if stage == "attn_scores" else attention_probs(scores)


def _log_decay(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    return wrong(log_decay)(a=s["a_in"].astype(np.float64), dt_bias=s.weights["dt_bias"], decay=s.weights["decay"])


def _delta_rule(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Return the outputs of the replaced delta rule, or its last state for the stage `delta_state`."""
    out, state = wrong(delta_rule)(
        q=s["q_l2"], k=s["k_l2"], v=heads(s["conv_out"], s.config)[2], beta=s["beta"], g=s["log_decay"],
        state=s["past_delta"],
    )  # fmt: skip
    return state if stage == "delta_state" else out


def _linear(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    x, weight, bias = projected(s, stage)
    return wrong(linear)(x=x, weight=weight, bias=bias)


def _feed_forward(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Compute the gate or up projection; the replaced function gets both matrices and may exchange them."""

    def right(h: np.ndarray, gate_proj: Any, up_proj: Any) -> np.ndarray:
        return linear(h, gate_proj if stage == "ffn_gate" else up_proj)

    return wrong(right)(h=s["ffn_norm"], gate_proj=s.weights["gate_proj"], up_proj=s.weights["up_proj"])


def _expert_outputs(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Compute one of the three projections of the selected experts; the replaced function gets all matrices."""
    matrices = {name: s.weights[f"experts_{name}"] for name in ("gate_proj", "up_proj", "down_proj")}

    def right(h: np.ndarray, ids: np.ndarray, **matrices: Any) -> np.ndarray:
        return linear_by_expert(h, ids, matrices[BY_EXPERT[stage]])

    h = s["expert_act" if stage == "expert_out" else "expert_in|ffn_norm"]
    return wrong(right)(h=h, ids=s["topk_ids"], **matrices)


def _top_k(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    assert s.config.experts is not None
    return wrong(top_k)(scores=s["router_probs"], k=s.config.experts.n_experts_per_token)


def _topk_weights(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    assert s.config.experts is not None
    normalised = s.config.experts.norm_topk_prob
    return wrong(topk_weights)(probs=s["router_probs"], ids=s["topk_ids"], normalised=normalised)


def _mixed(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Return the layer's feed-forward output with the weighted sum of experts replaced."""
    assert s.config.experts is not None
    shared = s["shared_out"] if s.config.experts.shared_size > 0 else None
    gate = s["shared_gate"] if s.config.experts.shared_gate else None
    return wrong(mixed)(outs=s["expert_out"], weights=s["topk_weights"], shared=shared, gate=gate)


def _logits(wrong: Replacement, s: StageInputs, stage: str) -> np.ndarray:
    """Compute the logits from the final norm."""

    def right(lm_head: Any, embed_tokens: Any, **unused: object) -> np.ndarray:
        return linear(s["final_norm"], embed_tokens if lm_head is None else lm_head)

    tied, table = s.config.tie_word_embeddings, s.weights["embed_tokens"]
    return wrong(right)(lm_head=None if tied else s.weights[output_matrix(s.config)], embed_tokens=table)


def _filter(name: str) -> InStage:
    """Make the function that runs the sampler with one filter replaced."""

    def in_stage(wrong: Replacement, s: Any, step: str) -> np.ndarray:
        with replaced(f"llorch.ops.sampling.{name}", wrong):
            return s.probabilities()

    return in_stage


def _penalise(wrong: Replacement, s: Any, step: str) -> np.ndarray:
    """Return the sampler's probabilities with the repetition penalty replaced."""

    def replacement(right: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        return wrong(lambda logits, history, penalty: right(logits, history.tolist(), penalty=penalty))

    return _filter("penalise")(replacement, s, step)


def _distribution(wrong: Replacement, s: Any, step: str) -> np.ndarray:
    """Return the probabilities of the next token with the sampler's whole computation replaced."""

    def right(logits: np.ndarray, history: np.ndarray, penalty: float, **changed: Any) -> np.ndarray:
        return probabilities(logits, replace(s.settings, repetition_penalty=penalty, **changed), history.tolist())

    settings = {name: getattr(s.settings, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    history, penalty = np.asarray(s.history, np.int64), s.settings.repetition_penalty
    return wrong(right)(logits=s.row, history=history, penalty=penalty, **settings)


def _generate(wrong: Replacement, g: Any, step: str) -> np.ndarray:
    """Return the ids of a wrong greedy loop on a model; its argument `step` runs new ids after the cached ones."""
    cache = g.empty_cache()

    def run(new: Sequence[int]) -> np.ndarray:
        return forward(np.asarray(new), g.weights, cache, last_only=True)[0]

    ids = wrong(greedy_loop)(step=run, prompt=np.asarray(g.prompt), max_tokens=g.n_tokens)
    return np.asarray([*ids], np.int64)


def greedy_loop(step: Callable[[Any], np.ndarray], prompt: np.ndarray, max_tokens: int) -> Iterator[int]:
    """Run the new ids, select the most likely token, run that token next."""
    new = prompt.tolist()
    for _ in range(max_tokens):
        new = [greedy(step(new))]
        yield new[0]


def _positions(wrong: Replacement, g: Any, step: str) -> np.ndarray:
    """Return the ids of the right loop on a cache that returns wrong positions."""
    positions = wrong(lambda n_before, n_new: np.arange(n_before, n_before + n_new))

    class WrongCache(KVCache):
        def next_positions(self, n_tokens: int) -> np.ndarray:
            return positions(n_before=self.length, n_new=n_tokens)

    return g.loop(g.prompt, WrongCache(g.weights.config, g.weights.dtype))


IN_STAGE: Mapping[str, InStage] = {
    "embedding": lambda wrong, s, stage: wrong(lambda ids, table: embedding(ids, table))(
        ids=s.ids, table=s.weights["embed_tokens"]
    ),
    "rms_norm": _rms_norm,
    "frequencies": _frequencies,
    "scale_frequencies": _scale_frequencies,
    "rope_tables": _rope_tables,
    "rope": _rope,
    "append": _append,
    "attention_scores": _attention_scores,
    "attention_probs": lambda wrong, s, stage: wrong(attention_probs)(scores=s["attn_scores"]),
    "attention_context": lambda wrong, s, stage: wrong(attention_context)(probs=s["attn_probs"], v=s["v_cache"]),
    "short_conv": lambda wrong, s, stage: wrong(short_conv)(
        x=s["qkv_in"], kernel=s.weights["conv"], state=s["past_conv"]
    ),
    "l2_norm": lambda wrong, s, stage: wrong(l2_norm)(x=key_heads(s, stage)),
    "log_decay": _log_decay,
    "delta_rule": _delta_rule,
    "linear": _linear,
    "feed_forward": _feed_forward,
    "expert_outputs": _expert_outputs,
    "swiglu": lambda wrong, s, stage: wrong(swiglu)(gate=s["ffn_gate"], up=s["ffn_up"]),
    "top_k": _top_k,
    "topk_weights": _topk_weights,
    "mixed": _mixed,
    "logits": _logits,
    "last_row": lambda wrong, s, step: wrong(lambda logits: logits[-1])(logits=s.logits),
    "argmax": lambda wrong, s, step: np.asarray([wrong(greedy)(row=s.row)]),
    "penalise": _penalise,
    **{name: _filter(name) for name in ("keep_top_k", "keep_top_p", "keep_min_p")},
    "distribution": _distribution,
    "positions": _positions,
    "generate": _generate,
}
