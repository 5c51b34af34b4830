"""Stages of the mixtures of experts of transformers, computed expert by expert (the eager implementation).

The loop over experts takes, for each, the tokens that chose it: `torch.where` says which, the first product after it
makes gate and up, the second what comes out. Put back in the order of the choices these are stages.

Llama 4 multiplies every expert with all tokens at once; the rows of those that chose it are picked out.

Source: transformers `modeling_llama4.py`, `modeling_qwen3_moe.py`, classes Qwen3MoeTopKRouter and Qwen3MoeExperts;
Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE have the same.
"""

from typing import Any

import torch

from llorch.engines.capture.calls import Calls


class SharedGate(Calls):
    """The block: the only sigmoid in it is the gate of the shared expert."""

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the gate of the shared expert that a call shows."""
        if name == "sigmoid":
            self.keep("shared_gate", self.layer, made)


class Router(Calls):
    """Logits, probabilities, the choice and its weights."""

    _probs: torch.Tensor
    _chosen = False

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the stages that a call shows; weights are final in the last call, except for the dtype of the run."""
        if name == "linear":
            self.keep("router_logits", self.layer, made)
        elif name == "softmax":
            self.keep("router_probs", self.layer, made)
            self._probs = made
        elif name == "topk":
            if self.keep("topk_ids", self.layer, made.indices):
                made.values.copy_(self._probs.gather(-1, made.indices))
            self._chosen = True
        elif name == "to" and self._chosen:
            self.keep("topk_weights", self.layer, made)


class Chosen(Calls):
    """The loop over experts."""

    _PARTS = ("expert_gate", "expert_up", "expert_act", "expert_out")

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the products of the chosen experts that a call shows."""
        if name == "one_hot":
            self._shape, self._stages, self._theirs = args[0].shape, dict[str, torch.Tensor](), dict[str, Any]()
        elif name == "where":
            self._at, self._is_first = (made[1], made[0]), True  # token, place among its experts
        elif name == "linear" and self._is_first:
            gate, up = made.chunk(2, dim=-1)
            self._part("expert_gate", gate)
            self._part("expert_up", up)
            self._is_first = False
        elif name == "linear":
            if self._part("expert_act", args[0]):
                made.copy_(torch.nn.functional.linear(*args))
            self._part("expert_out", made)

    def done(self) -> None:
        """Show the stages of all experts, put together."""
        for stage in self._PARTS:
            self.keep(stage, self.layer, self._stages[stage])

    def _part(self, stage: str, rows: torch.Tensor) -> bool:
        """Note the rows of one expert; whether the engine goes on with others."""
        if stage not in self._stages:
            self._stages[stage] = rows.new_empty(*self._shape, rows.shape[-1])
            self._theirs[stage] = self.instead(stage, self.layer)
        self._stages[stage][self._at] = rows
        if (theirs := self._theirs[stage]) is None:
            return False
        rows.copy_(theirs[self._at])
        return True


class Llama4Calls(Calls):
    """The feed-forward part of Llama 4: every expert is given all tokens, times nothing where it was not chosen."""

    def called(self, name: str, args: tuple, made: Any) -> None:
        """Keep the stages that a call shows; a dense layer has no router."""
        if not hasattr(self.module, "router"):
            return
        if name == "linear" and not hasattr(self, "_logits"):
            self._logits = made
            self.keep("router_logits", self.layer, made)
        elif name == "topk":
            if self.keep("topk_ids", self.layer, made.indices):
                made.values.copy_(self._logits.gather(-1, made.indices))
            self._ids = made.indices
        elif name == "sigmoid":
            weights = made.gather(-1, self._ids)
            if self.keep("topk_weights", self.layer, weights):
                made.scatter_(-1, self._ids, weights)
        elif name == "bmm":
            self._product(args, made)

    def _product(self, args: tuple, made: torch.Tensor) -> None:
        """Show a product over all experts: the first makes gate and up, the second makes the experts' outputs."""
        is_first = not hasattr(self, "_is_second")
        self._is_second = True
        if self._chosen("expert_in" if is_first else "expert_act", args[0]):
            torch.bmm(*args, out=made)
        if not is_first:
            self._chosen("expert_out", made)
            return
        for stage, part in zip(("expert_gate", "expert_up"), made.chunk(2, dim=-1), strict=True):
            self._chosen(stage, part)

    def _chosen(self, stage: str, of_all: torch.Tensor) -> bool:
        """Show what experts have of the tokens that chose them, of (experts, tokens, width)."""
        tokens = torch.arange(len(self._ids), device=of_all.device)[:, None]
        rows = of_all[self._ids, tokens]  # (tokens, chosen, width)
        if wrote := self.keep(stage, self.layer, rows):
            of_all[self._ids, tokens] = rows
        return wrote


EXPERTS: dict[str, type[Calls]] = {
    "mlp": SharedGate, "mlp.gate": Router, "mlp.experts": Chosen, "feed_forward": Llama4Calls,
}  # fmt: skip
