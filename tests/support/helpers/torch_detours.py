"""The least LoRA that torch can differentiate: written once more, for the tests of the hand-derived gradients.

The adapter's tensors are leaves of the graph; everything else is what the model computes.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from llorch.files import Weights
from llorch.lora.adapter import Adapter
from llorch.pytorch.causal_lm import CausalLM
from llorch.pytorch.load import load_dense


class Detour(nn.Module):
    """A frozen projection or embedding with its adapter beside it."""

    def __init__(
        self, base: nn.Linear | nn.Embedding, tensors: dict[str, Tensor], scaling: float, mask: Tensor | None
    ) -> None:
        super().__init__()
        self.base, self.tensors, self.scaling, self.mask = base, tensors, scaling, mask

    def forward(self, x: Tensor) -> Tensor:
        product = self.tensors["lora_B"] @ self.tensors["lora_A"] * self.scaling
        if isinstance(self.base, nn.Embedding):
            return embedding(x, self.directed(self.base.weight.T, product).T)
        if self.mask is None:
            return linear(x, self.directed(self.base.weight, product), self.base.bias)
        dropped = x * self.mask
        added = linear(dropped, self.directed(self.base.weight, product)) - linear(dropped, self.base.weight)
        return self.base(x) + added

    def directed(self, weight: Tensor, product: Tensor) -> Tensor:
        """The whole adapted matrix; with DoRA its rows get the learned lengths, and their own are constants."""
        whole = weight + product
        if "magnitude" not in self.tensors:
            return whole
        return whole * (self.tensors["magnitude"] / whole.detach().norm(dim=1))[:, None]


def model_with_detours(
    weights: Weights, adapter: Adapter, *, masks: Mapping[str, np.ndarray] | None = None
) -> tuple[CausalLM, dict[str, Tensor]]:
    """The torch model in float64 with an adapter, and the tensors that can be differentiated by."""
    model = load_dense(weights, dtype=torch.float64, device=torch.device("cpu"))
    tensors = {name: torch.from_numpy(a).double().requires_grad_() for name, a in adapter.flat().items()}
    for name, target in adapter.targets.items():
        own = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == name}
        mask = torch.from_numpy(masks[name]).double() if masks and name in masks else None
        base: nn.Linear | nn.Embedding = model.get_submodule(target.path)  # type: ignore[assignment]
        owner, _, attribute = target.path.rpartition(".")
        setattr(model.get_submodule(owner), attribute, Detour(base, own, adapter.scaling(name), mask))
    return model, tensors
