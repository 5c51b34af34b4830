"""A right engine that shares nothing with llorch but the numbers of a file: Llama and Mistral in NumPy, float32."""

from collections.abc import Mapping, Sequence

import numpy as np

from llorch.engines.dumps.raw import RawArray, RawDump
from llorch.families.config import Llama3Scaling
from llorch.files import Weights
from llorch.stages.stage_ref import Tokens


class FreshEngine:
    """One sequence; a windowed cache forgets keys that no later token sees, as that of transformers does."""

    def __init__(self, weights: Weights) -> None:
        self.w, self.c = weights, weights.config
        self.window = weights.config.layer(0).window
        self.past: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.position = 0

    def run(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Every array that an engine would show of a pass, under names of the stage table."""
        shown = {"embed": self.w["embed_tokens"][list(ids)]}
        positions = np.arange(self.position, self.position + len(ids))
        x = shown["embed"]
        for i in range(self.c.n_layers):
            made = self.layer(i, x, positions)
            shown |= {f"l{i}.{name}": array for name, array in made.items()}
            x = made["block_out"]
        self.position += len(ids)
        shown["final_norm"] = self.norm(x, self.w["final_norm"])
        head = self.w["embed_tokens" if self.c.tie_word_embeddings else "lm_head"]
        return shown | {"logits": self.product(shown["final_norm"], head.T)}

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b

    def total(self, x: np.ndarray) -> np.ndarray:
        """The sum of the last axis, which stays."""
        return x.sum(-1, keepdims=True)

    def norm(self, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        mean = self.total(x * x) / np.float32(x.shape[-1])
        return x * gain / np.sqrt(mean + np.float32(self.c.rms_norm_eps))

    def turned(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        speeds = self.c.rope_theta ** (-np.arange(half) / half)
        if isinstance(self.c.rope_scaling, Llama3Scaling):
            speeds = np.array([slowed(speed, self.c.rope_scaling) for speed in speeds])
        angles = positions[:, None, None] * speeds
        turn = np.exp(1j * angles) * (x[..., :half] + 1j * x[..., half:])
        return np.concatenate([turn.real, turn.imag], -1).astype(np.float32)

    def layer(self, i: int, x: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
        w, t, heads = self.w.layer(i), len(x), self.c.n_heads
        a = self.norm(x, w["attn_norm"])
        arrays = {"attn_norm": a, **{f"{part}_proj": self.product(a, w[f"{part}_proj"].T) for part in "qkv"}}
        q, k, v = (arrays[f"{part}_proj"].reshape(t, -1, self.c.head_dim) for part in "qkv")
        q, k = arrays["q_rope"], arrays["k_rope"] = self.turned(q, positions), self.turned(k, positions)
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        if i in self.past:
            k, v = (np.concatenate(both, axis=1) for both in zip(self.past[i], (k, v), strict=True))
        kept = slice(None) if self.window is None else slice(1 - self.window, None)
        self.past[i] = k[:, kept], v[:, kept]
        keys = np.arange(positions[-1] + 1 - k.shape[1], positions[-1] + 1)
        hidden = keys > positions[:, None]
        if self.window is not None:
            hidden |= keys <= positions[:, None] - self.window
        by_query = [np.repeat(cache, heads // self.c.n_kv_heads, axis=0) for cache in (k, v)]
        scores = self.product(q.swapaxes(0, 1), by_query[0].swapaxes(1, 2)) / np.float32(self.c.head_dim**0.5)
        scores = np.where(hidden, np.float32(-np.inf), scores)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        probs /= self.total(probs)
        context = self.product(probs, by_query[1]).swapaxes(0, 1).reshape(t, -1)
        out = self.product(context, w["o_proj"].T)
        h = self.norm(x + out, w["ffn_norm"])
        gate, up = self.product(h, w["gate_proj"].T), self.product(h, w["up_proj"].T)
        act = gate / (1 + np.exp(-gate)) * up
        ffn_out = self.product(act, w["down_proj"].T)
        return arrays | {
            "k_cache": k, "v_cache": v, "attn_scores": scores, "attn_probs": probs, "attn_context": context,
            "attn_out": out, "attn_residual": x + out, "ffn_norm": h, "ffn_gate": gate, "ffn_up": up, "ffn_act": act,
            "ffn_out": ffn_out, "block_out": x + out + ffn_out,
        }  # fmt: skip


class OneLane(FreshEngine):
    """Adds all terms one by one, as plain loops do."""

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
        for term in range(a.shape[-1]):
            total += a[..., term, None] * b[..., term, None, :]
        return total

    def total(self, x: np.ndarray) -> np.ndarray:
        return np.cumsum(x, -1)[..., -1:]


def slowed(speed: float, rope: Llama3Scaling) -> float:
    """Stretch the wavelength of a pair as Meta's code for Llama 3.1 does."""
    wavelength = 2 * np.pi / speed
    if wavelength < rope.original_max_position_embeddings / rope.high_freq_factor:
        return speed
    if wavelength > rope.original_max_position_embeddings / rope.low_freq_factor:
        return speed / rope.factor
    share = rope.original_max_position_embeddings / wavelength - rope.low_freq_factor
    share /= rope.high_freq_factor - rope.low_freq_factor
    return (1 - share) * speed / rope.factor + share * speed


def raw_dump_of(passes: Sequence[tuple[Tokens, Mapping[str, np.ndarray]]]) -> RawDump:
    """Build the dump of an engine that shows some of its passes."""
    arrays = [
        (number, RawArray(name, "float32", array.shape, lambda array=array: array))
        for number, (_, shown) in enumerate(passes)
        for name, array in shown.items()
    ]
    return RawDump("fresh", tuple(arrays), tuple(tokens for tokens, _ in passes))
