"""Verification under ggml numerics: our pass over a file as it is stored, against llama.cpp running that very file.

llama.cpp rounds the inputs of every product to a few bits. A value that lies on the edge between two codes may fall to
one side there and to the other here, for a difference in the seventh digit; a whole code is then added to the sum and
all later stages differ by what quantisation costs. *Chained* and after a cache, such values are found (the two sides
round to different numbers), counted, and replaced by the golden's, so that the chain stays as tight as the isolated
stages. Only a value that was within the limit *before* it was rounded is at an edge: anything else stays ours and fails
its row. *Free* is the run as users get it, with nothing replaced; what flips may do to it is granted, and no more.

Source: llama.cpp ggml/src/ggml-cpu; llorch.ops.rounding.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from llorch.cache import KVCache
from llorch.files import Weights
from llorch.files.quant import ACTIVATION_TYPE
from llorch.forward import forward
from llorch.generate import IdsOnly
from llorch.model import Model
from llorch.ops.rounding import BLOCK_SIZE, ActivationKind, block_sums, round_activations
from llorch.stages import STAGES, Stage, input_key, keys, matrix_of
from llorch.verify.compare import FACTOR, Tolerance, measure
from llorch.verify.goldens import Tolerances
from llorch.verify.limits import Limits, limit, limit_of_softmax, limits_of, off
from llorch.verify.replay import cut
from llorch.verify.verifier import FAIL, TIE, Row, Verifier, exact_row, run

BACKEND = "numpy-ggml"
CHECKPOINT = "13"
PRODUCER = "llamacpp"
EDGE = 2.0**-13  # a quarter of the smallest step of any rounding, relative to the value or to its block's largest

# What a float16 cache rounds: stage -> the input of its that is rounded.
CACHE_ROUNDS = {"k_cache": "k_rope", "v_cache": "v_proj", "attn_scores": "q_rope", "attn_context": "attn_probs"}


@dataclass(frozen=True)
class Adopted:
    """One pass in which values at an edge were replaced by the golden's.

    Attributes:
        trace: What ours computed, before anything was replaced.
        flips: Stage key to values that round to another number, and were replaced.
        refused: Stage key to values that do so though they were farther off than rounding explains; they stay.
    """

    trace: dict[str, np.ndarray] = field(default_factory=dict)
    flips: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def judged(self, key: str, row: Row) -> Row:
        """The row of a stage with its flips; a refused one fails it."""
        row = replace(row, flips=self.flips[key])
        if not self.refused[key]:
            return row
        note = f"{self.refused[key]} values round to other numbers and were too far off for an edge"
        return replace(row, verdict=FAIL, note=row.note or note)


class QuantisedVerifier(Verifier):
    """Judges our forward pass under ggml numerics against llama.cpp, the only engine that has them.

    No limit is made from anything that we computed: all are derived from llama.cpp's numbers, see `quantised_limits`.
    """

    def __init__(self, name: str, weights: Weights, cases: Mapping, evidence: Mapping) -> None:
        """As `Verifier`; the numerics are those of the weights.

        Args:
            name: Name of the model in the rows.
            weights: The model in float32, with its numerics.
            cases: The inputs; `near` ends in llama.cpp's greedy continuation, but for its last token.
            evidence: What llama.cpp showed for them.
        """
        super().__init__(name, weights, cases, evidence, None)
        self.backend = BACKEND
        self._golden = evidence[PRODUCER]
        self._rounded = rounded_stages(weights)

    @cached_property
    def _limits(self) -> Mapping[str, Limits]:
        return {case: limits_of(self.weights, this, self._golden.traces[case]) for case, this in self.cases.items()}

    def tolerances(self) -> Tolerances:
        """Limits of every stage of every layer, by trace key, and of what is made from logits; all derived."""
        out: Tolerances = {}
        for case, made in self._limits.items():
            golden = self._golden.traces[case]
            chained = {key: limit(golden[key], variance) for key, variance in made.chained.items()}
            free = {"logits": limit(golden["logits"], made.free)}
            out[case] = {"isolated": dict(made.isolated), "chained": chained, "free": free}
        if self._golden.probabilities:
            out["near"]["isolated"]["probabilities"] = limit_of_softmax(self._golden.selected_logits.size)
            logits, variance = self._golden.traces["near"]["logits"], self._limits["near"].chained["logits"]
            out["near"]["chained"]["selected_logits"] = limit(logits[-1:], variance[-1:])
        return out

    def _allowed(self, made: Tolerance, case: str, mode: str, stage: str) -> Tolerance:
        return made

    def stage_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Every stage and layer, isolated and chained, where flips are counted; and logits with nothing replaced."""
        for case, allowed in tolerances.items():
            golden, alone, adopted = self._golden.traces[case], self._isolated(case, PRODUCER), self._adopting(case)
            for key, stage, layer in self._keys:
                ours = alone[key].astype(self.weights.dtype)
                yield self._against(golden[key], ours, stage, layer, case, "isolated", allowed["isolated"][key])
            for key, stage, layer in self._keys:
                ours = adopted.trace[key]
                row = self._against(golden[key], ours, stage, layer, case, "chained", allowed["chained"][key])
                yield adopted.judged(key, row)
            free = run(self.weights, self.cases[case])["logits"]
            row = self._against(golden["logits"], free, STAGES[-1], None, case, "free", allowed["free"]["logits"])
            said = f"{adopted.flips.total()} values flip; as it runs, with nothing replaced: error {row.error:.1e}"
            yield replace(row, note=row.note or said)

    def decode_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoint 03: every stage of a pass that continues a cache gives what llama.cpp's single pass gave."""
        for case, whole in self.cases.items():
            for n_cached in sorted({1, len(whole.ids) // 2, len(whole.ids) - 1} - {0, len(whole.ids)}):
                adopted, where = self._adopting(case, n_cached=n_cached), f"{case}, {n_cached} cached"
                for key, stage, layer in self._keys:
                    want = cut(stage, self._golden.traces[case][key], n_cached)
                    allowed = limit(want, cut(stage, self._limits[case].chained[key], n_cached))
                    row = self._against(want, adopted.trace[key], stage, layer, where, "decode", allowed)
                    yield replace(adopted.judged(key, row), checkpoint="03")

    def sampler_rows(self, tolerances: Tolerances) -> Iterator[Row]:
        """Checkpoints 09 to 12, where llama.cpp is also held against its own single pass."""
        for row in super().sampler_rows(tolerances):
            if row.checkpoint == "12":
                yield self._generation_row()
            elif row.verdict == FAIL and row.checkpoint in ("09", "10"):
                yield self._against_one_pass(row, tolerances)
            else:
                yield row

    def _against_one_pass(self, row: Row, tolerances: Tolerances) -> Row:
        """Values flip inside llama.cpp too, so that it differs from its own pass over all tokens, which ours equals.

        With one row of logits it adds in another order than with many rows. It may differ by what flips cost.
        """
        single, selected = self._golden.traces["near"]["logits"][-1:], self._golden.selected_logits[None]
        ours = self._last_row()[None]
        equal = measure(ours, single).within(tolerances["near"]["chained"]["selected_logits"])
        only_flips = measure(selected, single).within(limit(single, self._limits["near"].free[-1:]))
        if not (equal and only_flips and (row.checkpoint == "09" or ours.argmax() == single.argmax())):
            return row
        note = f"{row.note or f'error {row.error:.1e}'}; ours is what llama.cpp gives when it computes all rows at once"
        return replace(row, verdict=TIE, note=note)

    def _generation_row(self) -> Row:
        """Our text as users get it. Where it leaves llama.cpp's, flips must explain it; theirs is then fed on."""
        want, near = self._golden.greedy, self.cases["near"].ids
        n_prompt, at, wrong, notes = len(near) + 1 - len(want), 0, False, []
        while at < len(want) and not wrong:
            ours = self._generated((*near[:n_prompt], *want[:at].tolist()), len(want) - at)
            other = np.flatnonzero(ours != want[at:])
            at += int(other[0]) if other.size else len(ours)
            if other.size:
                got, gap, allowed = ours[other[0]], *self._gap(n_prompt - 1 + at, int(ours[other[0]]), int(want[at]))
                notes.append(
                    f"token {at}: got {got}, want {want[at]}, logit gap {gap:.1e}, flips explain {allowed:.1e}"
                )
                wrong = not gap <= allowed
                at += 1
        row = exact_row(
            self.name, "12", "generation", PRODUCER, len(notes) / len(want), "; ".join(notes), backend=BACKEND
        )
        return replace(row, verdict=TIE) if notes and not wrong else row

    def _generated(self, prompt: Sequence[int], n_tokens: int) -> np.ndarray:
        model = Model(self.weights)
        vars(model)["tokenizer"] = IdsOnly()  # also a file without a vocabulary is judged
        return np.asarray([t.id for t in model.generate(prompt, max_tokens=n_tokens, ignore_eos=True)], np.int64)

    def _gap(self, row: int, got: int, want: int) -> tuple[float, float]:
        """How much less likely llama.cpp's one pass finds our token, and what flips in two other runs may make it."""
        logits, variance = self._golden.traces["near"]["logits"][row], self._limits["near"].free[row]
        gap = abs(float(logits[want]) - float(logits[got]))
        return gap, FACTOR * float(np.sqrt(2 * (variance[want] + variance[got])))

    def _last_row(self) -> np.ndarray:
        return self._adopting("near", last_only=True).trace["logits"][-1]

    def _tokens(self, checkpoint: str, stage: str, producer: str, got: np.ndarray, want: np.ndarray) -> Row:
        """Equal or not; what flips may excuse is judged by `sampler_rows`."""
        return exact_row(self.name, checkpoint, stage, producer, measure(got, want).error, "", backend=self.backend)

    def _text(self, after: Sequence[int], n_tokens: int) -> np.ndarray:
        return self._golden.greedy  # judged by `_generation_row`

    def _against(
        self,
        golden: np.ndarray,
        ours: np.ndarray,
        stage: Stage,
        layer: int | None,
        case: str,
        mode: str,
        allowed: Tolerance,
    ) -> Row:
        arrays = ours, golden, None  # nobody computes the truth of these numerics
        return self._row(stage.checkpoint, stage.name, layer, case, PRODUCER, mode, arrays, allowed)

    def _adopting(self, case: str, *, n_cached: int = 0, last_only: bool = False) -> Adopted:
        """A pass, or the second of two, in which values at an edge are replaced."""
        ids, first = np.asarray(self.cases[case].ids), self.cases[case].first_position
        cache = KVCache(self.weights.config, self.weights.cache_dtype, first_position=first)
        if n_cached:
            self._adopt(case, ids[:n_cached], cache)
        return self._adopt(case, ids[n_cached:], cache, last_only=last_only)

    def _adopt(self, case: str, ids: np.ndarray, cache: KVCache, *, last_only: bool = False) -> Adopted:
        adopted, stop = Adopted(), cache.length + len(ids)
        golden, variances = self._golden.traces[case], self._limits[case].chained

        def keep(name: str, array: np.ndarray) -> np.ndarray:
            adopted.trace[name] = array.astype(self.weights.dtype)
            for kind in self._rounded.get(name, ()):
                want, variance = (_until(part[name], name, array, stop) for part in (golden, variances))
                array, flips, refused = adopt_edges(array, want.reshape(array.shape), kind, off(variance))
                adopted.flips[name] += flips
                adopted.refused[name] += refused
            return array

        adopted.trace["logits"] = forward(ids, self.weights, cache, keep=keep, last_only=last_only)
        return adopted


def rounded_stages(weights: Weights) -> dict[str, set[ActivationKind]]:
    """Which stages are rounded before they are multiplied, and to what.

    Args:
        weights: The model, with its numerics.

    Returns:
        Stage key to activation types; a stage that nothing rounds is absent.
    """
    found: dict[str, set[ActivationKind]] = {}
    config = weights.config
    for _, stage, layer in keys(config):
        if stage.matrix:
            matrix = (weights if layer is None else weights.layer(layer))[matrix_of(stage, config)]
            kind = "F32" if isinstance(matrix, np.ndarray) else matrix.activations
            if kind != "F32":
                found.setdefault(input_key(stage.inputs[0], layer, config), set()).add(kind)
        elif stage.name in CACHE_ROUNDS and weights.cache_dtype is np.float16:
            found.setdefault(input_key(CACHE_ROUNDS[stage.name], layer, config), set()).add("F16")
    return found


def adopt_edges(
    ours: np.ndarray, golden: np.ndarray, kind: ActivationKind, allowed: np.ndarray
) -> tuple[np.ndarray, int, int]:
    """Take over the golden's values where the two sides round to different numbers, though they were equally good.

    Args:
        ours: A stage of ours, before it is rounded.
        golden: The same stage of the golden.
        kind: What it is rounded to.
        allowed: How far each value of ours may be off.

    Returns:
        Ours, with every block that holds a flip (for F16 and BF16 every such value) replaced, unless one of its values
        is off by more than it may; how many values flipped in the blocks that were replaced, and in those that were
        not.
    """
    size = BLOCK_SIZE.get(kind, 1)
    theirs = golden.astype(ours.dtype)
    a, b = (round_activations(x, kind).reshape(-1, size) for x in (ours, theirs))
    flips = (~(np.abs(a - b) <= EDGE * np.abs(b).max(axis=-1, keepdims=True))).sum(axis=-1)
    if kind == "Q8_1":
        one, other = block_sums(ours).reshape(-1), block_sums(theirs).reshape(-1)
        flips += (np.abs(one - other) > EDGE * np.abs(other)) & (flips == 0)
    if not flips.any():
        return ours, 0, 0
    at_edge = (np.abs(ours - theirs) <= allowed).reshape(-1, size).all(axis=-1)
    mixed = np.where((at_edge & (flips > 0))[:, None], theirs.reshape(-1, size), ours.reshape(-1, size))
    return mixed.reshape(ours.shape), int(flips[at_edge].sum()), int(flips[~at_edge].sum())


def emulated(weights: Weights) -> str:
    """Name what is rounded in this file: `Q4_K, Q6_K: inputs rounded to Q8_K`.

    Args:
        weights: The model, with its numerics.

    Returns:
        One line; empty when nothing is rounded.
    """
    types: dict[str, set[str]] = {}
    for name in weights:
        stored = weights.stored_type(name)
        if len(weights.shape(name)) == 2 and ACTIVATION_TYPE[stored] != "F32":
            types.setdefault(ACTIVATION_TYPE[stored], set()).add(stored.name)
    parts = [f"{', '.join(sorted(stored))}: inputs rounded to {kind}" for kind, stored in sorted(types.items())]
    if weights.cache_dtype is np.float16:
        parts.append("cache F16: queries and probabilities rounded to F16")
    return "; ".join(parts)


def _until(array: np.ndarray, name: str, new: np.ndarray, stop: int) -> np.ndarray:
    """The part of a whole pass's stage that belongs to the tokens of `new`, which end before `stop`."""
    if name.endswith("attn_probs"):
        return array[:, stop - new.shape[1] : stop, :stop]  # (heads, seq, ctx)
    return array[stop - len(new) : stop]
