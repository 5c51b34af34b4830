"""One kernel of llorch tried on a device: its results and torch's, both against float64, and the time of both.

Every kernel is given examples of small odd shapes and of the shapes of an 8B model. Its distance from the results in
float64 may be four times that of torch's own module. It may also be, if that is more, as far as four roundings to the
dtype and the sums of float32 before them can lead. One wrong element is far more.
"""

import copy
import math
import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from llorch.families.config import ModelConfig
from llorch.families.real_shapes import SHAPES
from llorch.model.generate import Job
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM, RMSNorm, keep_nothing, rotate_and_cache, swiglu
from llorch.pytorch.decoding import Decoding, size_class
from llorch.pytorch.device import Target
from llorch.pytorch.kernels import TRAINED, KernelTable
from llorch.pytorch.kernels.examples import EXAMPLES, TRAINED_EXAMPLES, KernelExample, Numbers, in_dtype
from llorch.pytorch.kernels.packing import CPU_KIND_NAMES
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.sdpa import sdpa_attention, use_sdpa
from llorch.pytorch.kernels.table import install_kernels
from llorch.pytorch.random_weights import kind_named, random_fields, random_model
from llorch.pytorch.sampling import Needs

TIMES = 4  # torch's own error, or steps of the dtype
SUM = 64 * torch.finfo(torch.float32).eps  # what the order of some thousand additions may change
ODD = replace(
    SHAPES["llama-3-8b"], hidden_size=256, intermediate_size=48, n_layers=1, n_heads=6, n_kv_heads=2, head_dim=32,
    vocab_size=37,
)  # fmt: skip
USUAL = {
    "cuda": replace(SHAPES["llama-3-8b"], n_layers=1, intermediate_size=8192, vocab_size=1000),
    "cpu": replace(SHAPES["qwen2.5-0.5b"], n_layers=1, vocab_size=1000),
}
CTX = 64
TOKENS = (2, 3)  # batch and sequence of kernels with gradients
MANY_TOKENS = {"cuda": (2, 1024), "cpu": (2, 8)}  # torch multiplies bfloat16 slowly on a CPU without AVX512

Clock = Callable[[Callable[[], object]], float]  # seconds that a call takes


@dataclass(frozen=True)
class KernelCheck:
    """The result of trying a kernel."""

    off: float  # largest error, as a part of what is allowed
    slow: float  # kernel's time / time of torch's; NaN: not measured
    died: str = ""  # why there is no result

    def fault(self, *, timed: bool) -> str:
        """Return why the kernel is left out; empty if it is not."""
        if self.died:
            return self.died
        if not self.off <= 1:
            return f"differs by {self.off:.3g} times the tolerance"
        return f"takes {self.slow:.3g} times as long as torch" if timed and not self.slow <= 1 else ""


@torch.no_grad()
def tried(kind: str, kernels: KernelTable, at: Target, clock: Clock) -> KernelCheck:
    """Try a kind of kernel of a table; an exception that the kernel raises is the result."""
    try:
        off, slow = 0.0, math.nan
        for config in (ODD, USUAL[at.device.type]):
            example = example_of(kind, config, at)
            off = max(off, _off(example, _ours(kind, kernels, example.plain), at.dtype))
            ours = _ours(kind, kernels, example.plain)  # another: recorded steps are those of one decoding
            slow = clock(_decoding(example, ours, at.dtype)) / clock(_decoding(example, example.plain, at.dtype))
    except Exception as error:  # whatever a compiler or a driver raises
        if at.device.type == "cuda":
            torch.cuda.synchronize(at.device)  # raises again where the device is lost to this process, which then ends
        return KernelCheck(
            math.inf, math.nan, f"fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )
    return KernelCheck(off, slow)


def _ours(kind: str, kernels: KernelTable, plain: Any) -> Any:
    """Make a kernel of a copy that shares the weights; a block is tried in a model with all kernels."""
    if isinstance(plain, nn.Module):
        plain = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})
    if kind != "block":
        return kernels[kind](plain)
    install_kernels(plain, {name: make for name, make in kernels.items() if name != "graph"})
    return plain


