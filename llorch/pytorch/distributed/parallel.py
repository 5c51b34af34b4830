"""A model split over the ranks of a device mesh; the module `causal_lm` does not know of it.

    tp    tensor parallel: ranks that share every layer. Each has some output rows of q, k, v, gate and up, so that it
          has whole heads and a part of the inner width; of o and down the input columns that belong to them, and the
          parts of the result are summed. Norms, embedding and logits are whole. Each has some experts, see
          `llorch.pytorch.distributed.parallel`; routers are whole.
    dp    data parallel: ranks that have other rows of a batch. Each keeps a share of every parameter (FSDP2); those of
          a block are put together when it runs, and gradients are summed as they are shared out again.

A frozen matrix is cut into plain tensors. A trained one is a DTensor, so that its gradient, its norm and a snapshot
know what it is a part of: B of q, k, v, gate and up and A of o and down are cut as their matrix is, the other factor is
the same on all ranks of a layer, and each rank has a part of the sum that is its gradient.

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
from llorch.pytorch.models.experts import Chosen, ExpertsModule, PerExpert, QuantisedExperts, SparseMoe
from llorch.runtime.errors import UserError
from llorch.stages.table import BY_NAME

OF_EXPERTS = frozenset({"expert_gate", "expert_up", "expert_act", "expert_out"})  # zero of other ranks' experts
SPLIT = frozenset({"q_width", "kv_width", "heads", "kv_heads", "inter", "shared_inter"})  # axes that ranks share


def parallelize(module: CausalLM, mesh: DeviceMesh) -> CausalLM:
    """Leave each rank its part of a model, in place; `keep` is shown whole stages on every rank.

    Its weights were cut as they were loaded, see `sharding_plan.cut_for`; adapters that are to be trained are whole.
    The mesh has an axis `tp`, `dp` or both; `dp` is for training, under `Together`. UserError where the ranks of `tp`
    do not divide the heads or the inner width, or a layer is not dense.
    """
    if (ranks := sharing_layers(mesh)) is not None:
        require_split(module.config, ranks.size())
        connect(module, ranks)
    if "dp" in axes_of(mesh):
        for layer in module.model.layers:
            _sharded(layer, module, mesh["dp"])
    return module


def connect(module: CausalLM, ranks: DeviceMesh) -> None:
    """Let layers that have their parts share the input, sum the results, and cut their adapters in the same way."""
    for layer in module.model.layers:
        if isinstance(layer.mlp, SparseMoe):
            _require_plain_experts(layer)
            split_experts(layer, ranks, layer.mlp.gate.out_features, lambda part: _leaving(part, ranks))
        for name in _entries(layer):
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
    """Runs work on a model whose parameters are shared out, those beside the blocks put together meanwhile."""

    def __init__(self, module: CausalLM, ranks: DeviceMesh) -> None:
        """Share out the rest of a model, too."""
        super().__init__()
        self.module = module
        _sharded(self, module, ranks)

    def forward(self, work: Callable[[CausalLM], Any]) -> Any:
        """Call `work` with the model and return the result."""
        return work(self.module)

    def gather_gradients(self, *, now: bool) -> None:
        """Set whether the backward pass to come sums gradients over ranks, or keeps them for a later pass that does."""
        for part in self.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(now, recurse=False)


def _require_plain_experts(layer: Any) -> None:
    modules = [submodule for path, submodule in _sharded_modules(layer) if path in EXPERTS]
    if any(isinstance(submodule, LoraModule) for submodule in modules):
        raise UserError("tensor parallel: cannot split adapters on experts; adapt other matrices, or use tp=1")
    if any(isinstance(submodule, QuantisedExperts) for submodule in modules):
        raise UserError("tensor parallel: cannot split packed experts; use --weights decoded")


def _entries(layer: Any) -> Iterator[str]:
    """Yield the modules whose input is equal on all ranks; the gradient of the input is a sum over ranks."""
    yield "self_attn"
    if not isinstance(layer.mlp, SparseMoe):
        yield "mlp"
        return
    yield "mlp.experts"  # and not what is beside them: a router is whole on all ranks, and so is its gradient
    if layer.mlp.shared_expert is not None:
        yield "mlp.shared_expert"


def _sharded_modules(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    there = dict(layer.named_modules())
    yield from ((path, there[path]) for path in (*COLUMNS, *ROWS, *EXPERTS) if path in there)


def _cut_adapters(submodule: LoraModule, ranks: DeviceMesh, *, by_rows: bool) -> None:
    """Cut each factor that has the axis along which its matrix is cut; other factors stay whole."""
    cut, whole = Shard(1 if by_rows else 0), Replicate()
    kinds = {"A": cut if by_rows else whole, "B": whole if by_rows else cut, "vector": whole if by_rows else cut}
    stores = (submodule.lora_A, submodule.lora_B, submodule.lora_magnitude_vector, submodule.start_A, submodule.start_B)
    for store, kind in zip(stores, ("A", "B", "vector", "A", "B"), strict=True):
        for name, parameter in list(store.items()):
            made = distribute_tensor(parameter.data, ranks, [kinds[kind]], src_data_rank=None)
            store[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    submodule.own = _own_part
    if by_rows:
        submodule.part = ranks.get_local_rank()
        submodule.joined = lambda lengths: summed(lengths.square(), ranks).sqrt()


def _own_part(parameter: Tensor) -> Tensor:
    """Return the tensor that a rank computes with; where all have it whole, each finds a part of its gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in parameter.placements])


