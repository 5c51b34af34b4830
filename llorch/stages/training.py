"""Stage table of LoRA training (validation points 15 to 20), one row per group; `stages.table` has the forward pass.

A stage is a named array: a group and a tensor, `gradient.q_proj.lora_A`. All stages of a group share a tolerance, see
`judging.tolerances.training`. A *case* is the name of a run: `plain`, `smoothed`, `zero_b`, `step 2` ...
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """Row of the table: one group of training stages.

    Attributes:
        name: Name of the group.
        checkpoint: Number of the validation point, see `stages.table.CHECKPOINTS`.
        formula: Formula of the value.
        function: llorch's implementation.
        peft: Corresponding value in PEFT, torch or transformers.
        in_rates: True if differences are divided by the learning rate, not by the norm of the tensor.
    """

    name: str
    checkpoint: str
    formula: str
    function: str
    peft: str
    in_rates: bool = False


TRAINING_STAGES: tuple[TrainingStage, ...] = (
    TrainingStage(
        name="lora_delta", checkpoint="15", formula="scaling * (x @ A.T) @ B.T",
        function="llorch.ops.lora.lora_delta", peft="output of lora_B times scaling, as PEFT adds it",
    ),
    TrainingStage(
        name="adapted_logits", checkpoint="15", formula="the forward pass with every W x + delta",
        function="llorch.model.blocks.forward", peft="output of lm_head; with llama.cpp: logits with the LoRA GGUF",
    ),
    TrainingStage(
        name="token_losses", checkpoint="16", formula="(1 - e) nll + e mean(-log p), learned tokens",
        function="llorch.ops.cross_entropy.cross_entropy", peft="torch cross_entropy, reduction none",
    ),
    TrainingStage(
        name="loss", checkpoint="16", formula="sum of token_losses / number of learned tokens",
        function="llorch.ops.cross_entropy.cross_entropy", peft="torch cross_entropy, reduction mean",
    ),
    TrainingStage(
        name="gradient", checkpoint="17", formula="dL/dA, dL/dB, dL/d(block input)",
        function="llorch.model.backward.backward", peft="autograd: .grad of parameters and of block inputs",
    ),
    TrainingStage(
        name="grad_norm", checkpoint="18", formula="root of the sum of squares of all gradients",
        function="llorch.training.adamw.clip_by_norm", peft="torch clip_grad_norm_",
    ),
    TrainingStage(
        name="first_moment", checkpoint="18", formula="m = b1 m + (1 - b1) g",
        function="llorch.training.adamw.adamw_step", peft="exp_avg of torch.optim.AdamW",
    ),
    TrainingStage(
        name="second_moment", checkpoint="18", formula="v = b2 v + (1 - b2) g * g",
        function="llorch.training.adamw.adamw_step", peft="exp_avg_sq of torch.optim.AdamW",
    ),
    TrainingStage(
        name="parameters", checkpoint="18", formula="p (1 - lr wd) - lr m_hat / (sqrt(v_hat) + eps)",
        function="llorch.training.adamw.adamw_step", peft="parameters after optimizer.step()",
        in_rates=True,
    ),
    TrainingStage(
        name="learning_rate", checkpoint="18", formula="a pure function of the step",
        function="llorch.training.adamw.learning_rate", peft="get_last_lr() of transformers' schedules",
    ),
    TrainingStage(
        name="loss_curve", checkpoint="19", formula="loss of every step of a run",
        function="llorch.training.numpy_step.loss_and_gradients",
        peft="sum of cross_entropy / learned tokens of the step",
    ),
    TrainingStage(
        name="norm_curve", checkpoint="19", formula="norm of every step's gradient before clipping",
        function="llorch.training.adamw.clip_by_norm", peft="clip_grad_norm_",
    ),
    TrainingStage(
        name="adapter_file", checkpoint="20", formula="names, shapes and bytes of an adapter's tensors",
        function="llorch.lora.peft_format.write_peft",
        peft="save_pretrained; of the LoRA GGUF our own file, loaded by llama.cpp",
    ),
    TrainingStage(
        name="merged_weight", checkpoint="20", formula="round(W + scaling * B @ A)",
        function="llorch.lora.merge.merged_matrix", peft="weight after merge_and_unload()",
    ),
    TrainingStage(
        name="merged_logits", checkpoint="20", formula="the forward pass with merged matrices",
        function="llorch.model.blocks.forward", peft="logits after merge_and_unload()",
    ),
    TrainingStage(
        name="exported_logits", checkpoint="20", formula="the forward pass of what was written and read again",
        function="llorch.model.blocks.forward",
        peft="PEFT on the folder, transformers on the merged folder, llama.cpp on both GGUF files",
    ),
)  # fmt: skip

BY_GROUP: Mapping[str, TrainingStage] = {stage.name: stage for stage in TRAINING_STAGES}
CHECKPOINTS = tuple(dict.fromkeys(stage.checkpoint for stage in TRAINING_STAGES))
