"""A model in torch whose modules record gradients; kernels for inference do not.

On CUDA, norms, rotations and activations run on the kernels of `llorch.pytorch.kernels.triton.trained`, and packed
matrices are decoded by those of `llorch.pytorch.kernels.triton.quantised`. On the CPU compiled kernels decode those of
dense layers; torch decodes those of experts, and what DoRA needs for its lengths.

On the CPU frozen float32 matrices go to oneDNN, which multiplies twice as fast as the MKL that `nn.Linear` asks, and
takes the transposed weights of the backward product as they lie (2 cores of an AMD EPYC, 256 rows by 896 x 4864: 275 to
420 GFLOP/s against 80 to 140). Other dtypes go to oneDNN in torch anyway.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llorch.files import Weights
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target, compute_as_named
from llorch.pytorch.distributed.launch import Ranks, axes_of
from llorch.pytorch.distributed.sharding_plan import cut_for
from llorch.pytorch.kernels.kernel_selection import built_kernels, speed_up_training
from llorch.pytorch.kernels.quantised_linear import QuantisedLinear
from llorch.pytorch.kernels.sdpa import use_sdpa
from llorch.pytorch.load import all_of, load_dense, load_packed
from llorch.pytorch.memory import require_memory
from llorch.runtime.launched_rank import ranks_here


class FrozenLinear(nn.Module):
    """A float32 linear layer with the interface of `nn.Linear`, whose weights have no gradient."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take over the frozen parameters of a plain layer, or of an embedding that it shares them with."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Multiply, in float32."""
        return _Product.apply(x, self.weight, self.bias)


class _Product(torch.autograd.Function):
    """Product by oneDNN with a frozen weight and bias: neither gets a gradient, and only the weight is kept."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (weight,) = ctx.saved_tensors
        return _multiply(grad_outputs[0], weight.T, None), None, None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def freeze_linears(module: CausalLM) -> None:
    """Replace the plain linear layers of a float32 model on the CPU that has no adapter yet; no others."""
    if not torch.backends.mkldnn.is_available():
        return
    for owner in list(module.modules()):
        for name, linear in owner.named_children():
            if (
                isinstance(linear, nn.Linear)
                and linear.weight.dtype is torch.float32
                and linear.weight.device.type == "cpu"
            ):
                setattr(owner, name, FrozenLinear(linear.weight, linear.bias))


def load_for_training(
    weights: Weights, at: Target, *, residency: str, batch: int, n_tokens: int, mesh: DeviceMesh | None = None
) -> CausalLM:
    """Load a model, its weights frozen, for passes of `batch` rows of `n_tokens`; on a mesh this rank's part."""
    compute_as_named(at)
    if at.device.type != "cpu":
        built_kernels(at, training=True)  # a first check needs memory of the device, so it comes before the model
    cut, room = (all_of, {}) if mesh is None else (cut_for(weights.config, mesh), _shared_by(mesh))
    how: Any = {"residency": cast(Any, residency), "batch": batch, "n_tokens": n_tokens, **room}
    chosen = Ranks(mesh).first(lambda: require_memory(weights, at, **how))  # before any rank takes what is free
    module = (load_packed if chosen == "packed" else load_dense)(weights, dtype=at.dtype, device=at.device, cut=cut)
    prepare(module, at)
    return module


def _shared_by(mesh: DeviceMesh) -> dict[str, int]:
    """Return how many ranks share every layer, and how many share the memory of this machine."""
    return {"n_ranks": axes_of(mesh)["tp"], "n_here": len(ranks_here(mesh.size()))}


def prepare(module: CausalLM, at: Target) -> None:
    """Put the kernels in place that training runs on.

    These are fused attention, products with packed matrices, and on CUDA fused norms, rotations and activations. The
    CPU gets faster frozen products.
    """
    if at.device.type != "cpu" or any(isinstance(linear, QuantisedLinear) for linear in module.modules()):
        speed_up_training(module, at)
    else:
        use_sdpa(module)  # without packed matrices the compiled kernels of the CPU have no use here
    freeze_linears(module)
