"""Correct engines, each with its own arithmetic and way to write a dump: their dumps contain no error.

A `Control` is one such engine; `run` runs it on a built-in model. It declares facts that such an engine would declare,
often none. Reference engines, llama.cpp and transformers, are in `engine_runs`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.diagnosis import arithmetic as how
from benchmarks.diagnosis import roundings as to
from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.styles import WrittenDump, stage_keys
from llorch.engines.dumps.stage_dump import DumpedArray, Features, StageDump
from llorch.engines.dumps.writers.dump_writer import DumpWriter
from llorch.stages.stage_ref import Tokens
from llorch.stages.table import BY_NAME

LLAMA, LLAMA3, QWEN2, QWEN3, STORY = MODELS = ("micro-llama", "micro-llama3", "micro-qwen2", "micro-qwen3", "story")
N_TOKENS = 18


@dataclass(frozen=True)
class StageArray:
    """Array of a dump: its pass, its stage key, and its tokens of the pass; None for all tokens."""

    n_pass: int
    key: str
    array: np.ndarray
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Run:
    """Arrays of a run, before they are written to a file."""

    model: str
    passes: tuple[Tokens, ...]
    stage_arrays: tuple[StageArray, ...]
    features: Mapping[str, str | bool] = field(default_factory=dict)
    dtype: str = "float32"

    def in_memory(self) -> StageDump:
        """Make a dump without a file."""
        dumped = {
            (part.n_pass, part.key): DumpedArray(part.key, self.dtype, lambda part=part: part.array, part.tokens)
            for part in self.stage_arrays
        }
        return StageDump(self.model, self.passes, dumped, Features(**self.features))  # type: ignore[arg-type]

    def write(self, folder: Path) -> WrittenDump:
        """Write a folder under the names of the stage table."""
        with DumpWriter(folder, **self.features) as dump:  # type: ignore[arg-type]
            for n_pass, tokens in enumerate(self.passes):
                dump.begin(tokens.ids, tokens.first_position)
                for stage in (stage for stage in self.stage_arrays if stage.n_pass == n_pass):
                    layer, _, name = stage.key.rpartition(".")
                    array = to.stored_bits(stage.array, self.dtype)
                    dump.add(name, array, layer=int(layer[1:]) if layer else None, tokens=stage.tokens)
        index = folder / "index.jsonl"
        index.write_text(index.read_text().replace('"uint16"', '"bfloat16"'))  # NumPy has no name for these bits
        return WrittenDump(folder)


Selection = Callable[[Sequence[StageArray], int], Iterator[StageArray]]  # arrays and tokens of the last pass


@dataclass(frozen=True)
class Control:
    """Correct engine.

    Attributes:
        name: Name of the variant.
        change: Change of the port.
        declared: Facts that the engine declares.
        models: Models on which it runs.
        start: Position of its first token.
        passes: Tokens of each pass, one after the other into the same cache.
        chosen: Arrays that it writes.
        dtype: Dtype in which it writes them.
    """

    name: str
    change: how.Change = how.nothing
    declared: Mapping[str, str | bool] = field(default_factory=dict)
    models: tuple[str, ...] = MODELS
    start: int = 0
    passes: tuple[int, ...] = (N_TOKENS,)
    chosen: Selection = lambda arrays, n: iter(arrays)
    dtype: str = "float32"

    def run(self, model: str) -> Run:
        """Run the engine on a built-in model."""
        port = Port(model, self.start)
        self.change(port)
        ids = prompt(model, sum(self.passes))
        ends = np.cumsum(self.passes)
        parts = [tuple(ids[end - n : end]) for end, n in zip(ends, self.passes, strict=True)]
        for part in parts:
            port.run(part)
        positions = [self.start + int(end) - n for end, n in zip(ends, self.passes, strict=True)]
        taped = [StageArray(n, key, x) for n, tape in enumerate(port.tape) for key, x in stage_keys(tape).items()]
        selected = tuple(self.chosen(taped, self.passes[-1]))
        return Run(model, tuple(map(Tokens, parts, positions)), selected, self.declared, self.dtype)


def prompt(model: str, n: int) -> list[int]:
    """Draw distinct tokens, the same for each model at every call."""
    return np.random.default_rng(MODELS.index(model)).permutation(300)[:n].tolist()


def only(pattern: str) -> Selection:
    """Choose the stages whose keys match."""
    return lambda arrays, n: (stage for stage in arrays if re.fullmatch(pattern, stage.key))


def last_token(arrays: Sequence[StageArray], n: int) -> Iterator[StageArray]:
    """Choose the logits of the last token."""
    return (
        StageArray(stage.n_pass, stage.key, stage.array[-1:], (n - 1,)) for stage in arrays if stage.key == "logits"
    )


@dataclass(frozen=True)
class InBatch(Control):
    """Correct engine that runs several prompts of different lengths at once, of which one is dumped.

    Attributes:
        other_lengths: Lengths of the other prompts.
        row: Index of the row that is dumped.
        pads_left: True if rows are padded on the left.
    """

    other_lengths: tuple[int, ...] = (N_TOKENS - 5,)
    row: int = 0
    pads_left: bool = False

    def run(self, model: str) -> Run:
        """Run all rows as one long pass, in which each token sees only its own row, and padding is hidden."""
        lengths = [*self.other_lengths[: self.row], *self.passes, *self.other_lengths[self.row :]]
        width = max(lengths)
        port = Port(model, self.start)
        ids, rows, places, real = [], [], [], []
        for row, n in enumerate(lengths):
            first = width - n if self.pads_left else 0
            offsets = np.arange(width) - first
            rows += [row] * width
            real += list((offsets >= 0) & (offsets < n))
            places += list(np.where(real[-width:], offsets, 0))
            prompt_ids = prompt(model, n) if row == self.row else prompt(model, 2 * n)[n:]
            ids += [prompt_ids[offset] if 0 <= offset < n else 0 for offset in offsets]
        same_row = np.equal.outer(rows, rows)
        is_past = np.less_equal.outer(np.arange(len(ids)), np.arange(len(ids))).T
        port.around("places", lambda _old, n: np.array(places) + self.start)
        port.around("visible", lambda _old, n, context: same_row & is_past & np.array(real) | np.eye(n, dtype=bool))
        self.change(port)
        port.run(ids)
        offsets = np.flatnonzero((np.array(rows) == self.row) & np.array(real))
        arrays = (StageArray(0, key, _rows(key, array, offsets)) for key, array in stage_keys(port.tape[0]).items())
        passes = (Tokens(tuple(ids[index] for index in offsets), self.start),)
        return Run(model, passes, tuple(self.chosen(tuple(arrays), self.passes[0])), self.declared, self.dtype)


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
    Control("float64 all through", how.float64_throughout, {"dtype": "float64"}, dtype="float64"),
    Control("float64 all through, stored as float32", how.together(how.float64_throughout, how.dumped(to.f32))),
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
    Control("bfloat16 activations", how.activations(to.bf16), BF16),
    Control("bfloat16 activations, not declared", how.activations(to.bf16)),
    Control("bfloat16 activations, stored as such", how.activations(to.bf16), dtype="bfloat16"),
    Control("float16 activations", how.activations(to.f16), F16),
    Control("float16 activations, stored as such", how.activations(to.f16), dtype="float16"),
    Control("bfloat16, gain after rounding", how.together(how.activations(to.bf16), how.gain_after_rounding(to.bf16)),
           BF16),
    Control("bfloat16 weights and activations", how.together(how.weights(to.bf16), how.activations(to.bf16)), BF16),
    Control("float16 weights and activations", how.together(how.weights(to.f16), how.activations(to.f16)), F16),
    Control("bfloat16 weights", how.weights(to.bf16), F32),
    Control("float16 weights", how.weights(to.f16)),
    Control("dumped as bfloat16", how.dumped(to.bf16), F32, dtype="bfloat16"),
    Control("dumped as float16", how.dumped(to.f16), dtype="float16"),
    InBatch("batch of 2, padded on the right", declared=F32, other_lengths=(N_TOKENS + 4,)),
    InBatch("batch of 2, padded on the left", other_lengths=(N_TOKENS + 4,), pads_left=True),
    InBatch("last row of a batch of 3", declared=F32, row=2, other_lengths=(7, N_TOKENS)),
    Control("prefill in chunks", declared=F32, passes=(7, 7, 4)),
    Control("a prompt, then steps", passes=(14, 1, 1, 1, 1)),
    Control("a prompt, then steps, float16 cache", how.cached(to.f16), {"kv_cache": "float16"}, passes=(15, 1, 1)),
    Control("a prompt, then steps, bfloat16", how.activations(to.bf16), BF16, passes=(15, 1, 1)),
    Control("one layer", how.products(to.one_by_one), chosen=only(r"l1\..*")),
    Control("one layer, bfloat16", how.activations(to.bf16), BF16, chosen=only(r"l1\..*")),
    Control("block outputs only", how.products(to.in_lanes), F32, chosen=only(r"embed|l\d\.block_out|logits")),
    Control("block outputs only, bfloat16", how.activations(to.bf16), BF16,
            chosen=only(r"embed|l\d\.block_out|logits")),
    Control("logits only", how.products(to.one_by_one), chosen=only("logits")),
    Control("logits only, float16", how.activations(to.f16), F16, chosen=only("logits")),
    Control("the last token's logits only", how.products(to.backwards), chosen=last_token),
    Control("some stages", declared=F32, chosen=only(r"l\d\.(q_rope|v_proj|attn_out|ffn_act)|logits")),
)  # fmt: skip
