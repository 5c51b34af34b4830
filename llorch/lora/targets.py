"""What an adapter can be put on: every matrix of a model, under its names in all formats."""

from collections.abc import Mapping
from dataclasses import dataclass

from llorch.config import ModelConfig
from llorch.files.names import inventory

LAYER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OUTER_TARGETS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class Target:
    """One matrix that an adapter may stand beside."""

    name: str  # canonical: `layers.3.q_proj`, `embed_tokens` or `lm_head`
    path: str  # module path in transformers: `model.layers.3.self_attn.q_proj`
    gguf: str  # tensor name in GGUF without its suffix: `blk.3.attn_q`
    n_in: int  # of an embedding the vocabulary
    n_out: int
    interleaved_heads: int  # heads whose rows a GGUF file of this model holds in pairs; 0: rows as in Hugging Face
    weight: str  # canonical name of the base weight; a tied `lm_head` has that of the embedding

    @property
    def is_embedding(self) -> bool:
        """Whether its input is token ids."""
        return self.name == "embed_tokens"


def targets_of(config: ModelConfig) -> Mapping[str, Target]:
    """Every matrix that an adapter can be put on, in forward order; `lm_head` also where it is tied."""
    found: dict[str, Target] = {}
    for weight in inventory(config).values():
        short = weight.name.rpartition(".")[2]
        if short in (*LAYER_TARGETS, *OUTER_TARGETS):
            n_out, n_in = weight.shape if short != "embed_tokens" else weight.shape[::-1]
            path, gguf = weight.huggingface.removesuffix(".weight"), weight.gguf.removesuffix(".weight")
            found[weight.name] = Target(weight.name, path, gguf, n_in, n_out, weight.interleaved_heads, weight.name)
    head = Target("lm_head", "lm_head", "output", config.hidden_size, config.vocab_size, 0, "embed_tokens")
    lm_head = found.pop("lm_head", head)  # last in the forward pass
    return found | {"lm_head": lm_head}
