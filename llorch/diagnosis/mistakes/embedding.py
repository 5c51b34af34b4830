"""Mistakes of checkpoint 00: the wrong rows of the embedding table, or the right rows scaled."""

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.planting import instead
from llorch.diagnosis.mistakes.stage_inputs import StageInputs

PART = "embedding"


def dimensions_not_reversed(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Take GGUF's (hidden, vocab) as the NumPy shape of the same bytes; tokens pick columns."""
    return table.reshape(table.shape[::-1])[:, ids].T


EMBEDDING: tuple[Mistake[StageInputs], ...] = (
    Mistake(
        name="embedding-ids-off-by-one", stages=("embed",), part=PART,
        wrong=instead(lambda ids, table: table[(ids + 1) % len(table)]),
        diagnosis="Token t picked row t + 1; ids count from 0 and row t belongs to token t.",
    ),
    Mistake(
        name="embedding-first-token-twice", stages=("embed",), part=PART,
        wrong=instead(lambda ids, table: table[np.concatenate([ids[:1], ids[:-1]])]),
        diagnosis="The first token was put in front a second time (BOS added by template and tokenizer), so every "
        "later token is one place late; add it once.",
    ),
    Mistake(
        name="embedding-dimensions-not-reversed", stages=("embed",), part=PART,
        wrong=instead(dimensions_not_reversed),
        diagnosis="The table's GGUF dimensions were used unchanged; GGUF lists the fastest axis first, so the "
        "array in memory is (vocab, hidden) and each token is one row.",
    ),
    Mistake(
        name="embedding-scaled", stages=("embed",), part=PART,
        wrong=instead(lambda ids, table: table[ids] * np.sqrt(table.shape[1])),
        diagnosis="Rows were multiplied by sqrt(hidden_size); Gemma does that, Llama and Qwen take them as stored.",
    ),
    Mistake(
        name="embedding-from-lm-head", stages=("embed",), wrong=lambda s, _: s.weights["lm_head"][s.ids],
        applies_to=lambda config: not config.tie_word_embeddings,
        diagnosis="Rows were taken from lm_head; in an untied model embed_tokens is another matrix.",
    ),
)  # fmt: skip
