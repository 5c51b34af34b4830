"""Stage references of all training arrays, derived from a model and the recipe: the contents of a golden.

This is the only list of them. Array names in files are built from stage references and looked up, never parsed. An
array is compared in one or two modes: `isolated`, computed from the golden's inputs, or `chained`, in a complete run.
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
LOADED_BY = {  # kind of exported file -> engine that loads it
    "peft_folder": PEFT, "merged_folder": TRANSFORMERS, "lora_gguf": LLAMACPP, "merged_gguf": LLAMACPP,
}  # fmt: skip
INPUT_OF = {stage.matrix: stage.dense_input for stage in DENSE_PRODUCTS if stage.in_layer}  # matrix -> its input stage
TOLERANCE_GROUP = {  # golden input, no stage of training -> group that gives its number and regeneration tolerance
    **dict.fromkeys((*INPUT_OF.values(), "block_in", "last_block_out"), "lora_delta"), "given": "gradient",
}  # fmt: skip

Arrays = dict[StageRef, np.ndarray]


def at(stage: str, layer: int | None = None, part: str = "", case: str = "plain") -> StageRef:
    """Build the stage reference of an array: `stage` is a group of training stages, or a key of `TOLERANCE_GROUP`."""
    return StageRef(BY_GROUP[TOLERANCE_GROUP.get(stage, stage)].checkpoint, stage, layer, case, part)


def of_matrices(stage: str, n_layers: int, case: str = "plain") -> dict[str, StageRef]:
    """Map every adapted matrix, `layers.0.q_proj`, to the stage reference of its array in a group."""
    return {f"layers.{i}.{name}": at(stage, i, name, case) for i in range(n_layers) for name in LAYER_TARGETS}


def of_tensors(stage: str, n_layers: int, case: str = "plain") -> dict[str, StageRef]:
    """Map every trained tensor, in the order of `Adapter.flat`, to the stage reference of its array in a group."""
    kinds = [(m, kind) for m in LAYER_TARGETS for kind in (LORA_A, LORA_B)]
    return {f"layers.{i}.{m}.{kind}": at(stage, i, f"{m}.{kind}", case) for i in range(n_layers) for m, kind in kinds}


MERGED_REF = of_matrices("merged_weight", 1)[MERGED]


def shared_input(case: str) -> dict[str, StageRef]:
    """Map the matrices whose input does not depend on the adapter to the stage references of their LoRA deltas."""
    return {f"layers.0.{name}": at("lora_delta", 0, name, case) for name in SHARED_INPUT}


def borders(n_layers: int) -> dict[StageRef, StageRef]:
    """Map every block's input, and the last block's output, to the stage reference of its gradient."""
    inputs = {at("block_in", layer): at("gradient", layer, "block_in") for layer in range(n_layers)}
    return inputs | {at("last_block_out"): at("gradient", None, "last_block_out")}


def before(step: int, n_layers: int) -> dict[str, Mapping[str, StageRef]]:
    """Return the inputs of an isolated optimizer step: gradients and, from step 2 on, the state before it.

    The gradients of step 1 are those of the isolated backward pass; others are stored as inputs only, as `given`.
    """
    gradients = of_tensors("gradient", n_layers) if step == 1 else of_tensors("given", n_layers, f"step {step}")
    return {"gradient": gradients} | (after(step - 1, n_layers) if step > 1 else {})


def after(step: int, n_layers: int) -> dict[str, Mapping[str, StageRef]]:
    """Return the `StageRef` of each state array after an optimizer step."""
    return {stage: of_tensors(stage, n_layers, f"step {step}") for stage in STATE}


def named(refs: Mapping[str, StageRef], arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Replace the names of arrays by their stage references."""
    return {stage_ref: arrays[name] for name, stage_ref in refs.items()}


def stage_refs(n_layers: int) -> dict[StageRef, tuple[str, ...]]:
    """Map every array that the engines compute, in table order, to the modes in which it is compared."""
    ends, isolated, chained, both_modes = borders(n_layers), MODES[:1], MODES[1:], MODES
    parts = [
        (both_modes, of_matrices("lora_delta", n_layers).values()),
        (isolated, shared_input("rslora").values()),
        (chained, [at("adapted_logits", case=case) for case in ("plain", "rslora")]),
        (both_modes, [at(stage, case=case) for stage in ("token_losses", "loss") for case in SMOOTHINGS]),
        (both_modes, [*of_tensors("gradient", n_layers).values(), *ends.values()]),
        (chained, of_tensors("gradient", n_layers, "zero_b").values()),
        *((both_modes if step in STEPS_ALONE else chained, _step_stage_refs(step, n_layers)) for step in STEPS_SHOWN),
        (isolated, [at("learning_rate", case=name) for name in SCHEDULES]),
        (chained, [at("loss_curve", case="curve"), at("norm_curve", case="curve")]),
        (isolated, [MERGED_REF]),
        (chained, [at("merged_logits"), *(at("exported_logits", part=kind) for kind in LOADED_BY)]),
    ]
    inputs = [at(stage, layer) for layer in range(n_layers) for stage in dict.fromkeys(INPUT_OF.values())]
    grads = [ref for step in STEPS_ALONE[1:] for ref in before(step, n_layers)["gradient"].values()]
    return dict.fromkeys((*inputs, *ends, *grads), ()) | {ref: modes for modes, group in parts for ref in group}


def _step_stage_refs(step: int, n_layers: int) -> list[StageRef]:
    """List the stage references of an optimizer step: the norm of its gradients, and every state tensor after it."""
    tensors = (stage_ref for group in after(step, n_layers).values() for stage_ref in group.values())
    return [at("grad_norm", case=f"step {step}"), *tensors]