def _off(example: KernelExample, ours: object, dtype: torch.dtype) -> float:
    """Return the largest error of llorch's kernel against float64, in multiples of its tolerance."""
    plain = copy.deepcopy(example.plain)
    exact = _results(example, plain.to(example.wide) if isinstance(plain, nn.Module) else plain, example.wide)
    near, actual = (_results(example, kernel, dtype) for kernel in (example.plain, ours))
    floor = TIMES * torch.finfo(dtype).eps + SUM
    return max(
        distance / max(TIMES * theirs, floor)
        for a, b, reference in zip(actual, near, exact, strict=True)
        for distance, theirs in zip(_distances(a, reference, b.dtype), _distances(b, reference, b.dtype), strict=True)
    )


def _results(example: KernelExample, kernel: object, dtype: torch.dtype) -> list[Tensor]:
    made = [example.call(kernel, *given) for given in example.inputs(dtype)]
    return [tensor for one in made for tensor in (one if isinstance(one, tuple) else (one,))]


def _distances(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Compute the relative errors of the whole and of the worst element; infinite for results of another form."""
    if actual.shape != exact.shape or actual.dtype is not dtype or not actual.isfinite().all():
        return math.inf, math.inf
    off, size = actual.double() - exact.double(), exact.double()
    return float(off.norm() / size.norm()), float(off.abs().max() / size.abs().max())


def _decoding(example: KernelExample, kernel: object, dtype: torch.dtype) -> Callable[[], object]:
    """Return a call of the kernel with the example's first inputs, for a clock."""
    given = example.inputs(dtype)[0]
    return lambda: example.call(kernel, *given)


def seconds(device: torch.device, kind: str) -> Clock:
    """Return the function that times a call of a kind of kernel; on CUDA it is Triton's, of a recorded call.

    Calls are recorded because steps of decoding are recorded, and because a host takes longer to launch a small kernel
    than the kernel runs. Unrecorded, the kernel that saves no launch would seem the faster. A kernel that records
    itself is timed as it is called. So is a kernel with gradients, as its inputs are large enough to hide launches.
    """
    if device.type != "cuda":
        return _least
    from triton.testing import do_bench

    from llorch.pytorch.kernels.triton.graph import recorded

    def median(call: Callable[[], object]) -> float:
        return cast(float, do_bench(call, warmup=10, rep=50, return_mode="median"))

    unrecorded = kind == "graph" or kind.startswith(TRAINED)
    return median if unrecorded else lambda call: median(recorded(call, warm_up=call).replay)


def _least(call: Callable[[], object]) -> float:
    """Return the least seconds of 20 calls on the host."""
    return min(timeit.repeat(call, number=1, repeat=20))


def example_of(kind: str, config: ModelConfig, at: Target) -> KernelExample:
    """Make the examples of a kind of kernel, at the shapes of a model."""
    if kind.startswith(TRAINED):
        size = TOKENS if config is ODD else MANY_TOKENS[at.device.type]
        return TRAINED_EXAMPLES[kind.removeprefix(TRAINED)](config, at, size)
    return _EXAMPLES[kind](config, at)


def _norm(config: ModelConfig, at: Target) -> KernelExample:
    numbers, plain = Numbers(at), RMSNorm(config.hidden_size, config.rms_norm_eps)
    plain.weight = nn.Parameter(1 + numbers(config.hidden_size) / 2, requires_grad=False)
    return KernelExample(plain, in_dtype(*((numbers(rows, 1, config.hidden_size),) for rows in (1, 5))))


def _linear(config: ModelConfig, at: Target) -> KernelExample:
    numbers, width, out = Numbers(at), config.hidden_size, config.intermediate_size
    plain = nn.Linear(width, out, device="meta")
    plain.weight = nn.Parameter(numbers(out, width), requires_grad=False)
    plain.bias = nn.Parameter(numbers(out), requires_grad=False)
    return KernelExample(plain, in_dtype(*((numbers(rows, 1, width),) for rows in (1, 3, 8, 9))))


def _packed(name: str, config: ModelConfig, at: Target) -> KernelExample:
    numbers, kind, width = Numbers(at), kind_named(name), -(-config.hidden_size // 256) * 256
    torch.manual_seed(0)
    plain = QuantisedLinear(random_fields((config.intermediate_size, width), kind, at.device), kind)
    return KernelExample(plain, in_dtype(*((numbers(rows, width),) for rows in (1, 2, 8, 40, 300))))


def _act(config: ModelConfig, at: Target) -> KernelExample:
    numbers, width = Numbers(at), config.intermediate_size
    inputs = [(4 * numbers(rows, 1, width), numbers(rows, 1, width)) for rows in (1, 5)]
    return KernelExample(swiglu, in_dtype(*inputs))


def _attend(config: ModelConfig, at: Target) -> KernelExample:
    numbers, heads, width = Numbers(at), (config.n_heads, config.n_kv_heads), config.head_dim
    given = [(numbers(2, 1, heads[0], width), *(numbers(2, heads[1], ctx, width) for _ in "kv")) for ctx in (512, 33)]
    slots = torch.arange(33, device=at.device)
    seen = slots <= torch.tensor([20, 3], device=at.device)[:, None, None, None]

    def inputs(dtype: torch.dtype) -> list[tuple]:
        wide = [tuple(tensor.to(dtype) for tensor in one) for one in given]
        return [(*one, mask, keep_nothing) for one, mask in ((wide[0], None), (wide[1], None), (wide[1], seen))]

    return KernelExample(sdpa_attention, inputs)


def _rotate(config: ModelConfig, at: Target) -> KernelExample:
    numbers, kv = Numbers(at), config.n_kv_heads
    heads = {seq: [numbers(2, seq, n, config.head_dim) for n in (config.n_heads, kv, kv)] for seq in (1, 5)}
    positions = {1: [[5], [3]], 5: [[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]]}

    def inputs(dtype: torch.dtype) -> list[tuple]:
        made = []
        for seq, given in heads.items():
            cache = Cache(config, batch=2, n_slots=9, dtype=dtype, device=at.device)
            place = cache.place(torch.tensor(positions[seq], device=at.device), ctx=7)
            made.append((*(tensor.to(dtype) for tensor in given), 0, place, cache, keep_nothing))
        return made

    return KernelExample(rotate_and_cache, inputs)


def _block_example(config: ModelConfig, at: Target) -> KernelExample:
    """Make an example of a block: a whole model of one layer, which reads a padded prompt and goes on."""
    model = random_model(config, at)
    use_sdpa(model)
    ids = torch.arange(12, device=at.device).view(2, 6)

    def inputs(dtype: torch.dtype) -> list[tuple]:
        cache = Cache(config, batch=2, n_slots=9, dtype=dtype, device=at.device)
        prompt = [[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]]
        model_inputs = []
        for new, positions in ((ids[:, 5:], [[5], [3]]), (ids[:, :5], prompt), (ids[:, 5:], [[5], [3]])):
            model_inputs.append((new, cache.place(torch.tensor(positions, device=at.device), ctx=9), cache))
        return model_inputs

    def logits(module: CausalLM, new: Tensor, *given: Any) -> Tensor:
        return module(new, *given)[:, -1]

    return KernelExample(model, inputs, logits)


def _graph(config: ModelConfig, at: Target) -> KernelExample:
    """Make an example of a graph: steps of one sequence, replayed; one by one, in the dtype, they are the reference."""
    model = random_model(config, at)
    use_sdpa(model)

    def inputs(dtype: torch.dtype) -> list[tuple]:
        cache = Cache(config, batch=1, n_slots=CTX, dtype=dtype, device=at.device)
        decoding = Decoding(model, cache, Needs.of([SamplingSettings()]), n_end_ids=1)
        decoding.begin([Job([1, 2, 3], CTX // 2, SamplingSettings(), frozenset())], chunk=CTX)
        return [(decoding,)]

    def steps(replay: Callable[[Decoding, int], None], decoding: Decoding) -> Tensor:
        decoding.n.zero_()
        decoding.positions.fill_(3)  # behind the prompt again: a clock that goes on and on would run out of slots
        for _ in range(4):
            replay(decoding, 8)
        return torch.cat([tensor.flatten().double() for tensor in decoding.state])

    return KernelExample(lambda decoding, ctx: decoding.step(size_class(ctx, CTX)), inputs, steps, wide=at.dtype)


_EXAMPLES: dict[str, Callable[[ModelConfig, Target], KernelExample]] = {
    "norm": _norm, "linear": _linear, "rotate": _rotate, "attend": _attend, "act": _act, "block": _block_example,
    "graph": _graph, **{f"packed {name}": partial(_packed, name) for name in CPU_KIND_NAMES}, **EXAMPLES,
}  # fmt: skip
