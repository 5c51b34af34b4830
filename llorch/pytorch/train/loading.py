"""Load a model in torch whose modules support backward; kernels for inference do not.

On CUDA, norms, rotations and activations use the kernels of `llorch.pytorch.kernels.triton.trained`, and
`llorch.pytorch.kernels.triton.quantised` decodes packed matrices. On the CPU, compiled kernels decode packed matrices
of dense layers; torch decodes those of experts, and for the lengths of DoRA.

On the CPU, frozen float32 matrices use oneDNN, which is twice as fast as the MKL of `nn.Linear` and needs no copy of
the transposed weights for backward (2 cores of an AMD EPYC, 256 rows by 896 x 4864: 275 to 420 GFLOP/s against 80 to
140). Torch uses oneDNN for other dtypes anyway.
"""

from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import silu

from llorch.files import Weights
from llorch.files.residency import Residency
from llorch.pytorch.causal_lm import CausalLM, RMSNorm, swiglu, widened
from llorch.pytorch.device import Target, compute_as_named
from llorch.pytorch.distributed.launch import Ranks, axes_of
from llorch.pytorch.distributed.sharding_plan import cut_for
from llorch.pytorch.kernels.kernel_selection import built_kernels, speed_up_training
from llorch.pytorch.kernels.quantised_linear import FrozenProduct, QuantisedLinear
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.load import all_of, load_dense, load_packed
from llorch.pytorch.lora.modules import recomputable
from llorch.pytorch.memory import require_memory
from llorch.runtime.launched_rank import local_ranks


class FrozenLinear(nn.Module):
    """Frozen float32 linear layer with the interface of `nn.Linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take over the frozen parameters of a linear layer, or of a tied embedding."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply in float32."""
        weight, bias = self.weight, self.bias
        y: Any = FrozenProduct.apply(
            x, lambda rows: _multiply(rows, weight, bias), lambda grad: _multiply(grad, weight.T, None)
        )
        return y


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def freeze_linears(module: CausalLM) -> None:
    """Replace the `nn.Linear` layers of a float32 CPU model that has no adapter yet."""
    if not torch.backends.mkldnn.is_available():
        return
    for owner in list(module.modules()):
        for name, linear in owner.named_children():
            if isinstance(linear, nn.Linear) and (weight := linear.weight).dtype is torch.float32 and weight.is_cpu:
                setattr(owner, name, FrozenLinear(weight, linear.bias))


class SwigluFunction(torch.autograd.Function):
    """Autograd function of `swiglu` that saves its inputs only; torch would save three arrays in float32."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Activate; save the inputs."""
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Compute the gradients of both inputs, to the bits of torch."""
        gate, up = map(widened, ctx.saved_tensors)
        grad, dtype = widened(grads[0]), grads[0].dtype
        return torch.ops.aten.silu_backward(grad * up, gate).to(dtype), (grad * silu(gate)).to(dtype)


def trained_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `swiglu` with gradients; adapters save its inputs in place of its output."""
    return recomputable(SwigluFunction.apply, gate, up)  # type: ignore[arg-type] (torch says Any)


def load_for_training(
    weights: Weights, target: Target, *, residency: str, batch: int, n_tokens: int, mesh: DeviceMesh | None = None
) -> CausalLM:
    """Load a model with frozen weights for passes of `batch` rows of `n_tokens`; on a mesh, this rank's part."""
    compute_as_named(target)
    if target.device.type != "cpu":
        built_kernels(target, training=True)  # first, because a kernel check needs device memory
    cut, n_ranks, n_here = all_of, 1, 1  # ranks per layer, ranks on this machine
    if mesh is not None:
        cut, n_ranks, n_here = cut_for(weights.config, mesh), axes_of(mesh)["tp"], len(local_ranks(mesh.size()))
    choose = partial(require_memory, batch=batch, n_tokens=n_tokens, n_ranks=n_ranks, n_here=n_here)
    requested = cast(Residency, residency)
    storage = Ranks(mesh).first(lambda: choose(weights, target, requested))  # before any rank uses free memory
    module = (load_packed if storage == "packed" else load_dense)(
        weights, dtype=target.dtype, device=target.device, cut=cut
    )
    prepare(module, target)
    return module


def prepare(module: CausalLM, target: Target) -> None:
    """Install the kernels of training, and on the CPU faster frozen products."""
    if target.device.type != "cpu" or any(isinstance(linear, QuantisedLinear) for linear in module.modules()):
        speed_up_training(module, target)
    else:
        use_sdpa(module)  # the CPU kernels with backward are for packed matrices only
    freeze_linears(module)
    if target.device.type == "cpu":
        _save_inputs_only(module)


def _save_inputs_only(module: CausalLM) -> None:
    """Let adapters save the inputs of norms and activations, which are saved anyway, in place of their outputs."""
    for submodule in module.modules():
        if getattr(submodule, "act", None) is swiglu:
            submodule.act = trained_swiglu  # type: ignore[assignment]
        elif isinstance(submodule, RMSNorm):
            submodule.forward = partial(recomputable, submodule.forward)  # type: ignore[method-assign]
