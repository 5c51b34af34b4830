"""Library of known mistakes, as data: mistakes that people made when they ported these models.

`STAGE_MISTAKES` belong to stages (named arrays of the forward pass), `SAMPLING` to the steps from the logits to a
distribution, `GENERATION` to the generation loop, `QUANTISED` to the parts of a product with a quantised matrix,
`QUANTISED_FOLDERS` to the matrices of a quantised Hugging Face folder. `TRAINING` mistakes replace functions of llorch.

The diagnosis injects them where an engine is wrong; tests inject every one of them (`variants`). `mistake` defines the
type, `in_stage` computes a stage's array with a wrong function, `planting` replaces a function in the running code.
`llorch.apps.learn.typed_mistakes` makes the code that a learner would type.
"""

from collections.abc import Mapping
from typing import Any

from llorch.diagnosis.mistakes.attention import ATTENTION
from llorch.diagnosis.mistakes.block import BLOCK, EMBEDDING
from llorch.diagnosis.mistakes.cache import CACHE, LAYERS
from llorch.diagnosis.mistakes.delta_net import DELTA_NET
from llorch.diagnosis.mistakes.experts import EXPERTS
from llorch.diagnosis.mistakes.feed_forward import FEED_FORWARD
from llorch.diagnosis.mistakes.gated_attention import GATED_ATTENTION
from llorch.diagnosis.mistakes.generation import GENERATION, GenerationInputs
from llorch.diagnosis.mistakes.mistake import AFTER_LOGITS, IN_PRODUCTS, Mistake, checkpoint_of
from llorch.diagnosis.mistakes.norm import NORM
from llorch.diagnosis.mistakes.positions import POSITIONS
from llorch.diagnosis.mistakes.projection import PROJECTION
from llorch.diagnosis.mistakes.quantised import ROUNDINGS, QuantisedInputs
from llorch.diagnosis.mistakes.quantised_blocks import BLOCKS
from llorch.diagnosis.mistakes.quantised_folders import QUANTISED_FOLDERS
from llorch.diagnosis.mistakes.rope import ROPE
from llorch.diagnosis.mistakes.sampling import SAMPLING, SamplerInputs
from llorch.diagnosis.mistakes.stage_inputs import StageInputs
from llorch.diagnosis.mistakes.training_adapter import ADAPTER
from llorch.diagnosis.mistakes.training_families import OF_FAMILIES
from llorch.diagnosis.mistakes.training_gradients import GRADIENTS
from llorch.diagnosis.mistakes.training_loss import LOSSES
from llorch.diagnosis.mistakes.training_optimizer import OPTIMIZER

__all__ = [
    "AFTER_LOGITS",
    "GENERATION",
    "IN_PRODUCTS",
    "MISTAKES",
    "QUANTISED",
    "QUANTISED_FOLDERS",
    "SAMPLING",
    "STAGE_MISTAKES",
    "TRAINING",
    "GenerationInputs",
    "Mistake",
    "QuantisedInputs",
    "SamplerInputs",
    "checkpoint_of",
    "of_checkpoint",
]

STAGE_MISTAKES: tuple[Mistake[StageInputs], ...] = (
    *EMBEDDING, *NORM, *PROJECTION, *ROPE, *CACHE, *ATTENTION, *GATED_ATTENTION, *DELTA_NET, *FEED_FORWARD,
    *EXPERTS, *BLOCK, *POSITIONS, *LAYERS,
)  # fmt: skip
# in the order of the validation points 15 to 20 (`llorch.stages.table.CHECKPOINTS`)
TRAINING: tuple[Mistake[Any], ...] = (*ADAPTER, *LOSSES, *GRADIENTS, *OF_FAMILIES, *OPTIMIZER)
QUANTISED: tuple[Mistake[QuantisedInputs], ...] = (*BLOCKS, *ROUNDINGS)

MISTAKES: Mapping[str, Mistake[Any]] = {
    mistake.name: mistake
    for mistake in (*STAGE_MISTAKES, *SAMPLING, *GENERATION, *QUANTISED, *QUANTISED_FOLDERS, *TRAINING)
}


def of_checkpoint(number: str) -> list[str]:
    """List the names of the mistakes that a checkpoint (numbered validation point) detects, in the library's order."""
    return [name for name, mistake in MISTAKES.items() if number in mistake.checkpoints]
