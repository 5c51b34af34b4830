"""Model split over the ranks (processes) of a device mesh; the module `causal_lm` is not changed for this.

    tp    tensor parallel: ranks that share every layer. Each has some output rows of q, k, v, gate and up, that is
          whole heads and a part of the intermediate width, and the matching input columns of o and down; the outputs
          are summed. Norms, embedding and logits are complete. Each rank has some experts; routers are complete.
    dp    data parallel: ranks with different rows of a batch. Each stores a shard of every parameter (FSDP2). The
          shards of a block are gathered when it runs; gradients are summed and sharded again (reduce-scatter).

A frozen matrix is cut into plain tensors. A trained tensor is a DTensor, so that its gradient, its norm and a snapshot
know its sharding. B of q, k, v, gate and up and A of o and down are sharded like their matrix. The other factor is
replicated on all ranks of a layer, and each rank has a part of the sum that is its gradient.

Source: arXiv:1909.08053 (the two communications of a layer), arXiv:2304.11277; torch.distributed.fsdp.fully_shard.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from llorch.pytorch.causal_lm import CausalLM, Hidden, Keep, keep_nothing
from llorch.pytorch.distributed.launch import axes_of, gathered, summed
from llorch.pytorch.distributed.sharding_plan import COLUMNS, EXPERTS, ROWS, require_split, sharing_layers
from llorch.pytorch.lora.modules import LoraModule
from llorch.pytorch.models.experts import ExpertIds, ExpertsModule, PerExpert, QuantisedExperts, SparseMoe
from llorch.runtime.errors import UserError
from llorch.stages.table import BY_NAME

OF_EXPERTS = frozenset({"expert_gate", "expert_up", "expert_act", "expert_out"})  # zero for other ranks' experts
SPLIT = frozenset({"q_width", "kv_width", "heads", "kv_heads", "inter", "shared_inter"})  # sharded axes of stages


def parallelize(module: CausalLM, mesh: DeviceMesh) -> CausalLM:
    """Prepare this rank's part of a model, in place; `keep`, the observer of stages, gets complete ones on every rank.

    The weights were cut when they were loaded, see `sharding_plan.cut_for`; adapters to be trained are cut here.
    The mesh has an axis `tp`, `dp` or both; `dp` is for training, under `Together`. Raises UserError if the ranks of
    `tp` do not divide the heads or the intermediate width, or a layer is not dense.
    """
    if (ranks := sharing_layers(mesh)) is not None:
        require_split(module.config, ranks.size())
        connect(module, ranks)
    if "dp" in axes_of(mesh):
        for layer in module.model.layers:
            _sharded(layer, module, mesh["dp"])
    return module


def connect(module: CausalLM, ranks: DeviceMesh) -> None:
    """Add the communication of cut layers, the sum of their outputs, and the sharding of their adapters."""
    for layer in module.model.layers:
        if isinstance(layer.mlp, SparseMoe):
            _require_plain_experts(layer)
            split_experts(layer, ranks, layer.mlp.gate.out_features, lambda part: _leaving(part, ranks))
        for name in _entry_paths(layer):
            layer.get_submodule(name).register_forward_pre_hook(lambda _, args: (_entering(args[0], ranks), *args[1:]))
        for path, submodule in _sharded_modules(layer):
            if path in ROWS:
                submodule.register_forward_hook(lambda _, args, part: _leaving(part, ranks))
            if isinstance(submodule, LoraModule):
                _cut_adapters(submodule, ranks, by_rows=path in ROWS)
    module.register_forward_pre_hook(
        lambda _, args, kwargs: (args, _with_whole_stages(kwargs, ranks)), with_kwargs=True
    )


class Together(nn.Module):
    """FSDP root of a sharded model: while it runs a function, the parameters outside the blocks are gathered."""

    def __init__(self, module: CausalLM, ranks: DeviceMesh) -> None:
        """Shard the parameters outside the blocks, too."""
        super().__init__()
        self.module = module
        _sharded(self, module, ranks)

    def forward(self, work: Callable[[CausalLM], Any]) -> Any:
        """Call `work` with the model and return the result."""
        return work(self.module)

    def gather_gradients(self, *, now: bool) -> None:
        """Set if the next backward pass sums gradients over ranks; False: a later pass of the step does."""
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(now, recurse=False)


def _require_plain_experts(layer: Any) -> None:
    """Refuse adapters on experts, and packed experts: llorch cannot cut them."""
    modules = [submodule for path, submodule in _sharded_modules(layer) if path in EXPERTS]
    if any(isinstance(submodule, LoraModule) for submodule in modules):
        raise UserError("tensor parallel: cannot split adapters on experts; adapt other matrices, or use tp=1")
    if any(isinstance(submodule, QuantisedExperts) for submodule in modules):
        raise UserError("tensor parallel: cannot split packed experts; use --weights decoded")


def _entry_paths(layer: Any) -> Iterator[str]:
    """Yield the paths of modules whose input is equal on all ranks, but its gradient a sum over ranks."""
    yield "self_attn"
    if not isinstance(layer.mlp, SparseMoe):
        yield "mlp"
        return
    yield "mlp.experts"  # not the router, which is replicated, as is its gradient
    if layer.mlp.shared_expert is not None:
        yield "mlp.shared_expert"


def _sharded_modules(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    modules = dict(layer.named_modules())
    yield from ((path, modules[path]) for path in (*COLUMNS, *ROWS, *EXPERTS) if path in modules)


def _cut_adapters(submodule: LoraModule, ranks: DeviceMesh, *, by_rows: bool) -> None:
    """Shard the adapter tensors that have the sharded axis of their matrix; replicate the others.

    `by_rows`: the matrix has some input columns on each rank (o and down, `ROWS`), so A has; else some output rows.
    """
    cut, copy = Shard(1 if by_rows else 0), Replicate()
    kinds = {"A": cut if by_rows else copy, "B": copy if by_rows else cut, "vector": copy if by_rows else cut}
    stores = (submodule.lora_A, submodule.lora_B, submodule.lora_magnitude_vector, submodule.start_A, submodule.start_B)
    for store, kind in zip(stores, ("A", "B", "vector", "A", "B"), strict=True):
        for name, parameter in list(store.items()):
            shard = distribute_tensor(parameter.data, ranks, [kinds[kind]], src_data_rank=None)
            store[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    submodule.own = _own_part
    if by_rows:
        submodule.part = ranks.get_local_rank()  # for dropout masks of this rank's features
        submodule.join_lengths = lambda lengths: summed(lengths.square(), ranks).sqrt()


def _own_part(parameter: Tensor) -> Tensor:
    """Return the tensor that a rank computes with; the gradient of a replicated tensor is a partial sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in parameter.placements])


