"""Known mistakes in embedding, residual sums and logits (final norm, output matrix); `mistake` explains the fields."""

from collections.abc import Callable

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.ops.linear import linear
from llorch.stages.table import output_matrix

PROJECTION = "logits"  # `part`: function that `wrong` replaces, see `in_stage`; else `wrong` computes the stage
MIXED, FED = "attn_out|linear_out", "ffn_out|moe_out"  # outputs of the mixer and of the feed-forward part


def _project(s: StageInputs, x: np.ndarray) -> np.ndarray:
    return linear(x, s.weights[output_matrix(s.config)])


def log_probabilities(right: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Return the log softmax of the logits."""

    def wrong(**kw: object) -> np.ndarray:
        logits = right(**kw).astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    return wrong


BLOCK: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="attention-residual-from-normed", stages=("attn_residual",), reads=("attn_norm",),
        wrong=lambda s, _: s["attn_norm"] + s[MIXED],
        diagnosis="Attention was added to the normalised input; the residual is the block's input before the norm.",
    ),
    Mistake(
        name="attention-residual-skipped", stages=("attn_residual",), wrong=lambda s, _: s[MIXED],
        diagnosis="The result is attention's output alone; add the block's input.",
    ),
    Mistake(
        name="attention-dropped", stages=("attn_residual",), wrong=lambda s, _: s["block_in"],
        diagnosis="The result is the block's input alone; add attention's output.",
    ),
    Mistake(
        name="block-residual-from-normed", stages=("block_out",), wrong=lambda s, _: s["ffn_norm"] + s[FED],
        reads=("ffn_norm",),
        diagnosis="The feed-forward part was added to ffn_norm; the residual is attn_residual, before the norm.",
    ),
    Mistake(
        name="block-residual-skipped", stages=("block_out",), wrong=lambda s, _: s[FED],
        diagnosis="The result is the feed-forward part alone; add attn_residual.",
    ),
    Mistake(
        name="block-residual-from-block-input", stages=("block_out",), wrong=lambda s, _: s["block_in"] + s[FED],
        reads=("block_in",),
        diagnosis="The feed-forward part was added to the block's input, which loses attention; add it to "
        "attn_residual.",
    ),
    Mistake(
        name="block-attention-added-twice", stages=("block_out",), reads=(MIXED,),
        wrong=lambda s, _: s["attn_residual"] + s[MIXED] + s[FED],
        diagnosis="Attention's output was added again; attn_residual holds it already.",
    ),
    Mistake(
        name="block-feed-forward-dropped", stages=("block_out",), wrong=lambda s, _: s["attn_residual"],
        diagnosis="The result is attn_residual alone; add the feed-forward part.",
    ),
    Mistake(
        name="block-skipped", stages=("block_out",), reads=("block_in",), wrong=lambda s, _: s["block_in"],
        diagnosis="The block's input came out unchanged: the layer was skipped.",
    ),
    Mistake(
        name="logits-final-norm-skipped", stages=("logits",), wrong=lambda s, _: _project(s, s["last_block_out"]),
        reads=("last_block_out",),
        diagnosis="The last block's output was projected; it goes through the final norm first.",
    ),
    Mistake(
        name="logits-final-norm-twice", stages=("logits",),
        wrong=lambda s, _: _project(s, s.rms_norm(s["final_norm"], "final_norm")),
        diagnosis="The final norm was applied twice; apply it once.",
    ),
    Mistake(
        name="logits-tied-wrongly", stages=("logits",), applies_to=lambda config: not config.tie_word_embeddings,
        part=PROJECTION, wrong=lambda right: lambda **kw: right(**kw | {"lm_head": None}),
        diagnosis="The embedding table was used as output matrix; this model is untied and has an lm_head.",
    ),
    Mistake(
        name="logits-rows-shifted", stages=("logits",), part=PROJECTION,
        wrong=lambda right: lambda **kw: np.roll(right(**kw), -1, axis=-1),
        diagnosis="Logit t was made from row t + 1 of the output matrix; row t belongs to token t.",
    ),
    Mistake(
        name="logits-soft-capped", stages=("logits",), part=PROJECTION,
        wrong=lambda right: lambda **kw: 30 * np.tanh(right(**kw) / 30),
        diagnosis="Logits went through 30 * tanh(x / 30), as in Gemma; Llama and Qwen have no cap.",
    ),
    Mistake(
        name="logits-are-log-probabilities", stages=("logits",), part=PROJECTION, wrong=log_probabilities,
        diagnosis="These are log probabilities: a log softmax was applied; compare logits with logits.",
    ),
)  # fmt: skip


LOOKUP = "embedding"  # `part`, like `PROJECTION`


def dimensions_not_reversed(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Use GGUF's (hidden, vocab) as the NumPy shape of the same bytes; tokens select columns."""
    return table.reshape(table.shape[::-1])[:, ids].T


EMBEDDING: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="embedding-ids-off-by-one", stages=("embed",), part=LOOKUP,
        wrong=instead(lambda ids, table: table[(ids + 1) % len(table)]),
        diagnosis="Token t picked row t + 1; ids count from 0 and row t belongs to token t.",
    ),
    Mistake(
        name="embedding-first-token-twice", stages=("embed",), part=LOOKUP,
        wrong=instead(lambda ids, table: table[np.concatenate([ids[:1], ids[:-1]])]),
        diagnosis="The first token was put in front a second time (BOS added by template and tokenizer), so every "
        "later token is one place late; add it once.",
    ),
    Mistake(
        name="embedding-dimensions-not-reversed", stages=("embed",), part=LOOKUP,
        wrong=instead(dimensions_not_reversed),
        diagnosis="The table's GGUF dimensions were used unchanged; GGUF lists the fastest axis first, so the "
        "array in memory is (vocab, hidden) and each token is one row.",
    ),
    Mistake(
        name="embedding-scaled", stages=("embed",), part=LOOKUP,
        wrong=instead(lambda ids, table: table[ids] * np.sqrt(table.shape[1])),
        diagnosis="Rows were multiplied by sqrt(hidden_size); Gemma does that, Llama and Qwen take them as stored.",
    ),
    Mistake(
        name="embedding-from-lm-head", stages=("embed",), wrong=lambda s, _: s.weights["lm_head"][s.ids],
        applies_to=lambda config: not config.tie_word_embeddings,
        diagnosis="Rows were taken from lm_head; in an untied model embed_tokens is another matrix.",
    ),
)  # fmt: skip
