"""Check one kernel of llorch on a device against torch's own module: the error of each, and the time of each.

Every kernel runs an example of small odd shapes and one of a real model's shapes. Its error against float64 may be four
times the error of torch's module, or four roundings to the dtype plus the rounding of float32 sums, whichever is more.
One wrong element exceeds this tolerance by far.
"""

import copy
import math
import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from llorch.families.config import ModelConfig
from llorch.families.real_shapes import SHAPES
from llorch.model.generate import Job
from llorch.ops.sampling import SamplingSettings
from llorch.pytorch.cache import Cache
from llorch.pytorch.causal_lm import CausalLM, keep_nothing, rotate_and_cache
from llorch.pytorch.decoding import Decoding, size_class
from llorch.pytorch.device import Target
from llorch.pytorch.kernels import TRAINED, KernelTable
from llorch.pytorch.kernels.examples import EXAMPLES, TRAINED_EXAMPLES, KernelExample, Numbers, in_dtype
from llorch.pytorch.kernels.sdpa import sdpa_attention, use_sdpa
from llorch.pytorch.kernels.table import install_kernels
from llorch.pytorch.random_weights import random_model
from llorch.pytorch.sampling import Needs

TIMES = 4  # times torch's error, or times the dtype's epsilon
SUM = 64 * torch.finfo(torch.float32).eps  # two orders of a float32 sum of some thousand terms differ by at most this
ODD = replace(
    SHAPES["llama-3-8b"], hidden_size=256, intermediate_size=48, n_layers=1, n_heads=6, n_kv_heads=2, head_dim=32,
    vocab_size=37,
)  # fmt: skip
USUAL = {  # shapes of a real model, by device
    "cuda": replace(SHAPES["llama-3-8b"], n_layers=1, intermediate_size=8192, vocab_size=1000),
    "cpu": replace(SHAPES["qwen2.5-0.5b"], n_layers=1, vocab_size=1000),
}
CTX = 64  # cache slots of the example of a CUDA graph
TOKENS = (2, 3)  # (batch, seq) for kernels with gradients
MANY_TOKENS = {"cuda": (2, 1024), "cpu": (2, 8)}  # torch multiplies bfloat16 slowly on a CPU without AVX512

Clock = Callable[[Callable[[], object]], float]  # returns the time of a call in any unit: only ratios are used


@dataclass(frozen=True)
class KernelCheck:
    """Result of the check of a kernel."""

    off: float  # largest error, in multiples of the tolerance
    slow: float  # kernel's time / torch's time; NaN if the kernel died
    died: str = ""  # reason if the kernel raised or its process ended

    def fault(self, *, timed: bool) -> str:
        """Return the reason not to use the kernel, or an empty string."""
        if self.died:
            return self.died
        if not self.off <= 1:
            return f"differs by {self.off:.3g} times the tolerance"
        return f"takes {self.slow:.3g} times as long as torch" if timed and not self.slow <= 1 else ""


