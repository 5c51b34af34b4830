"""Mixture of experts: a router selects a few feed-forward blocks per token; MoE models of Qwen, Llama 4.

The softmax over all experts and the sum of expert outputs are at least float32. If probabilities are equal, the expert
with the lower number is selected, as in NumPy.

Source: transformers `modeling_qwen2_moe.py`, Qwen2MoeSparseMoeBlock; `modeling_qwen3_moe.py`;
`modeling_llama4.py`, Llama4TextMoe.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from llorch.families.config import ModelConfig
from llorch.pytorch.causal_lm import MLP, Hidden, Keep, swiglu, widened
from llorch.pytorch.kernels.packing import Fields, Kind, decode
from llorch.pytorch.kernels.quantised_linear import Multiply, PackedMatrix, QuantisedLinear, multiply_by_tiles

ExpertIds = Int[Tensor, "batch seq topk"]
PerExpert = Float[Tensor, "batch seq _topk _width"]  # _topk is 1 for a row that all experts of a token share
MultiplyChosen = Callable[[Tensor, Tensor, Fields, Kind, int], Tensor]  # see `multiply_decoded`


class SparseMoe(nn.Module):
    """MoE block: route each token to a few experts, add their weighted outputs and the shared expert's output."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the modules of one layer."""
        super().__init__()
        hidden, experts = config.hidden_size, config.experts
        assert experts is not None
        self.n_chosen, self.norm_topk_prob = experts.n_experts_per_token, experts.norm_topk_prob
        self.gate: Any = nn.Linear(hidden, experts.n_experts, bias=False)
        self.experts = ExpertsModule(experts.n_experts, hidden, experts.expert_size)
        self.shared_expert = SharedExpert(hidden, experts.shared_size) if experts.shared_size else None
        self.shared_expert_gate: Any = nn.Linear(hidden, 1, bias=False) if experts.shared_gate else None
        self.softmax: Callable[[Tensor], Tensor] = softmax
        self.sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
        self.normalised: Callable[[Tensor], Tensor] = normalised
        self.mixed: Callable[[Tensor, Tensor], Tensor] = mixed

    def forward(self, h: Hidden, keep: Keep) -> Hidden:
        """Compute the array that the feed-forward part adds to the residual stream."""
        logits = keep("router_logits", self.gate(h))
        probs = keep("router_probs", self.softmax(widened(logits)))
        ids = keep("topk_ids", probs.sort(dim=-1, descending=True, stable=True).indices[..., : self.n_chosen])
        weights = probs.gather(-1, ids)
        if self.norm_topk_prob:
            weights = self.normalised(weights)
        weights = keep("topk_weights", weights.to(h.dtype))
        out = self.mixed(self.experts(h, ids, keep), weights)
        if self.shared_expert is not None:
            shared = widened(self.shared_expert(h, keep))
            if self.shared_expert_gate is not None:
                shared = keep("shared_gate", self.sigmoid(widened(self.shared_expert_gate(h)))) * shared
            out = out + shared
        return keep("moe_out", out.to(h.dtype))


class Llama4Moe(SparseMoe):
    """MoE block that multiplies the experts' inputs, not their outputs, by the router weights."""

    def forward(self, h: Hidden, keep: Keep) -> Hidden:
        """Compute the array that the feed-forward part adds to the residual stream."""
        logits = keep("router_logits", self.gate(h))
        ids = keep("topk_ids", logits.sort(dim=-1, descending=True, stable=True).indices[..., : self.n_chosen])
        weights = keep("topk_weights", self.sigmoid(widened(logits.gather(-1, ids))).to(h.dtype))
        expert_inputs = keep("expert_in", h[:, :, None] * weights[..., None])  # (batch, seq, topk, hidden)
        out = self.mixed(self.experts(expert_inputs, ids, keep), weights.new_ones(weights.shape))
        assert self.shared_expert is not None  # Llama 4 always has one
        return keep("moe_out", (out + widened(self.shared_expert(h, keep))).to(h.dtype))


class ExpertsModule(nn.Module):
    """SwiGLU of every expert, three matrices each; a token uses the matrices of its experts."""

    def __init__(self, n_experts: int, hidden: int, size: int) -> None:
        """Build the modules."""
        super().__init__()
        self.gate_proj: Any = ExpertLinear(n_experts, hidden, size)
        self.up_proj: Any = ExpertLinear(n_experts, hidden, size)
        self.down_proj: Any = ExpertLinear(n_experts, size, hidden)
        self.act: Callable[[Tensor, Tensor], Tensor] = swiglu

    def forward(self, h: Hidden | PerExpert, ids: ExpertIds, keep: Keep) -> PerExpert:
        """Compute the output of each selected expert for its token, or for its scaled copy of the token."""
        x = h if h.dim() > ids.dim() else h[:, :, None]  # (batch, seq, 1 or topk, hidden)
        gate, up = keep("expert_gate", self.gate_proj(x, ids)), keep("expert_up", self.up_proj(x, ids))
        return keep("expert_out", self.down_proj(keep("expert_act", self.act(gate, up)), ids))


