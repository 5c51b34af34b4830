"""The experts of Llama 4: chosen by logits, given a share of the token, and the shared one counts whole.

Source: transformers `modeling_llama4.py`, Llama4TextMoe.
"""

from llorch.pytorch.causal_lm import Hidden, Keep, widened
from llorch.pytorch.models.experts import SparseMoe


class Llama4Moe(SparseMoe):
    """Route each token to a few experts, multiply what each is given, add up what they make, and the shared one."""

    def forward(self, h: Hidden, keep: Keep) -> Hidden:
        """Compute the array that the feed-forward part adds to the residual stream."""
        logits = keep("router_logits", self.gate(h))
        ids = keep("topk_ids", logits.sort(dim=-1, descending=True, stable=True).indices[..., : self.n_chosen])
        weights = keep("topk_weights", self.sigmoid(widened(logits.gather(-1, ids))).to(h.dtype))
        shares = keep("expert_in", h[:, :, None] * weights[..., None])  # (batch, seq, topk, hidden)
        out = self.mixed(self.experts(shares, ids, keep), weights.new_ones(weights.shape))
        assert self.shared_expert is not None  # Llama 4 always has one
        return keep("moe_out", (out + widened(self.shared_expert(h, keep))).to(h.dtype))
