"""Table of the CPU kernels, and a kernel that runs a whole block in one call for a few tokens without an observer.

A decode step calls some 16 kernels per block, and each call costs a few microseconds in Python. `block.c` calls
the same compiled functions in the same order, so the result has the same bits; a test checks this. With an observer of
stages (`keep`), many tokens or a module of another kind, the block runs as in `causal_lm`. `fixed` is for the mode
"reproducible": no row of a product may depend on other rows.
"""

import ctypes
import operator

import torch
from torch import Tensor, nn

from llorch.pytorch.cache import Cache, PassPlacement
from llorch.pytorch.causal_lm import Block, Hidden, Keep, keep_nothing
from llorch.pytorch.kernels import TRAINED, KernelTable
from llorch.pytorch.kernels.cpu.delta_net import CpuDeltaRule, CpuGatedNorm, CpuL2Norm, CpuShortConv
from llorch.pytorch.kernels.cpu.experts import CpuExperts
from llorch.pytorch.kernels.cpu.layer import FEW, HALF, CpuAttention, CpuRMSNorm, CpuRotate, CpuSwiglu, pointer
from llorch.pytorch.kernels.cpu.linear import KINDS, CpuLinear
from llorch.pytorch.kernels.cpu.quantised import CpuQuantisedLinear, TrainedQuantisedLinear
from llorch.pytorch.kernels.packing import CPU_KIND_NAMES
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.models.experts import ExpertLinear, QuantisedExperts

MOST = 64  # maximum tokens of a block in one call if `fixed`; else FEW, because more tokens use other functions
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("codes", "d", "scales", "more", "bias")),
        *((name, _LONG) for name in ("kind", "out", "width")),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, _Matrix) for name in PROJECTIONS),
        *((name, _LONG) for name in ("half", "fixed", "heads", "kv_heads", "head_dim")),
        ("eps", ctypes.c_float),
    )


class _Place(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("cos", "sin", "slots", "visible", "pages", "keys", "values")),
        *((name, _LONG) for name in ("batch", "seq", "ctx", "n_slots")),
    )


