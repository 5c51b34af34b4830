"""The matrices of a model that an adapter may stand beside: those that PEFT trains, by PEFT's names.

What PEFT 0.21.2 trains in the models of transformers 5.23, found by training each of them there:

    self_attn.{q,k,v,o}_proj          a module (an nn.Linear), named in `target_modules`, of all families; beside a gate
                                      q_proj has its rows, too
    mlp.{gate,up,down}_proj           modules of dense layers
    linear_attn.in_proj_{qkv,z,b,a}   modules of Qwen3.5; Qwen3-Next has in_proj_qkvz and in_proj_ba, whose rows belong
                                      to two matrices of llorch, so that these share one lora_A
    linear_attn.out_proj              a module
    mlp.shared_expert.{gate,up,down}_proj, mlp.shared_expert_gate          modules
    mlp.gate.weight, feed_forward.router.weight       the router, a parameter of a module that is no nn.Linear: named
                                      in `target_parameters`
    mlp.experts.{gate_up,down}_proj   parameters, each of all experts: `target_parameters`. Every expert has a pair of
                                      its own; gate and up share lora_A

Of Qwen3-MoE and Qwen3-Next PEFT takes gate_proj, up_proj, down_proj and gate in `target_modules` to mean what they were
in transformers 4, the experts and the router, wherever they stand; it makes parameters of them, gate_up_proj of twice
the rank. Matrices of dense layers and shared experts are reached there as parameters only: gate_proj.weight.

    experts in a file   lora_A (experts * r, in): expert after expert      lora_B (out, r * experts): expert e has the
                        columns e, e + experts, ...          Llama 4: in and out are those of the parameter, which is
                        (in, out), so that A belongs to what comes out
    names               ...mlp.experts.lora_A.weight, and ...mlp.experts.base_layer.lora_A.weight of gate_up_proj where
                        down_proj has an adapter, too

Not trained: norms, dt_bias, A_log (vectors), conv1d (PEFT asks for a rank that its channels divide, and transformers
reads its weight past the adapter); the router of Llama 4 as a module (it gives two results, which PEFT cannot add to).
Dropout and DoRA do not go with parameters. `layers_to_transform` and `exclude_modules` do not hold for them.

In a multimodal model the text part is a part: model.language_model.layers.3 in Qwen2.5-VL, Qwen3-VL and Qwen3.5,
language_model.model.layers.3 and language_model.lm_head in Llama 4. Configurations name modules of the text part alone,
whatever the base lies in; an adapter's files name those of the model that the folder of the base holds.

Source: peft/tuners/lora/layer.py (`ParamWrapper`), peft/tuners/tuners_utils.py (`_inject_parameters`),
peft/utils/transformers_weight_conversion.py (`_convert_peft_config_moe`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llorch.families.config import ModelConfig
from llorch.families.table import FAMILIES
from llorch.files.tensor_names import Weight, interleave, inventory, path_in_whole, prefixes_of, written_family

OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # those names
_STACKS = {"gate_up_proj": ("experts_gate_proj", "experts_up_proj"), "down_proj": ("experts_down_proj",)}
ROUTERS = ("gate", "router")


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A matrix of llorch or of a GGUF file that some rows of a target are added to; None: all, as they are."""

    name: str
    rows: tuple[int, ...] | None = None  # of lora_B
    columns: tuple[int, ...] | None = None  # of lora_A


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """One matrix, or one for each expert, that an adapter may stand beside."""

    name: str  # canonical: `layers.3.q_proj`, `embed_tokens` or `lm_head`
    path: str  # in transformers: of a module `model.layers.3.self_attn.q_proj`, or of a parameter `...mlp.gate.weight`
    n_in: int  # of an embedding the vocabulary
    n_out: int
    parts: tuple[MatrixPart, ...]  # of the weights; a tied `lm_head` stands beside the embedding
    gguf: tuple[MatrixPart, ...]  # of the tensors in GGUF files, without the suffix of their names: `blk.3.attn_q`
    is_parameter: bool = False  # named in target_parameters, not target_modules
    n_experts: int = 0  # 0: one matrix
    turned: bool = False  # lora_A belongs to what comes out, lora_B to what goes in
    whole_path: str = field(default="", compare=False)  # module path in the multimodal model; empty for text-only bases

    @property
    def stored_path(self) -> str:
        """Path of the target in the files of an adapter."""
        return self.whole_path or self.path

    @property
    def is_embedding(self) -> bool:
        """True if its input is token ids."""
        return self.name == "embed_tokens"

    @property
    def weight(self) -> str:
        """The weight of the only part."""
        (part,) = self.parts
        return part.name

    def shape_A(self, rank: int) -> tuple[int, int]:
        """Shape of lora_A in a file."""
        return (rank * max(1, self.n_experts), self.n_out if self.turned else self.n_in)

    def shape_B(self, rank: int) -> tuple[int, int]:
        """Shape of lora_B in a file."""
        return (self.n_in if self.turned else self.n_out, rank * max(1, self.n_experts))

    def by_expert(self, lora_A: Any, lora_B: Any) -> tuple[Any, Any]:
        """Return views (experts, r, in) and (experts, out, r), arrays or tensors; without experts both as is."""
        if not self.n_experts:
            return lora_A, lora_B
        first = lora_A.reshape(self.n_experts, -1, lora_A.shape[1])
        second = lora_B.reshape(len(lora_B), -1, self.n_experts).swapaxes(0, 2).swapaxes(1, 2)
        return (second.swapaxes(1, 2), first.swapaxes(1, 2)) if self.turned else (first, second)

    def pair_of(self, part: MatrixPart, lora_A: np.ndarray, lora_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the adapter's matrices for one part; with experts each matrix has one more axis, in front."""
        own_A, own_B = self.by_expert(lora_A, lora_B)
        own_A = own_A if part.columns is None else own_A[..., list(part.columns)]
        return own_A, own_B if part.rows is None else own_B[..., list(part.rows), :]


def targets_of(config: ModelConfig) -> Mapping[str, LoraTarget]:
    """Return every matrix that an adapter can be put on, in forward order; `lm_head` also where it is tied."""
    weights = inventory(config)
    found = {"embed_tokens": _whole_target(weights["embed_tokens"], "model.embed_tokens")}
    for layer in range(config.n_layers):
        found |= {target.name: target for target in _of_layer(config, layer, weights)}
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    vocab, hidden = weights["embed_tokens"].shape
    found |= {"lm_head": LoraTarget("lm_head", "lm_head", hidden, vocab, (MatrixPart(head),), (MatrixPart("output"),))}
    if config.part_of_whole or written_family(config) != config.family:  # whose text part has no class of its own
        return in_whole(found, FAMILIES[config.family].layout.multimodal_prefixes)
    return found


def in_whole(targets: Mapping[str, LoraTarget], form: tuple[str, str]) -> dict[str, LoraTarget]:
    """Return the targets with their paths in a multimodal model; `form` is its family's `multimodal_prefixes`."""
    return {name: replace(target, whole_path=path_in_whole(target.path, form)) for name, target in targets.items()}


def alone(targets: Mapping[str, LoraTarget]) -> dict[str, LoraTarget]:
    """Return the targets with their paths in the text part alone."""
    return {name: replace(target, whole_path="") for name, target in targets.items()}


def _of_layer(config: ModelConfig, layer: int, weights: Mapping[str, Weight]) -> Iterator[LoraTarget]:
    """Yield the matrices of a layer that an adapter can be put on, in forward order."""
    traits, (ours, _, theirs), family = config.traits(layer), prefixes_of(layer), FAMILIES[config.family]
    mlp = family.layout.all_names["mlp"]
    as_parameter = ".weight" if "old_expert_names" in family.transformers.habits else ""

    def plain(short: str, path: str) -> LoraTarget:
        return _whole_target(weights[ours + short], theirs + path)

    if "delta_net" in traits:
        if family.delta_net == "fused":
            for short, of in (("in_proj_qkvz", ("in_qkv", "in_z")), ("in_proj_ba", ("in_b", "in_a"))):
                yield _joined_target(f"{theirs}linear_attn.{short}", short, [weights[ours + part] for part in of])
        else:
            yield from (plain(f"in_{which}", f"linear_attn.in_proj_{which}") for which in ("qkv", "z", "b", "a"))
        yield plain("out_proj", "linear_attn.out_proj")
    else:
        yield from (plain(f"{which}_proj", f"self_attn.{which}_proj") for which in "qkvo")
    if "experts" not in traits:
        yield from (plain(short, f"{mlp}.{short}{as_parameter}") for short in OF_EXPERTS)
        return
    yield plain("router", weights[ours + "router"].huggingface.removeprefix(theirs))
    turned = family.layout.transposed_experts == "modules"
    for short, of in _STACKS.items():
        parts = [weights[ours + part] for part in of]
        yield _experts_target(f"{theirs}{mlp}.experts.{short}", short, parts, turned=turned)
    if "shared" in traits:
        yield from (plain(f"shared_{short}", f"{mlp}.shared_expert.{short}{as_parameter}") for short in OF_EXPERTS)
    if "shared_gate" in traits:
        yield plain("shared_gate", f"{mlp}.shared_expert_gate")


def _whole_target(weight: Weight, path: str) -> LoraTarget:
    """Make the target of a weight that is one matrix in every format."""
    short, (n_out, n_in) = weight.name.rpartition(".")[2], weight.shape
    if short == "embed_tokens":
        n_out, n_in = n_in, n_out
    gguf = MatrixPart(_tensor(weight), *_order_in_gguf(weight))
    is_parameter = path.endswith(".weight")
    return LoraTarget(weight.name, path, n_in, n_out, (MatrixPart(weight.name),), (gguf,), is_parameter)


def _order_in_gguf(weight: Weight) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the rows and columns of llorch's matrix in the order of a GGUF file; None where the order is equal."""
    if weight.interleaved_heads:
        return _integers_of(interleave(np.arange(weight.shape[0])[:, None], weight.interleaved_heads)[:, 0]), None
    layout = weight.in_gguf
    rows, columns = (
        None if at is None else _integers_of(np.argsort(at.index())) for at in (layout.rows, layout.columns)
    )
    return rows, columns


def _joined_target(path: str, short: str, of: list[Weight]) -> LoraTarget:
    """Make the target of one of the two joined matrices of Qwen3-Next; GGUF files split qkv and z, and join b and a."""
    rows = [_integers_of(weight.in_huggingface.rows.index()) for weight in of if weight.in_huggingface.rows is not None]
    parts = tuple(MatrixPart(weight.name, own) for weight, own in zip(of, rows, strict=True))
    tensors = {_tensor(weight): own for weight, own in zip(of, rows, strict=True)}
    gguf = tuple(MatrixPart(name, own if len(tensors) > 1 else None) for name, own in tensors.items())
    prefix = of[0].name.rpartition(".")[0]
    return LoraTarget(f"{prefix}.{short}", path, of[0].shape[1], sum(map(len, rows)), parts, gguf)


def _experts_target(path: str, short: str, of: list[Weight], *, turned: bool) -> LoraTarget:
    """Make the target of a parameter that holds a matrix of every expert, gate and up joined."""
    n_experts, n_out, n_in = of[0].shape
    rows = [_integers_of(np.arange(i * n_out, (i + 1) * n_out)) if len(of) > 1 else None for i in range(len(of))]
    parts = tuple(MatrixPart(weight.name, own) for weight, own in zip(of, rows, strict=True))
    gguf = tuple(MatrixPart(_tensor(weight), own) for weight, own in zip(of, rows, strict=True))
    name = f"{of[0].name.rpartition('.')[0]}.experts_{short}"
    return LoraTarget(
        name, path, n_in, n_out * len(of), parts, gguf, is_parameter=True, n_experts=n_experts, turned=turned
    )


def _tensor(weight: Weight) -> str:
    """Return the weight's GGUF name without its ending."""
    return weight.gguf.removesuffix(".weight")


def _integers_of(index: np.ndarray) -> tuple[int, ...]:
    return tuple(index.tolist())
