"""Matrices of a model that an adapter may target: the matrices that PEFT trains, by PEFT's names.

PEFT 0.21.2 trains these in the models of transformers 5.23 (verified by training each of them):

    self_attn.{q,k,v,o}_proj          modules (nn.Linear) of all families, named in `target_modules`; with gated
                                      attention q_proj also has the rows of the gate
    mlp.{gate,up,down}_proj           modules of dense layers
    linear_attn.in_proj_{qkv,z,b,a}   modules of Qwen3.5; Qwen3-Next has in_proj_qkvz and in_proj_ba, whose rows belong
                                      to two matrices of llorch, so these share one lora_A
    linear_attn.out_proj              a module
    mlp.shared_expert.{gate,up,down}_proj, mlp.shared_expert_gate          modules
    mlp.gate.weight, feed_forward.router.weight       the router, a parameter of a module that is no nn.Linear: named
                                      in `target_parameters`
    mlp.experts.{gate_up,down}_proj   parameters with all experts: `target_parameters`. Every expert has its own
                                      lora_A and lora_B; gate and up share lora_A

In Qwen3-MoE and Qwen3-Next, PEFT reads gate_proj, up_proj, down_proj and gate in `target_modules` as the modules of
transformers 4, the experts and the router. It converts them to parameters, gate_up_proj with twice the rank. Matrices
of dense layers and shared experts of these families can only be named as parameters: gate_proj.weight.

    experts in a file   lora_A (experts * r, in): expert after expert      lora_B (out, r * experts): expert e has the
                        columns e, e + experts, ...          Llama 4: the parameter is stored as (in, out), so A
                        belongs to the output
    names               ...mlp.experts.lora_A.weight; if down_proj has an adapter too, gate_up_proj's is named
                        ...mlp.experts.base_layer.lora_A.weight

Not trained: norms, dt_bias, A_log (vectors), conv1d (PEFT needs a rank that divides its channels, and transformers
reads its weight without the adapter), the router of Llama 4 as a module (PEFT cannot add to its two outputs). Dropout
and DoRA cannot be combined with parameters. `layers_to_transform` and `exclude_modules` do not apply to them.

A multimodal model contains the text model: model.language_model.layers.3 in Qwen2.5-VL, Qwen3-VL and Qwen3.5,
language_model.model.layers.3 and language_model.lm_head in Llama 4. Configurations always use the module names of the
text model. An adapter's files use the names of the model in the base's folder.

Source: peft/tuners/lora/layer.py (`ParamWrapper`), peft/tuners/tuners_utils.py (`_inject_parameters`),
peft/utils/transformers_weight_conversion.py (`_convert_peft_config_moe`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files.tensor_names import Weight, interleave, inventory, layer_prefixes, to_multimodal, written_family

OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # module names of one expert
# Parameter of transformers -> llorch's stacks of experts' matrices.
_STACKS = {"gate_up_proj": ("experts_gate_proj", "experts_up_proj"), "down_proj": ("experts_down_proj",)}
ROUTERS = ("gate", "router")  # module names of routers


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Matrix of llorch or of a GGUF file that is a target, or a part of a fused one; its order may differ."""

    name: str
    rows: tuple[int, ...] | None = None  # rows of the target's lora_B, in the matrix's order; None: all, same order
    columns: tuple[int, ...] | None = None  # columns of the target's lora_A, in the matrix's order; None: all


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """Matrix, or matrices of all experts, that an adapter may target."""

    name: str  # canonical name: `layers.3.q_proj`, `embed_tokens` or `lm_head`
    path: str  # path in transformers: of a module (`model.layers.3.self_attn.q_proj`) or a parameter
    n_in: int  # vocabulary size for an embedding
    n_out: int
    parts: tuple[MatrixPart, ...]  # llorch's matrices; a tied `lm_head` uses the embedding
    gguf: tuple[MatrixPart, ...]  # tensors in GGUF files, without `.weight`: `blk.3.attn_q`
    is_parameter: bool = False  # named in target_parameters, not target_modules
    n_experts: int = 0  # 0 for one matrix
    swapped: bool = False  # the parameter is (in, out): lora_A belongs to the output, lora_B to the input
    multimodal_path: str = field(default="", compare=False)  # path in the multimodal model; empty for text-only bases

    @property
    def stored_path(self) -> str:
        """Path of the target in adapter files."""
        return self.multimodal_path or self.path

    @property
    def is_embedding(self) -> bool:
        """True if the input is token ids."""
        return self.name == "embed_tokens"

    @property
    def weight(self) -> str:
        """Name of the weight, for a target with one part."""
        (part,) = self.parts
        return part.name

    def shape_A(self, rank: int) -> tuple[int, int]:
        """Return the shape of lora_A in a file."""
        return (rank * max(1, self.n_experts), self.n_out if self.swapped else self.n_in)

    def shape_B(self, rank: int) -> tuple[int, int]:
        """Return the shape of lora_B in a file."""
        return (self.n_in if self.swapped else self.n_out, rank * max(1, self.n_experts))

    def by_expert(self, lora_A: Any, lora_B: Any) -> tuple[Any, Any]:
        """Return views (experts, r, in) and (experts, out, r) of arrays or tensors; unchanged without experts."""
        if not self.n_experts:
            return lora_A, lora_B
        a = lora_A.reshape(self.n_experts, -1, lora_A.shape[1])
        b = lora_B.reshape(len(lora_B), -1, self.n_experts).swapaxes(0, 2).swapaxes(1, 2)
        return (b.swapaxes(1, 2), a.swapaxes(1, 2)) if self.swapped else (a, b)

    def pair_of(self, part: MatrixPart, lora_A: np.ndarray, lora_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return lora_A and lora_B for one part; with experts, both have the expert axis in front."""
        part_A, part_B = self.by_expert(lora_A, lora_B)
        part_A = part_A if part.columns is None else part_A[..., list(part.columns)]
        return part_A, part_B if part.rows is None else part_B[..., list(part.rows), :]


def targets_of(config: ModelConfig) -> Mapping[str, LoraTarget]:
    """Return every matrix that an adapter can target, in forward order, including a tied `lm_head`."""
    weights = inventory(config)
    every = {"embed_tokens": _matrix_target(weights["embed_tokens"], "model.embed_tokens")}
    for layer in range(config.n_layers):
        every |= {target.name: target for target in _layer_targets(config, layer, weights)}
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    vocab, hidden = weights["embed_tokens"].shape
    every |= {"lm_head": LoraTarget("lm_head", "lm_head", hidden, vocab, (MatrixPart(head),), (MatrixPart("output"),))}
    if config.part_of_whole or written_family(config) != config.family:  # families without a class for the text model
        return with_multimodal_paths(every, FAMILIES[config.family].layout.multimodal_prefixes)
    return every


def with_multimodal_paths(targets: Mapping[str, LoraTarget], form: tuple[str, str]) -> dict[str, LoraTarget]:
    """Return the targets with paths of a multimodal model, too; `form` is its family's `multimodal_prefixes`."""
    return {name: replace(target, multimodal_path=to_multimodal(target.path, form)) for name, target in targets.items()}


def alone(targets: Mapping[str, LoraTarget]) -> dict[str, LoraTarget]:
    """Return the targets without paths of a multimodal model."""
    return {name: replace(target, multimodal_path="") for name, target in targets.items()}


def _layer_targets(config: ModelConfig, layer: int, weights: Mapping[str, Weight]) -> Iterator[LoraTarget]:
    """Yield the matrices of a layer that an adapter can target, in forward order."""
    traits, (prefix, _, owner), family = config.traits(layer), layer_prefixes(layer), FAMILIES[config.family]
    mlp = family.layout.all_names["mlp"]
    # Families in which PEFT takes gate_proj and others for experts, see above: only parameters name other matrices.
    as_parameter = ".weight" if "old_expert_names" in family.transformers.habits else ""

    def target(short: str, path: str) -> LoraTarget:
        return _matrix_target(weights[prefix + short], owner + path)

    if "delta_net" in traits:
        if family.delta_net == "fused":
            for short, names in (("in_proj_qkvz", ("in_qkv", "in_z")), ("in_proj_ba", ("in_b", "in_a"))):
                yield _fused_target(f"{owner}linear_attn.{short}", short, [weights[prefix + part] for part in names])
        else:
            yield from (target(f"in_{x}", f"linear_attn.in_proj_{x}") for x in ("qkv", "z", "b", "a"))
        yield target("out_proj", "linear_attn.out_proj")
    else:
        yield from (target(f"{x}_proj", f"self_attn.{x}_proj") for x in "qkvo")
    if "experts" not in traits:
        yield from (target(short, f"{mlp}.{short}{as_parameter}") for short in OF_EXPERTS)
        return
    yield target("router", weights[prefix + "router"].huggingface.removeprefix(owner))
    swapped = family.layout.transposed_experts == "modules"
    for short, names in _STACKS.items():
        parts = [weights[prefix + part] for part in names]
        yield _experts_target(f"{owner}{mlp}.experts.{short}", short, parts, swapped=swapped)
    if "shared" in traits:
        yield from (target(f"shared_{short}", f"{mlp}.shared_expert.{short}{as_parameter}") for short in OF_EXPERTS)
    if "shared_gate" in traits:
        yield target("shared_gate", f"{mlp}.shared_expert_gate")


def _matrix_target(weight: Weight, path: str) -> LoraTarget:
    """Make the target for a weight that is one matrix in every format."""
    short, (n_out, n_in) = weight.name.rpartition(".")[2], weight.shape
    if short == "embed_tokens":
        n_out, n_in = n_in, n_out
    gguf = MatrixPart(_gguf_name(weight), *_order_in_gguf(weight))
    is_parameter = path.endswith(".weight")
    return LoraTarget(weight.name, path, n_in, n_out, (MatrixPart(weight.name),), (gguf,), is_parameter)


def _order_in_gguf(weight: Weight) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the indices of llorch's rows and columns in GGUF order; None for equal order."""
    if weight.interleaved_heads:
        return _integers(interleave(np.arange(weight.shape[0])[:, None], weight.interleaved_heads)[:, 0]), None
    layout = weight.in_gguf
    rows, columns = (
        None if order is None else _integers(np.argsort(order.index())) for order in (layout.rows, layout.columns)
    )
    return rows, columns


def _fused_target(path: str, short: str, weights: list[Weight]) -> LoraTarget:
    """Make the target for a fused matrix of Qwen3-Next; GGUF files split qkv and z, but also fuse b and a."""
    rows = [_integers(w.in_huggingface.rows.index()) for w in weights if w.in_huggingface.rows is not None]
    parts = tuple(MatrixPart(w.name, index) for w, index in zip(weights, rows, strict=True))
    tensors = {_gguf_name(w): index for w, index in zip(weights, rows, strict=True)}
    gguf = tuple(MatrixPart(name, index if len(tensors) > 1 else None) for name, index in tensors.items())
    prefix = weights[0].name.rpartition(".")[0]
    return LoraTarget(f"{prefix}.{short}", path, weights[0].shape[1], sum(map(len, rows)), parts, gguf)


def _experts_target(path: str, short: str, stack: list[Weight], *, swapped: bool) -> LoraTarget:
    """Make the target for a parameter with the matrices of all experts, gate and up fused."""
    n_experts, n_out, n_in = stack[0].shape
    rows = [_integers(np.arange(i * n_out, (i + 1) * n_out)) if len(stack) > 1 else None for i in range(len(stack))]
    parts = tuple(MatrixPart(w.name, index) for w, index in zip(stack, rows, strict=True))
    gguf = tuple(MatrixPart(_gguf_name(w), index) for w, index in zip(stack, rows, strict=True))
    name = f"{stack[0].name.rpartition('.')[0]}.experts_{short}"
    return LoraTarget(
        name, path, n_in, n_out * len(stack), parts, gguf, is_parameter=True, n_experts=n_experts, swapped=swapped
    )


def _gguf_name(weight: Weight) -> str:
    """Return the weight's GGUF name without `.weight`."""
    return weight.gguf.removesuffix(".weight")


def _integers(index: np.ndarray) -> tuple[int, ...]:
    return tuple(index.tolist())
