"""TransformerLens: its hooks are named after stages, so one table maps them.

The bridge runs the modules of transformers, except for its own attention, rotation and norms.
"""
# pyright: basic, reportMissingImports=false

import re
from typing import Any

import torch
from harness import HarnessRun, answer
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformers import DynamicCache, PreTrainedTokenizerFast

STAGES = {  # hook, in a block after its number: its stage, and its axes if they differ from the stage's
    "embed.hook_out": ("embed", ""), "ln_final.hook_out": ("final_norm", ""), "unembed.hook_out": ("logits", ""),
    "ln1.hook_out": ("attn_norm", ""), "ln2.hook_in": ("attn_residual", ""), "ln2.hook_out": ("ffn_norm", ""),
    "attn.q.hook_out": ("q_proj", ""), "attn.k.hook_out": ("k_proj", ""), "attn.v.hook_out": ("v_proj", ""),
    "attn.q_norm.hook_out": ("q_norm", "heads seq head_dim"),
    "attn.k_norm.hook_out": ("k_norm", "kv_heads seq head_dim"),
    "attn.hook_rot_q": ("q_rope", ""), "attn.hook_rot_k": ("k_rope", ""), "attn.hook_pattern": ("attn_probs", ""),
    "attn.o.hook_in": ("attn_context", ""), "attn.o.hook_out": ("attn_out", ""),
    "mlp.gate.hook_out": ("ffn_gate", ""), "mlp.in.hook_out": ("ffn_up", ""),
    "linear_attn.hook_out": ("linear_out", ""), "mlp.out.hook_in": ("ffn_act", ""),
    "mlp.out.hook_out": ("ffn_out", ""), "hook_out": ("block_out", ""),
}  # fmt: skip
ROWS = ("q_proj", "q_gate_proj", "k_proj", "v_proj", "attn_context", "attn_gated", "router_logits")  # heads joined


class BridgedModel:
    """Bridge, and the cache of transformers that it continues."""

    def __init__(self, run: HarnessRun) -> None:
        """Load the model of a run into transformer_lens's bridge, without a tokenizer."""
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>")),
            bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<s>",
        )  # fmt: skip
        tokenizer.save_pretrained(run.scratch)  # the bridge reloads it from the folder
        tokenizer = PreTrainedTokenizerFast.from_pretrained(run.scratch)
        dtype = getattr(torch, run.options.get("dtype", "float32"))
        self.model = TransformerBridge.boot_transformers(run.model, dtype=dtype, device="cpu", tokenizer=tokenizer)
        self.cache = DynamicCache(config=self.model.original_model.config)

    def shows(self, stage: str, layer: int | None) -> bool:
        """Return whether a hook has the stage: some layers do not rotate, and some queries are also scaled."""
        config = self.model.original_model.config
        flags, rope = getattr(config, "no_rope_layers", None), getattr(config, "rope_parameters", None) or {}
        rotates = not flags or layer is None or bool(flags[layer])
        is_tempered = stage == "q_rope" and "llama_4_scaling_beta" in rope
        return not stage.endswith("_rope") or (rotates and not is_tempered)

    def forward(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """Run a pass and return the tensor of every hook."""
        with torch.no_grad():
            return self.model.run_with_cache(torch.tensor([ids]), past_key_values=self.cache, use_cache=True)[1]


def _variant_hooks(prefix: str, hooks: Any) -> dict[str, tuple[str, str]]:
    """Map the hooks of a block with experts, or with queries that contain gates."""
    stages = {}
    if f"{prefix}mlp.gate.hook_out" in hooks and f"{prefix}mlp.in.hook_out" not in hooks:
        stages |= {"mlp.gate.hook_out": ("router_logits", ""), "mlp.hook_out": ("moe_out", "")}
    q, o = (hooks.get(f"{prefix}attn.{name}") for name in ("q.hook_out", "o.hook_in"))
    if q is not None and o is not None and q.numel() == 2 * o.numel():
        stages |= {"attn.q.hook_out": ("q_gate_proj", ""), "attn.o.hook_in": ("attn_gated", "")}
    return stages


def compute(engine: BridgedModel, run: HarnessRun, dump: Any) -> None:
    """Run all passes on one cache."""
    for ids, first_position in run.passes:
        dump.begin(ids, first_position)
        hooks = dict(engine.forward(ids).items())
        for hook, tensor in hooks.items():
            block = re.match(r"blocks\.(\d+)\.", hook)
            prefix, layer = (block[0], int(block[1])) if block else ("", None)
            name, axes = (STAGES | _variant_hooks(prefix, hooks)).get(hook.removeprefix(prefix), ("", ""))
            if name and engine.shows(name, layer):
                array = tensor.float().numpy()
                dump.add(name, array.reshape(len(ids), -1) if name in ROWS else array[0], layer=layer, axes=axes)


if __name__ == "__main__":
    answer("transformer-lens", BridgedModel, compute)
