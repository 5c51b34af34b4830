"""Differences between correct engines, applied to the port: orders of sums, roundings, passes over a prompt.

A change takes a new `Port` and replaces some of its steps. Nothing here is a mistake.
"""

from collections.abc import Callable

import numpy as np

from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.roundings import Array, bf16, f16, in_float64

Change = Callable[[Port], None]
Product = Callable[[Array, Array], Array]  # (rows, in) and (out, in) to (rows, out)
Rounding = Callable[[Array], Array]


def nothing(_port: Port) -> None:
    """Leave the port as it is."""


def products(product: Product) -> Change:
    """Compute all products by `product`, those of attention too."""

    def change(port: Port) -> None:
        def linear(_original: object, x: Array, name: str) -> Array:
            return port.bias(product(x, port.matrix(name)), name)

        def compare(_old: object, q: Array, keys: Array) -> Array:
            rows = [product(q[:, h], keys[port.source(h, "K")]) for h in range(port.n_q)]
            return np.stack(rows) * q.dtype.type(port.scale)

        def mix(_old: object, p: Array, values: Array) -> Array:
            return np.stack([product(p[h], values[port.source(h, "V")].T) for h in range(port.n_q)])

        port.around("linear", linear)
        port.around("compare", compare)
        port.around("mix", mix)

    return change


def of_matrices(rounding: Rounding) -> Change:
    """Round the inputs of products with matrices, as llama.cpp does to suit the type of the weights."""
    return lambda port: port.around("linear", lambda old, x, name: old(rounding(x), name))


def inputs(rounding: Rounding) -> Change:
    """Round both inputs of all products."""
    return products(lambda x, w: rounding(x) @ rounding(w).T)


def activations(rounding: Rounding) -> Change:
    """Round every activation when it is written, cosines and sines too."""

    def change(port: Port) -> None:
        port.around("note", lambda old, name, array: old(name, rounding(array)))
        port.around("tables", lambda old, places: rounding(old(places)))

    return change


def dumped(rounding: Rounding) -> Change:
    """Round only the dump; the engine continues with the unrounded array."""

    def note(old: Callable[..., Array], name: str, array: Array) -> Array:
        old(name, rounding(array))
        return array

    return lambda port: port.around("note", note)


def cached(rounding: Rounding) -> Change:
    """Round keys and values when they enter the cache."""
    return lambda port: port.around("remember", lambda old, k, v: old(rounding(k), rounding(v)))


def cached_as_ggml(port: Port) -> None:
    """Use a float16 cache like ggml, which also rounds the arrays that it multiplies with keys and values."""
    cached(f16)(port)
    port.around("compare", lambda old, q, keys: old(f16(q), keys))
    port.around("mix", lambda old, p, values: old(f16(p), values))


def weights(rounding: Rounding) -> Change:
    """Round weights when they are loaded; gains of norms, which are no matrices, stay as they are."""

    def change(port: Port) -> None:
        for arrays in (port.top, *port.layers):
            arrays |= {name: rounding(array) for name, array in arrays.items() if array.ndim > 1}

    return change


def float64_throughout(port: Port) -> None:
    """Compute everything in float64."""
    for arrays in (port.top, *port.layers):
        arrays |= {name: array.astype(np.float64) for name, array in arrays.items()}
    vars(port).update(all_keys=port.all_keys.astype(np.float64), all_values=port.all_values.astype(np.float64))

    def note(old: Callable[..., Array], name: str, array: Array) -> Array:
        old(name, array.astype(np.float32))
        port.tape[-1][next(reversed(port.tape[-1]))] = array.copy()
        return array

    def tables(_original: object, places: Array) -> Array:
        angles = places[:, None, None] * port.speeds()
        return np.stack([np.cos(angles), np.sin(angles)])

    port.around("note", note)
    port.around("tables", tables)
    products(in_float64)(port)


def gain_after_rounding(rounding: Rounding) -> Change:
    """Round the row before it is multiplied with the gain, as transformers does in half precision."""

    def norm(_original: object, port: Port, x: Array, name: str) -> Array:
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return rounding(x / np.sqrt(mean + np.float32(port.eps))) * port.gain(name)

    return lambda port: port.around("norm", lambda old, x, name: norm(old, port, x, name))


