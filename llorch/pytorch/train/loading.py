"""A model in torch whose modules record gradients; kernels for inference do not.

On CUDA, norms, rotations and activations run on the kernels of `llorch.pytorch.kernels.triton.trained`, and packed
matrices are decoded by those of `llorch.pytorch.kernels.triton.quantised`. On the CPU compiled kernels decode those of
dense layers; torch decodes those of experts, and what DoRA needs for its lengths.

On the CPU frozen float32 matrices go to oneDNN, which multiplies twice as fast as the MKL that `nn.Linear` asks, and
takes the transposed weights of the backward product as they lie (2 cores of an AMD EPYC, 256 rows by 896 x 4864: 275 to
420 GFLOP/s against 80 to 140). Other dtypes go to oneDNN in torch anyway.
"""

from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llorch.files import Weights
from llorch.files.residency import Residency
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.device import Target, compute_as_named
from llorch.pytorch.distributed.launch import Ranks, axes_of
from llorch.pytorch.distributed.sharding_plan import cut_for
from llorch.pytorch.kernels.kernel_selection import built_kernels, speed_up_training
from llorch.pytorch.kernels.quantised_linear import FrozenProduct, QuantisedLinear
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
        weight, bias = self.weight, self.bias
        y: Any = FrozenProduct.apply(
            x, lambda rows: _multiply(rows, weight, bias), lambda grad: _multiply(grad, weight.T, None)
        )
        return y


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def freeze_linears(module: CausalLM) -> None:
    """Replace the plain linear layers of a float32 model on the CPU that has no adapter yet; no others."""
    if not torch.backends.mkldnn.is_available():
        return
    for owner in list(module.modules()):
        for name, linear in owner.named_children():
            if isinstance(linear, nn.Linear) and (weight := linear.weight).dtype is torch.float32 and weight.is_cpu:
                setattr(owner, name, FrozenLinear(weight, linear.bias))


def load_for_training(
    weights: Weights, at: Target, *, residency: str, batch: int, n_tokens: int, mesh: DeviceMesh | None = None
) -> CausalLM:
    """Load a model, its weights frozen, for passes of `batch` rows of `n_tokens`; on a mesh this rank's part."""
    compute_as_named(at)
    if at.device.type != "cpu":
        built_kernels(at, training=True)  # a first check needs memory of the device, so it comes before the model
    cut, n_ranks, n_here = all_of, 1, 1  # ranks that share every layer, and that share the memory of this machine
    if mesh is not None:
        cut, n_ranks, n_here = cut_for(weights.config, mesh), axes_of(mesh)["tp"], len(ranks_here(mesh.size()))
    choose = partial(require_memory, batch=batch, n_tokens=n_tokens, n_ranks=n_ranks, n_here=n_here)
    form = cast(Residency, residency)
    chosen = Ranks(mesh).first(lambda: choose(weights, at, form))  # before any rank takes what is free
    module = (load_packed if chosen == "packed" else load_dense)(weights, dtype=at.dtype, device=at.device, cut=cut)
    prepare(module, at)
    return module


def prepare(module: CausalLM, at: Target) -> None:
    """Put the kernels in place that training runs on, and on the CPU faster frozen products."""
    if at.device.type != "cpu" or any(isinstance(linear, QuantisedLinear) for linear in module.modules()):
        speed_up_training(module, at)
    else:
        use_sdpa(module)  # without packed matrices the compiled kernels of the CPU have no use here
    freeze_linears(module)