def _entering(x: Tensor, ranks: DeviceMesh) -> Tensor:
    """Return the input of a cut layer unchanged; in backward its gradient is summed over all ranks."""
    return DTensor.from_local(x, ranks, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _leaving(part: Tensor, ranks: DeviceMesh) -> Tensor:
    """Sum the outputs of all ranks; in backward each part gets the gradient of the sum."""
    parts = DTensor.from_local(part, ranks, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _sharded(part: nn.Module, module: CausalLM, ranks: DeviceMesh) -> None:
    """Shard a module with FSDP; its gradients are summed over the ranks, in at least float32, not averaged."""
    reduce_dtype = torch.promote_types(module.model.norm.weight.dtype, torch.float32)
    fully_shard(part, mesh=ranks, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False))
    assert isinstance(part, FSDPModule)
    part.set_gradient_divide_factor(1.0)  # losses are divided by the tokens of all ranks
    part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def _with_whole_stages(kwargs: dict[str, Any], ranks: DeviceMesh) -> dict[str, Any]:
    """Make the observer in the arguments see complete stages, not the parts of this rank."""
    keep = kwargs.get("keep", keep_nothing)
    return kwargs if keep is keep_nothing else kwargs | {"keep": _of_whole_stages(keep, ranks)}


def _of_whole_stages(keep: Keep, ranks: DeviceMesh) -> Keep:
    """Return a `keep` that gathers sharded stages for `keep`, and returns this rank's part of the result."""

    def keep_gathered(name: str, part: Tensor) -> Tensor:
        stage = BY_NAME[name.rpartition(".")[2]]
        if stage.name in OF_EXPERTS:
            complete = summed(part.clone(), ranks)
            replacement = keep(name, complete)
            return part if replacement is complete else replacement
        axes = ("batch", *stage.axes.split())
        axis = next((index for index, axis in enumerate(axes) if axis in SPLIT), None)
        if axis is None:
            return keep(name, part)
        complete = gathered(part, axis, ranks)
        replacement = keep(name, complete)
        return part if replacement is complete else replacement.chunk(ranks.size(), axis)[ranks.get_local_rank()]

    return keep_gathered


class LocalExperts(ExpertsModule):
    """Experts of this rank, with the interface of all experts; selections of other experts give zeros."""

    def __init__(self, experts: ExpertsModule, first: int) -> None:
        """Take over the modules of experts whose stacks were cut; `first` is the first expert of this rank."""
        nn.Module.__init__(self)
        for name, child in experts.named_children():
            setattr(self, name, child)
        self.act = experts.act
        self.first = first

    def forward(self, h: Hidden | PerExpert, ids: ExpertIds, keep: Keep) -> PerExpert:
        """Compute the outputs of this rank's experts, and zeros for selections of other experts."""
        is_local = (ids >= self.first) & (ids < self.first + self.gate_proj.n_experts)
        x = h if h.dim() > ids.dim() else h[:, :, None].expand(*ids.shape, -1)

        def keep_all(name: str, rows: Tensor) -> Tensor:
            return keep(name, _among_zeros(rows, is_local))[is_local][None, :, None]

        local_ids = (ids - self.first)[is_local][None, :, None]  # (1, rows, 1): selections of this rank's experts
        return _among_zeros(super().forward(x[is_local][None, :, None], local_ids, keep_all), is_local)


def _among_zeros(rows: Tensor, is_local: Tensor) -> PerExpert:
    """Scatter the rows of local selections into a tensor of all selections; other rows are zero."""
    return rows.new_zeros(*is_local.shape, rows.shape[-1]).masked_scatter(is_local[..., None], rows)


def split_experts(layer: Any, ranks: DeviceMesh, n_experts: int, sum_over: Callable[[Tensor], Tensor]) -> None:
    """Make a layer use the experts of this rank, and sum the outputs of all ranks."""
    first = int(torch.arange(n_experts).chunk(ranks.size())[ranks.get_local_rank()][0])
    layer.mlp.experts = LocalExperts(layer.mlp.experts, first)
    layer.get_submodule("mlp.experts").register_forward_hook(lambda _, args, part: sum_over(part))
