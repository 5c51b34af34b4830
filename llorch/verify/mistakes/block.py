"""Mistakes of checkpoints 05, 07 and 08: the two residual sums, the last norm, the output matrix."""

import numpy as np

from llorch.ops.linear import linear
from llorch.stages import StageInputs, output_matrix
from llorch.verify.mistakes.mistake import Mistake


def first_from_normed(s: StageInputs, stage: str) -> np.ndarray:
    """The normalised input as residual."""
    return s["attn_norm"] + s["attn_out"]


def first_skipped(s: StageInputs, stage: str) -> np.ndarray:
    """No residual."""
    return s["attn_out"]


def attention_dropped(s: StageInputs, stage: str) -> np.ndarray:
    """The residual alone."""
    return s["block_in"]


def second_from_normed(s: StageInputs, stage: str) -> np.ndarray:
    """The normalised tensor as residual."""
    return s["ffn_norm"] + s["ffn_out"]


def second_skipped(s: StageInputs, stage: str) -> np.ndarray:
    """No residual."""
    return s["ffn_out"]


def second_from_block_input(s: StageInputs, stage: str) -> np.ndarray:
    """The residual from before attention."""
    return s["block_in"] + s["ffn_out"]


def attention_added_twice(s: StageInputs, stage: str) -> np.ndarray:
    """Attention's output added again."""
    return s["attn_residual"] + s["attn_out"] + s["ffn_out"]


def feed_forward_dropped(s: StageInputs, stage: str) -> np.ndarray:
    """The residual alone."""
    return s["attn_residual"]


def _logits(s: StageInputs, x: np.ndarray) -> np.ndarray:
    return linear(x, s.weights[output_matrix(s.config)])


def final_norm_skipped(s: StageInputs, stage: str) -> np.ndarray:
    """The last block's output projected."""
    return _logits(s, s["last_block_out"])


def final_norm_twice(s: StageInputs, stage: str) -> np.ndarray:
    """Normalised once more."""
    return _logits(s, s.rms_norm(s["final_norm"], "final_norm"))


def tied_wrongly(s: StageInputs, stage: str) -> np.ndarray:
    """The embedding table as output matrix."""
    return linear(s["final_norm"], s.weights["embed_tokens"])


def rows_shifted(s: StageInputs, stage: str) -> np.ndarray:
    """Logit t from row t + 1."""
    return np.roll(_logits(s, s["final_norm"]), -1, axis=-1)


def soft_capped(s: StageInputs, stage: str) -> np.ndarray:
    """Gemma's cap."""
    return 30 * np.tanh(_logits(s, s["final_norm"]) / 30)


def log_probabilities(s: StageInputs, stage: str) -> np.ndarray:
    """Log softmax."""
    logits = _logits(s, s["final_norm"]).astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


BLOCK: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="attention-residual-from-normed", stages=("attn_residual",), wrong=first_from_normed, reads=("attn_norm",),
        diagnosis="Attention was added to the normalised input; the residual is the block's input before the norm.",
    ),
    Mistake(
        name="attention-residual-skipped", stages=("attn_residual",), wrong=first_skipped,
        diagnosis="Attention's output came out alone; the block's input is added to it.",
    ),
    Mistake(
        name="attention-dropped", stages=("attn_residual",), wrong=attention_dropped,
        diagnosis="The block's input came out alone; attention's output is added to it.",
    ),
    Mistake(
        name="block-residual-from-normed", stages=("block_out",), wrong=second_from_normed, reads=("ffn_norm",),
        diagnosis="The feed-forward part was added to ffn_norm; the residual is attn_residual, before the norm.",
    ),
    Mistake(
        name="block-residual-skipped", stages=("block_out",), wrong=second_skipped,
        diagnosis="The feed-forward part came out alone; attn_residual is added to it.",
    ),
    Mistake(
        name="block-residual-from-block-input", stages=("block_out",), wrong=second_from_block_input,
        reads=("block_in",),
        diagnosis="The feed-forward part was added to the block's input, which loses attention; add it to "
        "attn_residual.",
    ),
    Mistake(
        name="block-attention-added-twice", stages=("block_out",), wrong=attention_added_twice, reads=("attn_out",),
        diagnosis="Attention's output was added again; attn_residual holds it already.",
    ),
    Mistake(
        name="block-feed-forward-dropped", stages=("block_out",), wrong=feed_forward_dropped,
        diagnosis="attn_residual came out alone; the feed-forward part is added to it.",
    ),
    Mistake(
        name="logits-final-norm-skipped", stages=("logits",), wrong=final_norm_skipped, reads=("last_block_out",),
        diagnosis="The last block's output was projected; it goes through the final norm first.",
    ),
    Mistake(
        name="logits-final-norm-twice", stages=("logits",), wrong=final_norm_twice,
        diagnosis="The final norm was applied twice; a hidden state that comes after the norm needs no other.",
    ),
    Mistake(
        name="logits-tied-wrongly", stages=("logits",), wrong=tied_wrongly,
        applies_to=lambda config: not config.tie_word_embeddings,
        diagnosis="The embedding table was used as output matrix; this model is untied and has an lm_head.",
    ),
    Mistake(
        name="logits-rows-shifted", stages=("logits",), wrong=rows_shifted,
        diagnosis="Logit t was made from row t + 1 of the output matrix; row t belongs to token t.",
    ),
    Mistake(
        name="logits-soft-capped", stages=("logits",), wrong=soft_capped,
        diagnosis="Logits went through 30 * tanh(x / 30), as in Gemma; Llama and Qwen have no cap.",
    ),
    Mistake(
        name="logits-are-log-probabilities", stages=("logits",), wrong=log_probabilities,
        diagnosis="These are log probabilities: a log softmax was applied; compare logits with logits.",
    ),
)  # fmt: skip