@torch.no_grad()  # the examples of kernels with gradients turn them on
def check_kernel(kind: str, kernels: KernelTable, target: Target, clock: Clock) -> KernelCheck:
    """Check one kind of kernel of a table; an exception in the kernel becomes the result."""
    try:
        ratio, slow = 0.0, math.nan
        for config in (ODD, USUAL[target.device.type]):
            example = example_of(kind, config, target)
            ratio = max(ratio, _error_ratio(example, _with_kernel(kind, kernels, example.module), target.dtype))
            kernel = _with_kernel(kind, kernels, example.module)  # a new one: a CUDA graph belongs to one decoding
            # the ratio at the real shapes, the last config, counts; timing the small ones only makes the kernel run
            slow = clock(_bind(example, kernel, target.dtype)) / clock(_bind(example, example.module, target.dtype))
    except Exception as error:  # compilers and drivers raise anything
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)  # raises and ends the process if the device is lost
        return KernelCheck(
            math.inf, math.nan, f"fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )
    return KernelCheck(ratio, slow)


def _with_kernel(kind: str, kernels: KernelTable, module: Any) -> Any:
    """Make the kernel from a copy that shares the weights.

    For a block, `module` is a model and gets every kernel but `graph`, which replays a decoding and replaces no module.
    """
    if isinstance(module, nn.Module):
        module = copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
    if kind != "block":
        return kernels[kind](module)
    install_kernels(module, {name: make for name, make in kernels.items() if name != "graph"})
    return module


def _error_ratio(example: KernelExample, kernel: object, dtype: torch.dtype) -> float:
    """Return the largest error of a kernel against the reference (usually float64), in multiples of its tolerance."""
    module = copy.deepcopy(example.module)
    exact = _results(
        example,
        module.to(example.reference_dtype) if isinstance(module, nn.Module) else module,
        example.reference_dtype,
    )
    torch_outputs, actual = (_results(example, candidate, dtype) for candidate in (example.module, kernel))
    floor = TIMES * torch.finfo(dtype).eps + SUM
    return max(
        error / max(TIMES * torch_error, floor)
        for a, b, reference in zip(actual, torch_outputs, exact, strict=True)
        for error, torch_error in zip(_distances(a, reference, b.dtype), _distances(b, reference, b.dtype), strict=True)
    )


def _results(example: KernelExample, kernel: object, dtype: torch.dtype) -> list[Tensor]:
    """Call a module or kernel with each of the example's inputs, and list all tensors that it returns."""
    outputs = [example.call(kernel, *arguments) for arguments in example.inputs(dtype)]
    return [tensor for output in outputs for tensor in (output if isinstance(output, tuple) else (output,))]


def _distances(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative errors of the whole tensor and of its worst element; infinite for a wrong shape or dtype."""
    if actual.shape != exact.shape or actual.dtype is not dtype or not actual.isfinite().all():
        return math.inf, math.inf
    difference, reference = actual.double() - exact.double(), exact.double()
    return float(difference.norm() / reference.norm()), float(difference.abs().max() / reference.abs().max())


def _bind(example: KernelExample, kernel: object, dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that calls the kernel with the example's first inputs, for a clock."""
    arguments = example.inputs(dtype)[0]
    return lambda: example.call(kernel, *arguments)


def make_clock(device: torch.device, kind: str) -> Clock:
    """Return the clock for a kind of kernel; on CUDA, Triton's benchmark of a recorded CUDA graph.

    Calls are recorded because decode steps are. Unrecorded, the time of a small kernel would be the host's time to
    launch it. A kernel that records itself is timed as called. Kernels with gradients are, too, because their inputs
    are large enough to hide launches.
    """
    if device.type != "cuda":
        return _fastest
    from triton.testing import do_bench

    from llorch.pytorch.kernels.triton.graph import recorded

    def median(call: Callable[[], object]) -> float:
        return cast(float, do_bench(call, warmup=10, rep=50, return_mode="median"))

    unrecorded = kind == "graph" or kind.startswith(TRAINED)
    return median if unrecorded else lambda call: median(recorded(call, warm_up=call).replay)


def _fastest(call: Callable[[], object]) -> float:
    """Return the shortest time of 20 calls on the host."""
    return min(timeit.repeat(call, number=1, repeat=20))


def example_of(kind: str, config: ModelConfig, target: Target) -> KernelExample:
    """Make the example of a kind of kernel, at the shapes of a model."""
    if kind.startswith(TRAINED):
        size = TOKENS if config is ODD else MANY_TOKENS[target.device.type]
        return TRAINED_EXAMPLES[kind.removeprefix(TRAINED)](config, target, size)
    return _EXAMPLES[kind](config, target)


def _linear(config: ModelConfig, target: Target) -> KernelExample:
    numbers, width, out = Numbers(target), config.hidden_size, config.intermediate_size
    module = nn.Linear(width, out, device="meta")
    module.weight = nn.Parameter(numbers(out, width), requires_grad=False)
    module.bias = nn.Parameter(numbers(out), requires_grad=False)
    return KernelExample(module, in_dtype(*((numbers(rows, 1, width),) for rows in (1, 3, 8, 9))))


def _attend(config: ModelConfig, target: Target) -> KernelExample:
    numbers, heads, width = Numbers(target), (config.n_heads, config.n_kv_heads), config.head_dim
    tensors = [(numbers(2, 1, heads[0], width), *(numbers(2, heads[1], ctx, width) for _ in "kv")) for ctx in (512, 33)]
    slots = torch.arange(33, device=target.device)
    visible = slots <= torch.tensor([20, 3], device=target.device)[:, None, None, None]

    def inputs(dtype: torch.dtype) -> list[tuple]:
        calls = [tuple(tensor.to(dtype) for tensor in qkv) for qkv in tensors]
        return [(*qkv, mask, keep_nothing) for qkv, mask in ((calls[0], None), (calls[1], None), (calls[1], visible))]

    return KernelExample(sdpa_attention, inputs)


def _rotate(config: ModelConfig, target: Target) -> KernelExample:
    numbers, kv = Numbers(target), config.n_kv_heads
    heads = {seq: [numbers(2, seq, n, config.head_dim) for n in (config.n_heads, kv, kv)] for seq in (1, 5)}
    positions = {1: [[5], [3]], 5: [[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]]}

    def inputs(dtype: torch.dtype) -> list[tuple]:
        examples = []
        for seq, tensors in heads.items():
            cache = Cache(config, batch=2, n_slots=9, dtype=dtype, device=target.device)
            place = cache.place(torch.tensor(positions[seq], device=target.device), ctx=7)
            examples.append((*(tensor.to(dtype) for tensor in tensors), 0, place, cache, keep_nothing))
        return examples

    return KernelExample(rotate_and_cache, inputs)


def _block_example(config: ModelConfig, target: Target) -> KernelExample:
    """Make an example of a block, in a model of one layer: a decode step to time, a padded prompt, a decode step."""
    model = random_model(config, target)
    use_sdpa(model)
    all_ids = torch.arange(12, device=target.device).view(2, 6)

    def inputs(dtype: torch.dtype) -> list[tuple]:
        cache = Cache(config, batch=2, n_slots=9, dtype=dtype, device=target.device)
        prompt = [[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]]
        model_inputs = []
        for ids, positions in ((all_ids[:, 5:], [[5], [3]]), (all_ids[:, :5], prompt), (all_ids[:, 5:], [[5], [3]])):
            model_inputs.append((ids, cache.place(torch.tensor(positions, device=target.device), ctx=9), cache))
        return model_inputs

    def logits(module: CausalLM, ids: Tensor, *arguments: Any) -> Tensor:
        return module(ids, *arguments)[:, -1]

    return KernelExample(model, inputs, logits)


def _graph(config: ModelConfig, target: Target) -> KernelExample:
    """Make an example of a graph: replayed decode steps of one sequence without EOS ids.

    The reference are the same steps, not recorded, in the same dtype, so the states afterwards are compared.
    """
    model = random_model(config, target)
    use_sdpa(model)

    def inputs(dtype: torch.dtype) -> list[tuple]:
        cache = Cache(config, batch=1, n_slots=CTX, dtype=dtype, device=target.device)
        decoding = Decoding(model, cache, Needs.of([SamplingSettings()]), n_end_ids=1)
        decoding.begin([Job([1, 2, 3], CTX // 2, SamplingSettings(), frozenset())], chunk=CTX)
        return [(decoding,)]

    def steps(run_step: Callable[[Decoding, int], None], decoding: Decoding) -> Tensor:
        decoding.n.zero_()
        decoding.positions.fill_(3)  # back to the end of the prompt: repeated timing would run out of slots
        for _ in range(4):
            run_step(decoding, 8)  # slots to read, enough for positions 0 to 6
        return torch.cat([tensor.flatten().double() for tensor in decoding.state])

    return KernelExample(
        lambda decoding, ctx: decoding.step(size_class(ctx, CTX)), inputs, steps, reference_dtype=target.dtype
    )


_EXAMPLES: dict[str, Callable[[ModelConfig, Target], KernelExample]] = {  # CUDA has kernels of some of these kinds
    "linear": _linear, "rotate": _rotate, "attend": _attend, "block": _block_example, "graph": _graph, **EXAMPLES,
}  # fmt: skip