class CpuBlock(Block):
    """Block with the modules and attribute paths of another block."""

    def __init__(self, block: Block, library: ctypes.CDLL, *, fixed: bool = False) -> None:
        """Take over the modules of a block, which are kernels already; `fixed` must be that of these kernels."""
        nn.Module.__init__(self)
        self.fixed, self._most = fixed, MOST if fixed else FEW
        self.mixer = block.mixer
        for name, child in block.named_children():
            setattr(self, name, child)
        self.library = library
        self._struct_cache: tuple[list[object], list[int], _Block | None] = [], [], None

    def forward(self, x: Hidden, place: PassPlacement, cache: Cache, keep: Keep) -> Hidden:
        """Compute the residual stream after the layer; a few tokens without an observer use one compiled call."""
        if keep is keep_nothing and x.shape[0] * x.shape[1] <= self._most:
            keys, values = cache.keys[self.self_attn.layer], cache.values[self.self_attn.layer]
            struct = self._current_struct()
            if struct is not None and keys.dtype == x.dtype:
                return self._run(struct, x.contiguous(), place, cache.pages, keys, values)
        return super().forward(x, place, cache, keep)

    def _current_struct(self) -> _Block | None:
        """Return the struct of the compiled function, rebuilt after changes; None if it cannot run this block."""
        kernels = list_kernels(self)
        pointers = addresses(kernels)
        cached_kernels, cached_pointers, struct = self._struct_cache
        if pointers == cached_pointers and all(map(operator.is_, kernels, cached_kernels)):
            return struct
        struct = describe(self, fixed=self.fixed) if can_describe(self, fixed=self.fixed) else None
        self._struct_cache = kernels, pointers, struct
        return struct

    def _run(
        self, struct: _Block, x: Tensor, place: PassPlacement, pages: Tensor | None, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Compute the block in one compiled call, which also writes keys and values to the cache."""
        tensors = place.cos, place.sin, place.slots, place.visible, pages
        contiguous = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        sizes = x.shape[0], x.shape[1], place.ctx, keys.stride(1) // keys.shape[3]
        location = _Place(*map(pointer, (*contiguous, keys, values)), *sizes)
        y = torch.empty_like(x)
        error = self.library.llorch_block(ctypes.byref(struct), ctypes.byref(location), x.data_ptr(), y.data_ptr())
        if error == 1:
            raise MemoryError(f"block: cannot allocate memory for {sizes[0] * sizes[1]} tokens")
        if error:
            raise IndexError(f"cache: expected slots from 0 to {keys.shape[2] - 1}, got {place.slots.tolist()}")
        return y


def list_kernels(block: Block) -> list[object]:
    """List everything that a block calls, in a fixed order."""
    attention, mlp = block.self_attn, block.mlp
    attention_modules, mlp_modules = attention._modules, mlp._modules
    return [
        *(block._modules[name] for name in ("input_layernorm", "post_attention_layernorm")),
        *(attention.q_norm, attention.k_norm, attention.rotate, attention.attend, mlp.act),
        *(attention_modules[name] for name in PROJECTIONS[:4]),
        *(mlp_modules[name] for name in PROJECTIONS[4:]),
    ]


def addresses(kernels: list[object]) -> list[int]:
    """Return the addresses of the weights of some kernels."""
    modules = [kernel for kernel in kernels if isinstance(kernel, nn.Module)]
    stores = (store for kernel in modules for store in (kernel._parameters, kernel._buffers))
    return [0 if tensor is None else tensor.data_ptr() for store in stores for tensor in store.values()]


def can_describe(block: Block, *, fixed: bool) -> bool:
    """Tell if the compiled function computes what this block computes."""
    first, second, q_norm, k_norm, rotate, attend, act, *projections = list_kernels(block)
    norms = [norm for norm in (first, second, q_norm, k_norm) if norm is not None]
    kinds = (rotate, CpuRotate), (attend, CpuAttention), (act, CpuSwiglu)
    return (
        all(type(norm) is CpuRMSNorm for norm in norms)
        and len({norm.eps for norm in norms if isinstance(norm, CpuRMSNorm)}) == 1
        and all(type(kernel) is kind for kernel, kind in kinds)
        and all(isinstance(kernel, CpuLinear | CpuQuantisedLinear) and kernel.fixed == fixed for kernel in projections)
    )


def describe(block: Block, *, fixed: bool) -> _Block:
    """Return the struct of `block.c`: addresses and sizes of a block's weights, which must outlive it."""
    attention, first = block.self_attn, block.input_layernorm
    half, norms = HALF[first.weight.dtype], (first, block.post_attention_layernorm, attention.q_norm, attention.k_norm)
    gains = [None if norm is None else norm.weight.data_ptr() for norm in norms]
    owners = [attention] * 4 + [block.mlp] * 3
    matrices = [_matrix(getattr(owner, name)) for owner, name in zip(owners, PROJECTIONS, strict=True)]
    heads = [kernel.out_features // attention.head_dim for kernel in (attention.q_proj, attention.k_proj)]
    return _Block(*gains, *matrices, half, fixed, *heads, attention.head_dim, first.eps)


def _matrix(kernel: CpuLinear | CpuQuantisedLinear) -> _Matrix:
    kind, *pointers, _ = kernel.matrix_of(torch.float32)
    return _Matrix(*pointers, pointer(kernel.bias), kind, kernel.out_features, kernel.in_features)


def cpu_kernels(compiled: ctypes.CDLL | None, dtype: torch.dtype, *, fixed: bool = False) -> KernelTable:
    """Return the CPU kernels by kind; without a library, oneDNN's products only. `fixed`: rows are independent."""
    if dtype not in KINDS:
        return {}
    if compiled is None:
        return {"linear": lambda kernel: CpuLinear(kernel.weight, kernel.bias, None)}
    kernels: KernelTable = {
        "linear": lambda kernel: CpuLinear(kernel.weight, kernel.bias, compiled, fixed=fixed),
        "norm": lambda kernel: CpuRMSNorm(kernel.weight, kernel.eps, compiled),
        "rotate": lambda kernel: CpuRotate(compiled),
        "attend": lambda kernel: CpuAttention(compiled, None if fixed else kernel),
        "act": lambda kernel: CpuSwiglu(compiled),
        "conv": lambda kernel: CpuShortConv(kernel.weight, compiled),
        "gated norm": lambda kernel: CpuGatedNorm(kernel.weight, kernel.eps, compiled),
        "l2 norm": lambda kernel: CpuL2Norm(compiled),
        "delta rule": lambda kernel: CpuDeltaRule(compiled),
        "block": lambda block: CpuBlock(block, compiled, fixed=fixed) if block.is_dense else block,
    }

    def experts(kernel: ExpertLinear) -> CpuExperts:
        rows = nn.Parameter(kernel.weight.flatten(0, 1), requires_grad=False)
        return CpuExperts(CpuLinear(rows, None, compiled), kernel.n_experts, compiled)

    if not fixed:
        kernels = {**kernels, "experts": experts}
    return {**kernels, **_packed_kernels(compiled, fixed=fixed)}


def _packed_kernels(compiled: ctypes.CDLL, *, fixed: bool) -> KernelTable:
    """Return the kernels of packed matrices by kind; no experts' if `fixed`: many rows choose another way than few."""

    def packed(kernel: QuantisedLinear) -> CpuQuantisedLinear:
        return CpuQuantisedLinear(kernel.fields, kernel.ggml_type, kernel.bias, compiled, fixed=fixed)

    def trained(kernel: QuantisedLinear) -> TrainedQuantisedLinear:
        return TrainedQuantisedLinear(kernel.fields, kernel.ggml_type, kernel.bias, compiled)

    def experts(kernel: QuantisedExperts) -> CpuExperts:
        stacked = CpuQuantisedLinear(kernel.fields, kernel.ggml_type, None, compiled)
        return CpuExperts(stacked, kernel.n_experts, compiled)

    return {
        **{f"packed {kind}": packed for kind in CPU_KIND_NAMES},
        **{f"{TRAINED}packed {kind}": trained for kind in CPU_KIND_NAMES},
        **({} if fixed else {f"packed experts {kind}": experts for kind in CPU_KIND_NAMES}),
    }