def _entering(x: Tensor, ranks: DeviceMesh) -> Tensor:
    """Return the input of a cut layer unchanged; its gradients on all ranks are summed."""
    return DTensor.from_local(x, ranks, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _leaving(part: Tensor, ranks: DeviceMesh) -> Tensor:
    """Sum the results of all ranks; the gradient of the sum is the gradient of each part."""
    parts = DTensor.from_local(part, ranks, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _sharded(part: nn.Module, module: CausalLM, ranks: DeviceMesh) -> None:
    """Shard a part with FSDP; its gradients are summed over the ranks, in at least float32, not averaged."""
    wide = torch.promote_types(module.model.norm.weight.dtype, torch.float32)
    fully_shard(part, mesh=ranks, mp_policy=MixedPrecisionPolicy(reduce_dtype=wide, cast_forward_inputs=False))
    assert isinstance(part, FSDPModule)
    part.set_gradient_divide_factor(1.0)  # losses are divided by the tokens of all ranks
    part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def _with_whole_stages(kwargs: dict[str, Any], ranks: DeviceMesh) -> dict[str, Any]:
    """Let an observer in the arguments see whole stages, not the parts of this rank."""
    keep = kwargs.get("keep", keep_nothing)
    return kwargs if keep is keep_nothing else kwargs | {"keep": _of_whole_stages(keep, ranks)}


def _of_whole_stages(keep: Keep, ranks: DeviceMesh) -> Keep:
    """Gather a stage whose parts lie on all ranks for `keep`, and go on with this rank's part of the result."""

    def shown(name: str, part: Tensor) -> Tensor:
        stage = BY_NAME[name.rpartition(".")[2]]
        if stage.name in OF_EXPERTS:
            whole = summed(part.clone(), ranks)
            made = keep(name, whole)
            return part if made is whole else made
        axes = ("batch", *stage.axes.split())
        axis = next((at for at, axis in enumerate(axes) if axis in SPLIT), None)
        if axis is None:
            return keep(name, part)
        whole = gathered(part, axis, ranks)
        made = keep(name, whole)
        return part if made is whole else made.chunk(ranks.size(), axis)[ranks.get_local_rank()]

    return shown


class OwnExperts(ExpertsModule):
    """The experts of a rank, with the interface of all of them; gives zeros for choices of other ranks' experts."""

    def __init__(self, experts: ExpertsModule, first: int) -> None:
        """Take over the modules of experts whose stacks were cut; `first` is the number of the first one."""
        nn.Module.__init__(self)
        for name, child in experts.named_children():
            setattr(self, name, child)
        self.act = experts.act
        self.first = first

    def forward(self, h: Hidden | PerExpert, ids: Chosen, keep: Keep) -> PerExpert:
        """Compute the outputs of this rank's experts for their token, or their share of it, and zeros for others."""
        mine = (ids >= self.first) & (ids < self.first + self.gate_proj.n_experts)
        x = h if h.dim() > ids.dim() else h[:, :, None].expand(*ids.shape, -1)

        def keep_all(name: str, rows: Tensor) -> Tensor:
            return keep(name, _among_zeros(rows, mine))[mine][None, :, None]

        chosen = (ids - self.first)[mine][None, :, None]  # (1, rows, 1): the choices that are computed here
        return _among_zeros(super().forward(x[mine][None, :, None], chosen, keep_all), mine)


def _among_zeros(rows: Tensor, mine: Tensor) -> PerExpert:
    """Put the rows of some choices at their places in a tensor of all choices; other rows are zero."""
    return rows.new_zeros(*mine.shape, rows.shape[-1]).masked_scatter(mine[..., None], rows)


def split_experts(layer: Any, ranks: DeviceMesh, n_experts: int, sum_over: Callable[[Tensor], Tensor]) -> None:
    """Let a layer whose stacks of experts were cut ask those that are here, and sum what all ranks make."""
    first = int(torch.arange(n_experts).chunk(ranks.size())[ranks.get_local_rank()][0])
    layer.mlp.experts = OwnExperts(layer.mlp.experts, first)
    layer.get_submodule("mlp.experts").register_forward_hook(lambda _, args, part: sum_over(part))
