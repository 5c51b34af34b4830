"""Stages of the delta nets of transformers: Qwen3-Next and Qwen3.5, in chunks and token by token.

The fused matrices of Qwen3-Next hold, for every key head, the rows of its query, its key, its values and their gates;
here they are taken apart, as Qwen3.5 has them. Queries and keys are seen behind their L2 norm, where each is repeated
for the value heads that read it.

Source: transformers `modeling_qwen3_next.py`, class Qwen3NextGatedDeltaNet, and `modeling_qwen3_5.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from llorch.engines.capture.calls import Calls, Keep


class DeltaNetCalls(Calls):
    """Looks at one delta net."""

    def __init__(self, module: Any, layer: int, keep: Keep, given: Mapping[str, Any]) -> None:
        """Begin to watch the functions that one delta net calls."""
        super().__init__(module, layer, keep, given)
        self._n_tokens = given["hidden_states"].shape[1]
        self._repeated = module.num_v_heads // module.num_k_heads
        self._softplus = self._inverse_norm = None  # what these functions made last
        self._left = {"silu": ["conv_out"], "sigmoid": ["beta"], "l2": ["q_l2", "k_l2"]}  # stages not seen yet
        self._hooks = [module.norm.register_forward_pre_hook(lambda _, inputs: self._norm(inputs[0]))]
        if hasattr(module, "in_proj_qkvz"):
            self._hooks += [
                module.in_proj_qkvz.register_forward_hook(lambda _, __, made: self._qkvz(made[0])),
                module.in_proj_ba.register_forward_hook(lambda _, __, made: self._ba(made[0])),
            ]

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the stages that a call shows; of several calls the first counts, in the order of the formulas."""
        if self._left.get(name):
            shown = made[0, :, -self._n_tokens :].T if name == "silu" else made[0]
            self.keep(self._left[name].pop(0), self.layer, shown)
        elif name == "softplus":
            self._softplus = made
        elif name == "rsqrt":
            self._inverse_norm = made
        elif name in ("mul", "__mul__") and args[1] is self._softplus is not None:
            self.keep("log_decay", self.layer, made[0])
        elif name in ("mul", "__mul__") and args[1] is self._inverse_norm is not None and self._left["l2"]:
            self._normalised(made[0])

    def done(self) -> None:
        """Show what the cache holds now."""
        for hook in self._hooks:
            hook.remove()
        if (cache := self.given.get("cache_params")) is not None:
            states = cache.layers[self.layer]
            self.keep("conv_state", self.layer, states.conv_states[0][0, :, 1 - self.module.conv_kernel_size :].T)
            self.keep("delta_state", self.layer, states.recurrent_states[0][0])

    def _normalised(self, heads: torch.Tensor) -> None:
        """Show one row for each key head, of (v_heads, seq, key_dim)."""
        once = heads[:: self._repeated]
        if self.keep(self._left["l2"].pop(0), self.layer, once.transpose(0, 1)):
            heads.copy_(once.repeat_interleave(self._repeated, dim=0))

    def _norm(self, rows: torch.Tensor) -> None:
        self.keep("delta_out", self.layer, rows.view(self._n_tokens, -1, rows.shape[-1]))

    def _qkvz(self, fused: torch.Tensor) -> None:
        net, values = self.module, self._repeated * self.module.head_v_dim
        query, key, value, z = self._split_by_key_head(fused, [net.head_k_dim, net.head_k_dim, values, values])
        self._joined("qkv_in", [query, key, value])
        self._joined("z_in", [z])

    def _ba(self, fused: torch.Tensor) -> None:
        b, a = self._split_by_key_head(fused, [self._repeated, self._repeated])
        self._joined("b_in", [b])
        self._joined("a_in", [a])

    def _split_by_key_head(self, fused: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
        """Split a fused projection into parts of the given sizes, each (tokens, key heads, size)."""
        return fused.view(self._n_tokens, self.module.num_k_heads, -1).split(sizes, dim=-1)

    def _joined(self, stage: str, parts: Sequence[torch.Tensor]) -> None:
        """Keep parts as one stage; what replaces the stage is written back into the parts."""
        shown = torch.cat([part.flatten(1) for part in parts], dim=-1)
        if self.keep(stage, self.layer, shown):
            widths = [part[0].numel() for part in parts]
            for part, new in zip(parts, shown.split(widths, dim=-1), strict=True):
                part.copy_(new.view(part.shape))