class ExpertLinear(nn.Module):
    """Matrices of all experts in one tensor; only matrices of selected experts are read."""

    def __init__(self, n_experts: int, n_in: int, n_out: int) -> None:
        """Create matrices without values."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_out, n_in))

    def forward(self, x: PerExpert, ids: ExpertIds) -> PerExpert:
        """Multiply the row of each selection, or the row of its token, by the matrix of the selected expert."""
        if reads_nothing_back(x, ids, len(self.weight)):
            return (self.weight[ids] @ x.expand(*ids.shape, -1)[..., None])[..., 0]
        return grouped(lambda expert, rows: linear(rows, self.weight[expert]), x, ids, len(self.weight))

    @property
    def n_experts(self) -> int:
        """The number of experts."""
        return len(self.weight)

    def expert(self, number: int) -> nn.Linear:
        """Return a view of one expert as a linear module."""
        n_out, n_in = self.weight.shape[1:]
        kernel = nn.Linear(n_in, n_out, bias=False, device="meta")
        kernel.weight = nn.Parameter(self.weight[number], requires_grad=False)
        return kernel


class QuantisedExperts(PackedMatrix):
    """Packed matrices of all experts, stacked in the same fields; only selected experts are decoded."""

    def __init__(self, fields: Fields, ggml_type: Kind, n_experts: int) -> None:
        """Store fields made by `pack` from the rows of all experts."""
        super().__init__(fields, ggml_type)
        self.n_experts = n_experts
        self.multiply: Multiply = multiply_by_tiles
        self.multiply_chosen: MultiplyChosen = multiply_decoded

    def forward(self, x: PerExpert, ids: ExpertIds) -> PerExpert:
        """Multiply by the matrices of the selected experts, as `ExpertLinear` does."""
        if reads_nothing_back(x, ids, self.n_experts) and not (torch.is_grad_enabled() and x.requires_grad):
            inputs = x.flatten(0, -2).contiguous()
            outputs = self.multiply_chosen(inputs, ids.flatten(), self.fields, self.ggml_type, self.n_experts)
            return outputs.unflatten(0, ids.shape)
        return grouped(lambda expert, rows: self.expert(expert)(rows), x, ids, self.n_experts)

    def expert(self, number: int) -> QuantisedLinear:
        """Return a view of one expert as a quantised linear module."""
        n_rows = self.out_features // self.n_experts
        fields = {name: field[number * n_rows : (number + 1) * n_rows] for name, field in self.fields.items()}
        kernel = QuantisedLinear(fields, self.ggml_type)
        kernel.multiply = self.multiply
        return kernel


class SharedExpert(MLP):
    """Feed-forward block that every token uses."""

    def forward(self, h: Hidden, keep: Keep) -> Hidden:
        """Compute the dense feed-forward block under the stage names of the shared expert."""
        gate, up = keep("shared_ffn_gate", self.gate_proj(h)), keep("shared_ffn_up", self.up_proj(h))
        return keep("shared_out", self.down_proj(keep("shared_ffn_act", self.act(gate, up))))


def reads_nothing_back(x: PerExpert, ids: ExpertIds, n_experts: int) -> bool:
    """Tell if the host must not read the ids: a CUDA graph of a decode step forbids it, and few rows do not need it."""
    return x.is_cuda and (ids.shape[1] == 1 or ids.numel() <= n_experts)


def multiply_decoded(
    x: Float[Tensor, "inputs in"], ids: Int[Tensor, " choices"], fields: Fields, ggml_type: Kind, n_experts: int
) -> Float[Tensor, "choices out"]:
    """Multiply rows by matrices of selected experts; row i serves n = len(ids) / len(x) selections from i * n on."""
    expert_fields = {name: field.unflatten(0, (n_experts, -1))[ids].flatten(0, 1) for name, field in fields.items()}
    matrices = decode(expert_fields, ggml_type).to(x.dtype).unflatten(0, (len(ids), -1))
    return (matrices @ x.repeat_interleave(len(ids) // len(x), dim=0)[..., None])[..., 0]


def grouped(multiply: Callable[[int, Tensor], Tensor], x: PerExpert, ids: ExpertIds, n_experts: int) -> PerExpert:
    """Call `multiply(expert, rows)` once for each selected expert with all of its rows; `ids` may be empty."""
    flat_ids = ids.flatten()
    order, counts = flat_ids.argsort(stable=True), flat_ids.bincount(minlength=n_experts).tolist()
    rows = x.expand(*ids.shape, -1).flatten(0, -2)[order].split(counts)
    outputs = [multiply(expert, group) for expert, group in enumerate(rows) if len(group)] or [multiply(0, rows[0])]
    return torch.cat(outputs)[order.argsort()].unflatten(0, ids.shape)


def softmax(logits: Float[Tensor, "*rows experts"]) -> Float[Tensor, "*rows experts"]:
    """Normalise the last axis to probabilities."""
    return logits.softmax(-1)


def normalised(weights: Float[Tensor, "*rows topk"]) -> Float[Tensor, "*rows topk"]:
    """Divide by the sum along the last axis."""
    return weights / weights.sum(-1, keepdim=True)


def mixed(outputs: PerExpert, weights: Float[Tensor, "batch seq topk"]) -> Hidden:
    """Compute the weighted sum of a token's expert outputs in at least float32."""
    return (widened(weights)[..., None, :] @ widened(outputs))[..., 0, :]
