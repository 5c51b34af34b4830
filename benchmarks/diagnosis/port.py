"""Independent port of Llama and Qwen: float32 NumPy, head by head, with its own tensor names.

Only the numbers of the file come through llorch. The port is right; `bugs` injects mistakes by replacing one of its
steps, which are methods, by changing a setting, or by changing a weight. Its arrays are on the tape, a dict for each
pass:

    tok   blk0.xn q_lin k_lin v_lin [q_unit k_unit] q_rot k_rot K V S P mix att mid xm g u gu ffn out   blk1...   fin lg
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from llorch.families.config import ModelConfig
from llorch.files import open_weights
from llorch.files.convert import convert
from llorch.files.quant import GGMLType
from llorch.model.model import find
from llorch.runtime.builtin import builtin_path

OWN_NAMES = {  # stage of the table -> name on the tape, after `blk3.` in a layer
    "embed": "tok", "attn_norm": "xn", "q_proj": "q_lin", "k_proj": "k_lin", "v_proj": "v_lin", "q_norm": "q_unit",
    "k_norm": "k_unit", "q_rope": "q_rot", "k_rope": "k_rot", "k_cache": "K", "v_cache": "V", "attn_scores": "S",
    "attn_probs": "P", "attn_context": "mix", "attn_out": "att", "attn_residual": "mid", "ffn_norm": "xm",
    "ffn_gate": "g", "ffn_up": "u", "ffn_act": "gu", "ffn_out": "ffn", "block_out": "out", "final_norm": "fin",
    "logits": "lg",
}  # fmt: skip
MATRICES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "g", "up_proj": "u", "down_proj": "d",
}  # fmt: skip
_VECTORS = {
    "attn_norm": "xn", "q_bias": "q.b", "k_bias": "k.b", "v_bias": "v.b", "q_norm": "q_unit", "k_norm": "k_unit",
    "ffn_norm": "xm",
}  # fmt: skip
_OUTSIDE = ("tok", "fin", "lg")
_SLOTS = 2048  # number of slots of the cache


@cache
def model_path(model: str) -> Path:
    """Return the file of a model: built in, at a path, or built in and quantised, as in `micro-qwen2@Q4_0`."""
    name, in_blocks, blocks = model.partition("@")
    if not in_blocks:
        return find(name)
    path = Path(_folder().name) / f"{model}.gguf"
    convert(builtin_path(name), path, ggml_type=GGMLType[blocks])
    return path


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="llorch-corpus-")


@cache
def _file(model: str) -> tuple[ModelConfig, Mapping[str, np.ndarray], Sequence[Mapping[str, np.ndarray]]]:
    weights = open_weights(model_path(model))
    config = weights.config
    top = {"tok": weights["embed_tokens"], "fin": weights["final_norm"]}
    top["lg"] = top["tok"] if config.tie_word_embeddings else weights["lm_head"]
    names = MATRICES | _VECTORS
    layers = [
        {names[name]: array for name, array in weights.layer(layer).items()} for layer in range(config.n_layers)
    ]  # (out, in), rows of heads half-split
    return config, top, layers


class Port:
    """Engine with an empty cache."""

    def __init__(self, model: str, start: int = 0) -> None:
        """Load a model, see `model_path`; the first token will be at position `start`."""
        self.model = model
        config, top, layers = _file(model)
        self.hidden, self.n_q, self.n_kv, self.d = (
            config.hidden_size,
            config.n_heads,
            config.n_kv_heads,
            config.head_dim,
        )
        self.eps, self.theta = config.rms_norm_eps, config.rope_theta
        self.stretch: dict[str, float] = {}  # llama3: factor, low, high, context
        if config.rope_scaling is not None:
            self.stretch = {"factor": 8, "low": 1, "high": 4, "context": 8192}
        self.scale = 1 / math.sqrt(self.d)
        self.top, self.layers = dict(top), [dict(layer) for layer in layers]
        self.start, self.filled, self.n_pass, self.layer = start, 0, 0, 0
        shape = (len(layers), _SLOTS, self.n_kv, self.d)
        self.all_keys, self.all_values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.tape: list[dict[str, np.ndarray]] = []

    def around(self, step: str, new: Callable[..., object], layer: int | None = None) -> None:
        """Replace a step, in all layers or one; the new function gets the old one first, then the step's arguments."""
        original = getattr(self, step)

        def replacement(*args: object) -> object:
            return new(original, *args) if layer in (None, self.layer) else original(*args)

        setattr(self, step, replacement)

    def note(self, name: str, array: np.ndarray) -> np.ndarray:
        """Write an array onto the tape and return it."""
        assert array.dtype == np.float32, name
        self.tape[-1][name if name in _OUTSIDE else f"blk{self.layer}.{name}"] = array.copy()
        return array

    def noted(self, name: str) -> np.ndarray:
        """Read an array of this layer and pass from the tape."""
        return self.tape[-1][f"blk{self.layer}.{name}"]

    def run(self, ids: Sequence[int]) -> np.ndarray:
        """Run one pass over new tokens, after the tokens of earlier passes; return the logits of each token."""
        self.tape.append({})
        self.layer = 0
        x = self.note("tok", self.embed(np.asarray(ids)))
        positions = self.places(len(ids))
        for layer in range(len(self.layers)):
            self.layer = layer
            x = self.note("out", self.block(x, positions))
        x = self.note("fin", self.norm(x, "fin"))
        x = self.note("lg", self.run_head(x))
        self.filled += len(ids)
        self.n_pass += 1
        return x

    def block(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute one layer: attention, then the gated feed-forward part."""
        self.block_input = x
        h = self.note("xn", self.norm(x, "xn"))
        mid = self.note("mid", self.add(x, self.attend(h, positions), "mid"))
        h = self.note("xm", self.norm(mid, "xm"))
        g, u = self.note("g", self.linear(h, "g")), self.note("u", self.linear(h, "u"))
        gu = self.note("gu", self.gated(g, u))
        return self.add(mid, self.note("ffn", self.linear(gu, "d")), "out")

    def attend(self, h: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Compute attention of all heads."""
        q, k, v = (self.note(f"{name}_lin", self.linear(h, name)) for name in "qkv")
        q, k, v = self.cut(q, "q"), self.cut(k, "k"), self.cut(v, "v")  # (tokens, heads, d)
        if "q_unit" in self.layers[self.layer]:
            q, k = self.note("q_unit", self.norm(q, "q_unit")), self.note("k_unit", self.norm(k, "k_unit"))
        q, k = self.note("q_rot", self.turn(q, positions, "q")), self.note("k_rot", self.turn(k, positions, "k"))
        keys, values = self.remember(k, v)
        keys, values = self.note("K", keys), self.note("V", values)
        s = self.note("S", self.hide(self.compare(q, keys)))
        p = self.note("P", self.share(s))
        mixed = self.note("mix", self.join(self.mix(p, values)))
        return self.note("att", self.linear(mixed, "o"))

    def run_head(self, x: np.ndarray) -> np.ndarray:
        """Compute the logits."""
        return self.linear(x, "lg")

    # The steps. ---------------------------------------------------------------------------------------------------

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Look up the rows of the embedding table."""
        return self.top["tok"][ids]

    def places(self, n: int) -> np.ndarray:
        """List the positions of the new tokens."""
        return np.arange(n) + self.filled + self.start

    def gain(self, name: str) -> np.ndarray:
        """Return the factors of a norm."""
        return self.top["fin"] if name == "fin" else self.layers[self.layer][name]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """Normalise the last axis by its root mean square."""
        mean = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        return x * (1 / np.sqrt(mean + np.float32(self.eps))) * self.gain(name)

    def matrix(self, name: str) -> np.ndarray:
        """Return the matrix of a projection, (out, in)."""
        return self.top["lg"] if name == "lg" else self.layers[self.layer][name]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """Apply a projection, and its bias if it has one."""
        return self.bias(x @ self.matrix(name).T, name)

    def bias(self, y: np.ndarray, name: str) -> np.ndarray:
        """Add the bias."""
        bias = self.layers[self.layer].get(f"{name}.b")
        return y if bias is None else y + bias

    def cut(self, x: np.ndarray, name: str) -> np.ndarray:
        """Cut a projection into heads."""
        return x.reshape(len(x), -1, self.d)

    def exponents(self) -> np.ndarray:
        """Compute the exponent of theta for each pair."""
        return np.arange(0, self.d, 2) / self.d

    def speeds(self) -> np.ndarray:
        """Compute the radians per position of each pair."""
        speeds = 1.0 / self.theta ** self.exponents()
        return self.slowed(speeds) if self.stretch else speeds

    def slowed(self, speeds: np.ndarray) -> np.ndarray:
        """Apply the llama3 rule: divide long waves by the factor, keep short ones, and use a ramp between."""
        factor, low, high, context = (self.stretch[key] for key in ("factor", "low", "high", "context"))
        slow = []
        for speed in speeds:
            wave = 2 * math.pi / speed
            if wave < context / high:
                slow.append(speed)
            elif wave > context / low:
                slow.append(speed / factor)
            else:
                smooth = (context / wave - low) / (high - low)
                slow.append((1 - smooth) * speed / factor + smooth * speed)
        return np.array(slow)

    def tables(self, positions: np.ndarray) -> np.ndarray:
        """Compute cosines and sines, (2, tokens, 1, d / 2)."""
        angles = positions[:, None, None] * self.speeds()
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    def turn(self, x: np.ndarray, positions: np.ndarray, name: str) -> np.ndarray:
        """Apply the rotary embedding to queries or keys."""
        cos, sin = self.tables(positions)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def remember(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write into the cache; return all keys and values so far, (kv heads, tokens, d)."""
        end = self.filled + len(k)
        self.all_keys[self.layer, self.filled : end] = k
        self.all_values[self.layer, self.filled : end] = v
        return self.all_keys[self.layer, :end].swapaxes(0, 1), self.all_values[self.layer, :end].swapaxes(0, 1)

    def source(self, head: int, name: str) -> int:
        """Choose the head of the keys `K` or values `V` that a query head reads."""
        return head // (self.n_q // self.n_kv)

    def compare(self, q: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Compute the scaled products, (heads, tokens, context)."""
        scores = [q[:, h] @ keys[self.source(h, "K")].T for h in range(self.n_q)]
        return np.stack(scores) * np.float32(self.scale)

    def visible(self, n: int, context: int) -> np.ndarray:
        """Mark the keys that each query may see, (tokens, context)."""
        return np.arange(context) <= np.arange(context - n, context)[:, None]

    def hide(self, scores: np.ndarray) -> np.ndarray:
        """Apply the causal mask."""
        return np.where(self.visible(*scores.shape[1:]), scores, np.float32(-np.inf))

    def share(self, scores: np.ndarray) -> np.ndarray:
        """Apply the softmax over the keys."""
        exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return exponentials / exponentials.sum(axis=-1, keepdims=True)

    def mix(self, p: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Sum the values by their shares, (heads, tokens, d)."""
        return np.stack([p[h] @ values[self.source(h, "V")] for h in range(self.n_q)])

    def join(self, heads: np.ndarray) -> np.ndarray:
        """Put the heads of a token side by side."""
        return np.concatenate(list(heads), axis=-1)

    def gated(self, g: np.ndarray, u: np.ndarray) -> np.ndarray:
        """Compute SwiGLU."""
        return g / (1 + np.exp(-g)) * u

    def add(self, x: np.ndarray, branch: np.ndarray, name: str) -> np.ndarray:
        """Add the residual connection that makes `mid` or `out`."""
        return x + branch
