"""Correct engines, each with its own arithmetic and its own way to write a dump: nothing is wrong in their dumps.

A `Control` is one such engine; `run` lets it loose on a built-in model. It declares what such an engine would say
of itself, often nothing. The engines of others, llama.cpp and transformers, are in `engine_runs`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.diagnosis import arithmetic as how
from benchmarks.diagnosis import roundings as to
from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.styles import Written, stage_keys
from llorch.engines.dumps.stage_dump import DumpedArray, Features, StageDump
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME

LLAMA, LLAMA3, QWEN2, QWEN3, STORY = MODELS = ("micro-llama", "micro-llama3", "micro-qwen2", "micro-qwen3", "story")
N_TOKENS = 18


@dataclass(frozen=True)
class Shown:
    """One array of a dump: of which pass and stage, and which tokens of the pass it has; None for all."""

    n_pass: int
    key: str
    array: np.ndarray
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Run:
    """Tensors that an engine shows, before they are written to a file."""

    model: str
    passes: tuple[Tokens, ...]
    shown: tuple[Shown, ...]
    features: Mapping[str, str | bool] = field(default_factory=dict)
    stored: str = "float32"

    def in_memory(self) -> StageDump:
        """Make a dump without a file."""
        dumped = {
            (one.n_pass, one.key): DumpedArray(one.key, self.stored, lambda one=one: one.array, one.tokens)
            for one in self.shown
        }
        return StageDump(self.model, self.passes, dumped, Features(**self.features))  # type: ignore[arg-type]

    def write(self, folder: Path) -> Written:
        """Write a folder under the names of the stage table."""
        with DumpWriter(folder, **self.features) as dump:  # type: ignore[arg-type]
            for n, tokens in enumerate(self.passes):
                dump.begin(tokens.ids, tokens.first_position)
                for one in (one for one in self.shown if one.n_pass == n):
                    layer, _, name = one.key.rpartition(".")
                    array = to.stored_bits(one.array, self.stored)
                    dump.add(name, array, layer=int(layer[1:]) if layer else None, tokens=one.tokens)
        index = folder / "index.jsonl"
        index.write_text(index.read_text().replace('"uint16"', '"bfloat16"'))  # NumPy has no name for these bits
        return Written(folder)


Chosen = Callable[[Sequence[Shown], int], Iterator[Shown]]  # what is written of a run whose passes have so many tokens


@dataclass(frozen=True)
class Control:
    """A right engine.

    Attributes:
        name: Name of the variant.
        change: Change of the port.
        declared: Facts that the engine says of itself.
        models: Models on which it runs.
        start: Position of its first token.
        passes: Tokens of each pass, one after the other into the same cache.
        chosen: Arrays that it writes.
        stored: Dtype in which it writes them.
    """

    name: str
    change: how.Change = how.nothing
    declared: Mapping[str, str | bool] = field(default_factory=dict)
    models: tuple[str, ...] = MODELS
    start: int = 0
    passes: tuple[int, ...] = (N_TOKENS,)
    chosen: Chosen = lambda shown, n: iter(shown)
    stored: str = "float32"

    def run(self, model: str) -> Run:
        """Run the engine on a built-in model."""
        port = Port(model, self.start)
        self.change(port)
        drawn = prompt(model, sum(self.passes))
        ends = np.cumsum(self.passes)
        parts = [tuple(drawn[end - n : end]) for end, n in zip(ends, self.passes, strict=True)]
        for part in parts:
            port.run(part)
        at = [self.start + int(end) - n for end, n in zip(ends, self.passes, strict=True)]
        shown = [Shown(n, key, array) for n, tape in enumerate(port.tape) for key, array in stage_keys(tape).items()]
        chosen = tuple(self.chosen(shown, self.passes[-1]))
        return Run(model, tuple(map(Tokens, parts, at)), chosen, self.declared, self.stored)


def prompt(model: str, n: int) -> list[int]:
    """Draw tokens that all differ, always the same ones for each model."""
    return np.random.default_rng(MODELS.index(model)).permutation(300)[:n].tolist()


def only(pattern: str) -> Chosen:
    """Choose the stages whose keys match."""
    return lambda shown, n: (one for one in shown if re.fullmatch(pattern, one.key))


def last_token(shown: Sequence[Shown], n: int) -> Iterator[Shown]:
    """Choose the logits of the last token."""
    return (Shown(one.n_pass, one.key, one.array[-1:], (n - 1,)) for one in shown if one.key == "logits")


@dataclass(frozen=True)
class InBatch(Control):
    """A right engine that runs several prompts of different lengths at once, of which one is dumped.

    Attributes:
        others: Lengths of the others.
        row: Index of the row that is dumped.
        pads_left: Where the rows are filled up to one length.
    """

    others: tuple[int, ...] = (N_TOKENS - 5,)
    row: int = 0
    pads_left: bool = False

    def run(self, model: str) -> Run:
        """Run all rows as one long pass, in which each token sees its own row alone, and pads nobody sees."""
        lengths = [*self.others[: self.row], *self.passes, *self.others[self.row :]]
        width = max(lengths)
        port = Port(model, self.start)
        ids, rows, places, real = [], [], [], []
        for row, n in enumerate(lengths):
            first = width - n if self.pads_left else 0
            mine = np.arange(width) - first
            rows += [row] * width
            real += list((mine >= 0) & (mine < n))
            places += list(np.where(real[-width:], mine, 0))
            words = prompt(model, n) if row == self.row else prompt(model, 2 * n)[n:]
            ids += [words[at] if 0 <= at < n else 0 for at in mine]
        same_row = np.equal.outer(rows, rows)
        before = np.less_equal.outer(np.arange(len(ids)), np.arange(len(ids))).T
        port.around("places", lambda _old, n: np.array(places) + self.start)
        port.around("visible", lambda _old, n, context: same_row & before & np.array(real) | np.eye(n, dtype=bool))
        self.change(port)
        port.run(ids)
        mine = np.flatnonzero((np.array(rows) == self.row) & np.array(real))
        shown = (Shown(0, key, _rows(key, array, mine)) for key, array in stage_keys(port.tape[0]).items())
        passes = (Tokens(tuple(ids[at] for at in mine), self.start),)
        return Run(model, passes, tuple(self.chosen(tuple(shown), self.passes[0])), self.declared, self.stored)


def _rows(key: str, array: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    for axis, name in enumerate(BY_NAME[key.rpartition(".")[2]].axes.split()):
        array = array.take(tokens, axis) if name in ("seq", "ctx") else array
    return array


F32, BF16, F16 = ({"dtype": name} for name in ("float32", "bfloat16", "float16"))
HALF = {"bfloat16": to.bf16, "float16": to.f16}
_FAR = (LLAMA, LLAMA3, QWEN2, QWEN3)

CONTROLS: tuple[Control, ...] = (
    Control("as it is"),
    Control("sums one by one", how.products(to.one_by_one), F32),
    Control("sums backwards", how.products(to.backwards)),
    Control("sums in blocks of 16", how.products(to.in_blocks), F32),
    Control("sums in 8 lanes", how.products(to.in_lanes)),
    Control("sums with Kahan's correction", how.products(to.kahan), F32),
    Control("sums in float64", how.products(to.in_float64)),
    Control("float64 all through", how.wide, {"dtype": "float64"}, stored="float64"),
    Control("float64 all through, stored as float32", how.together(how.wide, how.dumped(to.f32))),
    Control("exponentials as powers of two", how.powers_of_two, F32),
    Control("division by the root", how.divided_by_root),
    Control("joined products", how.joined, F32),
    Control("scale in the queries", how.scaled_queries),
    Control("flash attention", how.online(5), F32 | {"flash_attention": True}),
    Control("flash attention, not declared", how.online(4)),
    Control("float32 angles", how.angles(how.float32_angles), F32),
    Control("float32 angles at 4000", how.angles(how.float32_angles), F32, _FAR, 4000),
    Control("running angles at 4000", how.angles(how.running_angles), {}, _FAR, 4000),
    Control("float32 angles at 30000", how.angles(how.float32_angles), {}, (LLAMA3, QWEN2, QWEN3), 30000),
    Control("float32 angles at 100000", how.angles(how.float32_angles), F32, (LLAMA3,), 100000),
    Control("running angles at 100000", how.angles(how.running_angles), F32, (LLAMA3,), 100000),
    Control("float16 cache", how.cached(to.f16), F32 | {"kv_cache": "float16"}),
    Control("float16 cache, not declared", how.cached(to.f16)),
    Control("bfloat16 cache", how.cached(to.bf16), F32 | {"kv_cache": "bfloat16"}),
    Control("float16 cache as ggml has it", how.cached_as_ggml, F32 | {"kv_cache": "float16"}),
    Control("float16 cache and flash attention", how.together(how.cached(to.f16), how.online(6)),
           {"kv_cache": "float16", "flash_attention": True}),
    Control("TF32 products", how.inputs(to.tf32), F32),
    Control("bfloat16 products", how.inputs(to.bf16), F32 | {"activations": "BF16"}),
    Control("float16 inputs of matrices", how.of_matrices(to.f16), {"activations": "F16"}),
    Control("Q8_0 inputs of matrices", how.of_matrices(to.q8_0), F32 | {"activations": "Q8_0"}),
    Control("bfloat16 activations", how.stored(to.bf16), BF16),
    Control("bfloat16 activations, not declared", how.stored(to.bf16)),
    Control("bfloat16 activations, stored as such", how.stored(to.bf16), stored="bfloat16"),
    Control("float16 activations", how.stored(to.f16), F16),
    Control("float16 activations, stored as such", how.stored(to.f16), stored="float16"),
    Control("bfloat16, gain after rounding", how.together(how.stored(to.bf16), how.gain_after_rounding(to.bf16)),
           BF16),
    Control("bfloat16 weights and activations", how.together(how.weights(to.bf16), how.stored(to.bf16)), BF16),
    Control("float16 weights and activations", how.together(how.weights(to.f16), how.stored(to.f16)), F16),
    Control("bfloat16 weights", how.weights(to.bf16), F32),
    Control("float16 weights", how.weights(to.f16)),
    Control("dumped as bfloat16", how.dumped(to.bf16), F32, stored="bfloat16"),
    Control("dumped as float16", how.dumped(to.f16), stored="float16"),
    InBatch("batch of 2, padded on the right", declared=F32, others=(N_TOKENS + 4,)),
    InBatch("batch of 2, padded on the left", others=(N_TOKENS + 4,), pads_left=True),
    InBatch("last row of a batch of 3", declared=F32, row=2, others=(7, N_TOKENS)),
    Control("prefill in chunks", declared=F32, passes=(7, 7, 4)),
    Control("a prompt, then steps", passes=(14, 1, 1, 1, 1)),
    Control("a prompt, then steps, float16 cache", how.cached(to.f16), {"kv_cache": "float16"}, passes=(15, 1, 1)),
    Control("a prompt, then steps, bfloat16", how.stored(to.bf16), BF16, passes=(15, 1, 1)),
    Control("one layer", how.products(to.one_by_one), chosen=only(r"l1\..*")),
    Control("one layer, bfloat16", how.stored(to.bf16), BF16, chosen=only(r"l1\..*")),
    Control("block outputs only", how.products(to.in_lanes), F32, chosen=only(r"embed|l\d\.block_out|logits")),
    Control("block outputs only, bfloat16", how.stored(to.bf16), BF16, chosen=only(r"embed|l\d\.block_out|logits")),
    Control("logits only", how.products(to.one_by_one), chosen=only("logits")),
    Control("logits only, float16", how.stored(to.f16), F16, chosen=only("logits")),
    Control("the last token's logits only", how.products(to.backwards), chosen=last_token),
    Control("some stages", declared=F32, chosen=only(r"l\d\.(q_rope|v_proj|attn_out|ffn_act)|logits")),
)  # fmt: skip
