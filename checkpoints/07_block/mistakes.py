"""Wrong code for a block, by the name of the known mistake: the right code with one wrong line."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from llorch.apps.learn.lessons import PARTS

RIGHT = tomllib.loads(Path(__file__).with_name("hints.toml").read_text(encoding="utf-8"))["block"]["steps"][-1]


def typed(*lines: tuple[str, str]) -> Callable:
    """The right block with some of its lines changed, as the docstring says."""
    text = RIGHT
    for right, wrong in lines:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    names = {"np": np, "Mapping": Mapping, **{exercise.name: exercise.reference for exercise in PARTS.values()}}
    exec(text, names)
    names["block"].__doc__ = "\n".join(f"- {right}\n+ {wrong}" for right, wrong in lines)
    return names["block"]


OUTPUT = 'attention_output(context, w["o_proj"], w.get("o_bias"))'
ATTENTION = f"r = x + {OUTPUT}"
SECOND_NORM = 'h = rms_norm(r, w["ffn_norm"], eps)'
FEED_FORWARD = 'y = r + feed_forward(h, w["gate_proj"], w["up_proj"], w["down_proj"])'
TURNED = "q, k = rope(q, cos, sin), rope(k, cos, sin)"
PROJECTED = 'q, k, v = qkv(h, w["q_proj"], w["k_proj"], w["v_proj"], *biases, *norms, head_dim, eps)'
KEPT = "k, v = append(past_k, past_v, k, v)"
SHARES = "probs = attention_probs(attention_scores(q, k))"

BY_HAND = """rows = np.repeat(k, q.shape[1] // len(k), axis=0)
    scores = np.einsum("thd,hcd->htc", q, rows) / np.float32(np.sqrt({}))
    seen = np.tri(len(x), k.shape[1], k.shape[1] - len(x), dtype=bool)
    probs = {}"""
MASKED = "attention_probs(np.where(seen, scores, -np.float32(np.inf)))"
NORMED_AFTER = """
    if "q_norm" in w:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)"""
COLUMNS = """columns = w["o_proj"].reshape(x.shape[1], {}).swapaxes(1, 2).reshape(w["o_proj"].shape)
    r = x + attention_output(context, columns, w.get("o_bias"))"""

WRONG = {
    "block": {
        "qkv-input-not-normalised": typed((PROJECTED, PROJECTED.replace("qkv(h", "qkv(x"))),
        "qkv-keys-and-values-swapped": typed(
            ('biases = w.get("q_bias"), w.get("k_bias"), w', 'biases = w.get("q_bias"), w.get("v_bias"), w'),
            ('w.get("v_bias")\n', 'w.get("k_bias")\n'),
            (PROJECTED, 'q, k, v = qkv(h, w["q_proj"], w["v_proj"], w["k_proj"], *biases, *norms, head_dim, eps)'),
        ),
        "norm-gain-of-other-norm": typed((SECOND_NORM, 'h = rms_norm(r, w["attn_norm"], eps)')),
        "heads-cut-last": typed(
            (TURNED, "q, k, v = (a.reshape(len(a), head_dim, -1).swapaxes(1, 2) for a in (q, k, v))\n    " + TURNED)
        ),
        "rope-missing": typed((f"    {TURNED}\n", "")),
        "rope-on-values": typed((TURNED, "q, k, v = rope(q, cos, sin), rope(k, cos, sin), rope(v, cos, sin)")),
        "rope-before-norm": typed(
            (PROJECTED, PROJECTED.replace("*norms", "None, None")),
            (TURNED, TURNED + NORMED_AFTER),
        ),
        "cache-keys-before-rope": typed((TURNED, "q = rope(q, cos, sin)")),
        "cache-keys-and-values-exchanged": typed((KEPT, "k, v = append(past_k, past_v, v, k)")),
        "scores-scaled-by-hidden": typed((SHARES, BY_HAND.format("x.shape[1]", MASKED))),
        "scores-scaled-by-hidden-over-heads": typed((SHARES, BY_HAND.format("x.shape[1] // q.shape[1]", MASKED))),
        "mask-after-softmax": typed(
            (SHARES, BY_HAND.format("head_dim", "attention_probs(scores) * seen.astype(q.dtype)"))
        ),
        "context-mixes-keys": typed(("attention_context(probs, v)", "attention_context(probs, k)")),
        "o-proj-heads-interleaved": typed((ATTENTION, COLUMNS.format("head_dim, -1"))),
        "o-proj-columns-with-heads-last": typed((ATTENTION, COLUMNS.format("-1, head_dim"))),
        "attention-residual-from-normed": typed((ATTENTION, ATTENTION.replace("r = x +", "r = h +"))),
        "attention-residual-skipped": typed((ATTENTION, ATTENTION.replace("r = x +", "r ="))),
        "attention-dropped": typed((ATTENTION, "r = x")),
        "ffn-input-not-normalised": typed((FEED_FORWARD, FEED_FORWARD.replace("(h,", "(r,"))),
        "ffn-input-of-attention": typed((f"    {SECOND_NORM}\n", "")),
        "ffn-input-is-attention-output": typed((SECOND_NORM, f"h = {OUTPUT}")),
        "block-residual-from-normed": typed((FEED_FORWARD, FEED_FORWARD.replace("y = r +", "y = h +"))),
        "block-residual-skipped": typed((FEED_FORWARD, FEED_FORWARD.replace("y = r +", "y ="))),
        "block-residual-from-block-input": typed((FEED_FORWARD, FEED_FORWARD.replace("y = r +", "y = x +"))),
        "block-attention-added-twice": typed(
            (ATTENTION, f"attention = {OUTPUT}\n    r = x + attention"),
            (FEED_FORWARD, FEED_FORWARD.replace("y = r +", "y = r + attention +")),
        ),
        "block-feed-forward-dropped": typed(("return y, k, v", "return r, k, v")),
        "block-skipped": typed(("return y, k, v", "return x, k, v")),
    }
}
UNTYPED: dict[str, str] = {}
