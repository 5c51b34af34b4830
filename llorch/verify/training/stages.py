"""The table of what checkpoints 15 to 20 compare, one row per group of stages; `llorch.stages` is the forward pass.

A stage is a group and what it is of, `gradient.q_proj.lora_A`; its key has the layer in front, `l0.gradient...`. All
stages of a group share a tolerance. A *case* says of which run it is: `plain`, `smoothed`, `zero_b`, `step 2` ...
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingStage:
    """One row of the table.

    Attributes:
        name: Of the group.
        checkpoint: Number.
        formula: What is computed.
        function: Ours.
        peft: Where it is seen in PEFT, torch or transformers.
        isolated_ceiling: Largest tolerance that is ever granted to an isolated row.
        chained_ceiling: Likewise of a chained one.
        worst_ceiling: What its worst element is granted at most; 0 stands for ten times the ceiling.
        in_rates: Whether the difference is measured in learning rates instead of shares of the tensor.
        floor: Smallest tolerance.
    """

    name: str
    checkpoint: str
    formula: str
    function: str
    peft: str
    isolated_ceiling: float = 1e-5
    chained_ceiling: float = 1e-3
    worst_ceiling: float = 0.0
    in_rates: bool = False
    floor: float = 4 * 2.0**-23


TRAINING_STAGES: tuple[TrainingStage, ...] = (
    TrainingStage(
        name="lora_delta", checkpoint="15", formula="scaling * (x @ A.T) @ B.T",
        function="llorch.ops.lora.lora_delta", peft="output of lora_B times scaling, as PEFT adds it",
    ),
    TrainingStage(
        name="adapted_logits", checkpoint="15", formula="the forward pass with every W x + delta",
        function="llorch.forward.forward", peft="output of lm_head; with llama.cpp: logits with the LoRA GGUF",
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
        function="llorch.backward.backward", peft="autograd: .grad of parameters and of block inputs",
    ),
    TrainingStage(
        name="grad_norm", checkpoint="18", formula="root of the sum of squares of all gradients",
        function="llorch.train.adamw.clip_by_norm", peft="torch clip_grad_norm_",
    ),
    TrainingStage(
        name="first_moment", checkpoint="18", formula="m = b1 m + (1 - b1) g",
        function="llorch.train.adamw.adamw_step", peft="exp_avg of torch.optim.AdamW",
    ),
    TrainingStage(
        name="second_moment", checkpoint="18", formula="v = b2 v + (1 - b2) g * g",
        function="llorch.train.adamw.adamw_step", peft="exp_avg_sq of torch.optim.AdamW",
    ),
    TrainingStage(
        name="parameters", checkpoint="18", formula="p (1 - lr wd) - lr m_hat / (sqrt(v_hat) + eps)",
        function="llorch.train.adamw.adamw_step", peft="parameters after optimizer.step()",
        isolated_ceiling=1e-4, chained_ceiling=0.02, worst_ceiling=0.2, floor=4 * 2.0**-23 / 1e-2, in_rates=True,
    ),
    TrainingStage(
        name="learning_rate", checkpoint="18", formula="a pure function of the step",
        function="llorch.train.schedules.learning_rate", peft="get_last_lr() of transformers' schedules",
        floor=1e-15,
    ),
    TrainingStage(
        name="loss_curve", checkpoint="19", formula="loss of every step of a run",
        function="llorch.train.numpy_step.loss_and_gradients", peft="sum of cross_entropy / learned tokens of the step",
    ),
    TrainingStage(
        name="norm_curve", checkpoint="19", formula="norm of every step's gradient before clipping",
        function="llorch.train.adamw.clip_by_norm", peft="clip_grad_norm_",
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
        function="llorch.forward.forward", peft="logits after merge_and_unload()",
    ),
    TrainingStage(
        name="exported_logits", checkpoint="20", formula="the forward pass of what was written and read again",
        function="llorch.forward.forward",
        peft="PEFT on the folder, transformers on the merged folder, llama.cpp on both GGUF files",
    ),
)  # fmt: skip

BY_GROUP: Mapping[str, TrainingStage] = {stage.name: stage for stage in TRAINING_STAGES}
CHECKPOINTS = tuple(dict.fromkeys(stage.checkpoint for stage in TRAINING_STAGES))


@dataclass(frozen=True)
class Key:
    """The name of one array of a golden, taken apart.

    Attributes:
        case: Of which run it is.
        layer: None outside the layers.
        stage: Group and what it is of.
    """

    case: str
    layer: int | None
    stage: str

    @classmethod
    def of(cls, text: str) -> "Key":
        """Take `plain/l0.gradient.q_proj.lora_A` apart."""
        case, _, rest = text.partition("/")
        head, _, stage = rest.partition(".")
        if head[:1] == "l" and head[1:].isdigit():
            return cls(case, int(head[1:]), stage)
        return cls(case, None, rest)

    @property
    def in_table(self) -> bool:
        """Whether it is compared; others are inputs of isolated stages."""
        return self.stage.split(".")[0] in BY_GROUP

    @property
    def group(self) -> TrainingStage:
        """Its row of the table."""
        return BY_GROUP[self.stage.split(".")[0]]
