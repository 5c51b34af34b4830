"""Where every array of training stands: what a golden has to hold, from a model and the recipe alone.

This is the one list of it. Names in files are made from places and looked up, never taken apart.
"""

from collections.abc import Mapping

import numpy as np

from llorch.judging.goldens.training_recipe import (
    MERGED,
    SCHEDULES,
    SHARED_INPUT,
    SMOOTHINGS,
    STATE,
    STEPS_ALONE,
    STEPS_SHOWN,
)
from llorch.lora.adapter import LORA_A, LORA_B
from llorch.lora.config import LAYER_TARGETS
from llorch.stages.stage_ref import StageRef
from llorch.stages.table import DENSE_PRODUCTS
from llorch.stages.training import BY_GROUP

ISOLATED, CHAINED = MODES = ("isolated", "chained")
PEFT, LLAMACPP, TRANSFORMERS = ("peft", "llamacpp", "transformers")
LOADED_BY = {  # kind -> whom
    "peft_folder": PEFT, "merged_folder": TRANSFORMERS, "lora_gguf": LLAMACPP, "merged_gguf": LLAMACPP,
}  # fmt: skip
INPUT_OF = {stage.matrix: stage.dense_input for stage in DENSE_PRODUCTS if stage.in_layer}
HELD_LIKE = {  # what isolated stages are fed -> the group whose limits it is held to when it is made again
    **dict.fromkeys((*INPUT_OF.values(), "block_in", "last_block_out"), "lora_delta"), "given": "gradient",
}  # fmt: skip

Arrays = dict[StageRef, np.ndarray]


def at(stage: str, layer: int | None = None, part: str = "", case: str = "plain") -> StageRef:
    """Build the place of an array of a group of stages, or of an input of such a group."""
    return StageRef(BY_GROUP[HELD_LIKE.get(stage, stage)].checkpoint, stage, layer, case, part)


def of_matrices(stage: str, n_layers: int, case: str = "plain") -> dict[str, StageRef]:
    """Map the canonical name of every adapted matrix to the place of its array in a group."""
    return {f"layers.{i}.{name}": at(stage, i, name, case) for i in range(n_layers) for name in LAYER_TARGETS}


def of_tensors(stage: str, n_layers: int, case: str = "plain") -> dict[str, StageRef]:
    """Map every trained tensor to the place of its array in a group; names and order are those of `Adapter.flat`."""
    kinds = [(matrix, kind) for matrix in LAYER_TARGETS for kind in (LORA_A, LORA_B)]
    return {f"layers.{i}.{m}.{kind}": at(stage, i, f"{m}.{kind}", case) for i in range(n_layers) for m, kind in kinds}


MERGED_AT = of_matrices("merged_weight", 1)[MERGED]


def shared_input(case: str) -> dict[str, StageRef]:
    """Map matrices to the `StageRef` of a case's deltas whose input does not depend on the adapter."""
    return {f"layers.0.{name}": at("lora_delta", 0, name, case) for name in SHARED_INPUT}


def borders(n_layers: int) -> dict[StageRef, StageRef]:
    """Map the place of every block's input, and of the last block's output, to the place of the gradient."""
    inputs = {at("block_in", i): at("gradient", i, "block_in") for i in range(n_layers)}
    return inputs | {at("last_block_out"): at("gradient", None, "last_block_out")}


def before(step: int, n_layers: int) -> dict[str, Mapping[str, StageRef]]:
    """Return the inputs of an isolated optimizer step: gradients and, after the first step, the state."""
    gradients = of_tensors("gradient", n_layers) if step == 1 else of_tensors("given", n_layers, f"step {step}")
    return {"gradient": gradients} | (after(step - 1, n_layers) if step > 1 else {})


def after(step: int, n_layers: int) -> dict[str, Mapping[str, StageRef]]:
    """Return the `StageRef` of each state array after an optimizer step."""
    return {stage: of_tensors(stage, n_layers, f"step {step}") for stage in STATE}


def named(where: Mapping[str, StageRef], arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Map arrays by place instead of by name."""
    return {stage_ref: arrays[name] for name, stage_ref in where.items()}


def stage_refs(n_layers: int) -> dict[StageRef, tuple[str, ...]]:
    """List every array that the engines show, in the order of the table, and the modes that it is judged in."""
    ends, alone, chained, both = borders(n_layers), MODES[:1], MODES[1:], MODES
    parts = [
        (both, of_matrices("lora_delta", n_layers).values()),
        (alone, shared_input("rslora").values()),
        (chained, [at("adapted_logits", case=case) for case in ("plain", "rslora")]),
        (both, [at(stage, case=case) for stage in ("token_losses", "loss") for case in SMOOTHINGS]),
        (both, [*of_tensors("gradient", n_layers).values(), *ends.values()]),
        (chained, of_tensors("gradient", n_layers, "zero_b").values()),
        *((both if step in STEPS_ALONE else chained, _places_of_step(step, n_layers)) for step in STEPS_SHOWN),
        (alone, [at("learning_rate", case=name) for name in SCHEDULES]),
        (chained, [at("loss_curve", case="curve"), at("norm_curve", case="curve")]),
        (alone, [MERGED_AT]),
        (chained, [at("merged_logits"), *(at("exported_logits", part=kind) for kind in LOADED_BY)]),
    ]
    inputs = [at(stage, i) for i in range(n_layers) for stage in dict.fromkeys(INPUT_OF.values())]
    given = [where for step in STEPS_ALONE[1:] for where in before(step, n_layers)["gradient"].values()]
    return dict.fromkeys((*inputs, *ends, *given), ()) | {place: modes for modes, made in parts for place in made}


def _places_of_step(step: int, n_layers: int) -> list[StageRef]:
    """List the places that a training step shows: the norm of its gradients, and every tensor after it."""
    tensors = (stage_ref for where in after(step, n_layers).values() for stage_ref in where.values())
    return [at("grad_norm", case=f"step {step}"), *tensors]