def angles(multiply: Callable[[Array, Array], Array]) -> Change:
    """Compute angles from positions and speeds by `made`, each engine in its way."""

    def change(port: Port) -> None:
        def tables(_original: object, places: Array) -> Array:
            angle = multiply(places, port.speeds())[:, None, :]
            return np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)

        port.around("tables", tables)

    return change


def float32_angles(places: Array, speeds: Array) -> Array:
    """Multiply a float32 position by a float32 speed."""
    return places[:, None].astype(np.float32) * speeds.astype(np.float32)


def running_angles(places: Array, speeds: Array) -> Array:
    """Compute angles as ggml does: the angle of each pair is the last one times a factor, in float32."""
    factors = np.tile((speeds[1:] / speeds[:-1]).astype(np.float32), (len(places), 1))
    first = (places * speeds[0]).astype(np.float32)
    return np.cumprod(np.column_stack([first, factors]), axis=-1)


def powers_of_two(port: Port) -> None:
    """Compute exponentials as powers of two, as kernels on accelerators do."""
    log2e = np.float32(1.4426950408889634)

    def share(_original: object, scores: Array) -> Array:
        e = np.exp2((scores - scores.max(axis=-1, keepdims=True)) * log2e)
        return e * (1 / e.sum(axis=-1, keepdims=True))

    port.around("share", share)
    port.around("gated", lambda _old, g, u: g * (1 / (1 + np.exp2(-g * log2e))) * u)


def divided_by_root(port: Port) -> None:
    """Divide norms by the root of a mean that is summed in another order."""

    def norm(_original: object, x: Array, name: str) -> Array:
        mean = np.cumsum(np.square(x), axis=-1)[..., -1:] / np.float32(x.shape[-1])
        return port.gain(name) * x / np.sqrt(mean + np.float32(port.eps))

    port.around("norm", norm)


def joined(port: Port) -> None:
    """Compute gate and up as one product, and q, k and v as another."""
    groups = {"q": "qkv", "g": "gu"}
    parts: dict[str, Array] = {}

    def linear(old: Callable[..., Array], x: Array, name: str) -> Array:
        if name in groups:
            matrices = [port.matrix(part) for part in groups[name]]
            ends = np.cumsum([len(matrix) for matrix in matrices])[:-1]
            parts.update(zip(groups[name], np.split(x @ np.concatenate(matrices).T, ends, axis=-1), strict=True))
        return port.bias(parts.pop(name), name) if name in parts else old(x, name)

    port.around("linear", linear)


def scaled_queries(port: Port) -> None:
    """Multiply the scale into the queries, not into the scores."""
    scale, port.scale = np.float32(port.scale), 1.0
    port.around("compare", lambda old, q, keys: old(q * scale, keys))


def online(size: int) -> Change:
    """Compute attention over `size` keys at a time, without scores or probabilities."""

    def change(port: Port) -> None:
        latest: list[Array] = []

        def compare(old: Callable[..., Array], q: Array, keys: Array) -> Array:
            latest[:] = [old(q, keys)]
            return latest[0]

        def mix(_original: object, _p: Array, values: Array) -> Array:
            for name in "SP":
                del port.tape[-1][f"blk{port.layer}.{name}"]
            (scores,) = latest
            scores = np.where(port.visible(*scores.shape[1:]), scores, np.float32(-np.inf))
            return np.stack([_online(scores[h], values[port.source(h, "V")], size) for h in range(port.n_q)])

        port.around("compare", compare)
        port.around("mix", mix)

    return change


def _online(scores: Array, values: Array, size: int) -> Array:
    largest = np.full((len(scores), 1), -np.inf, scores.dtype)
    total, output = np.zeros_like(largest), np.zeros((len(scores), values.shape[-1]), scores.dtype)
    for start in range(0, len(values), size):
        chunk = scores[:, start : start + size]
        maximum = np.maximum(largest, chunk.max(axis=-1, keepdims=True))
        e, factor = np.exp(chunk - maximum), np.exp(largest - maximum)
        total = total * factor + e.sum(axis=-1, keepdims=True)
        output = output * factor + e @ values[start : start + size]
        largest = maximum
    return output / total


def together(*changes: Change) -> Change:
    """Apply all changes, one after the other."""

    def change(port: Port) -> None:
        for change in changes:
            change(port)

    return change


in_bfloat16 = together(weights(bf16), activations(bf16))
