"""The lessons: which parts belong to each checkpoint, in the order in which they are learned.

Whose files lie where is said here once: a lesson's page, stub, hints and typed mistakes are in `checkpoints/NN_name/`
of the repository, which the wheel carries; what a learner writes is `lNN_name.py` in a folder of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llorch.apps.learn.exercise import Exercise
from llorch.apps.learn.exercises import after_logits, families, forward, foundation, on_torch, quantised, training
from llorch.stages.table import CHECKPOINTS

WARM_UP = "00w"  # on the page of 00: its stub is right but for a constant, so that the first green takes a minute


@dataclass(frozen=True)
class Lesson:
    """One checkpoint as something to do; the first is a warm-up."""

    number: str  # of the checkpoint, or WARM_UP
    minutes: int  # that it takes
    parts: tuple[Exercise, ...]

    @property
    def name(self) -> str:
        """Name of the lesson without its number: `rope`."""
        return "warm_up" if self.number == WARM_UP else CHECKPOINTS[self.number]

    @property
    def module(self) -> str:
        """Name of the learner's module: `l01b_rope`."""
        return f"l{self.number}_{self.name}"

    @property
    def on_torch(self) -> bool:
        """True if the parts of the lesson run on torch; they run in no other lesson."""
        return any(exercise.on_torch for exercise in self.parts)

    @cached_property
    def folder(self) -> Path:
        """Folder with the page, stub and hints of the lesson."""
        if self.number == WARM_UP:
            return BY_NUMBER["00"].folder / self.name
        return lessons_folder() / f"{self.number}_{self.name}"


def lessons_folder() -> Path:
    """Return the folder `checkpoints/` of the wheel, or else of the repository."""
    here = Path(__file__).resolve()
    inside = here.parents[2] / "checkpoints"
    return inside if inside.is_dir() else here.parents[3] / "checkpoints"


FILTERS = (
    after_logits.SOFTMAX, after_logits.PENALISE, after_logits.KEEP_TOP_K, after_logits.KEEP_TOP_P,
    after_logits.KEEP_MIN_P, after_logits.DISTRIBUTION,
)  # fmt: skip
LESSONS: tuple[Lesson, ...] = (  # in the order of the forward pass, then of training
    Lesson(WARM_UP, 2, (foundation.BFLOAT16,)),
    Lesson("00", 80, (foundation.TENSOR_TABLE, foundation.MERGE, forward.EMBEDDING)),
    Lesson("01", 20, (forward.RMS_NORM,)),
    Lesson("02", 35, (forward.LINEAR, forward.QKV)),
    Lesson("01b", 45, (forward.FREQUENCIES, forward.SCALE_FREQUENCIES, forward.ROPE_TABLES, forward.ROPE)),
    Lesson("03", 40, (forward.APPEND,)),
    Lesson("04", 35, (forward.ATTENTION_SCORES, forward.ATTENTION_PROBS)),
    Lesson("05", 20, (forward.ATTENTION_CONTEXT, forward.ATTENTION_OUTPUT)),
    Lesson("05b", 60, (families.SHORT_CONV, families.L2_NORM, families.LOG_DECAY, families.DELTA_RULE)),
    Lesson("06", 25, (forward.SWIGLU, forward.FEED_FORWARD)),
    Lesson("06b", 35, (families.TOP_K, families.TOPK_WEIGHTS, families.EXPERT_OUTPUTS, families.MIXED)),
    Lesson("07", 30, (forward.BLOCK,)),
    Lesson("08", 20, (forward.LOGITS,)),
    Lesson("09", 10, (after_logits.LAST_ROW,)),
    Lesson("10", 10, (after_logits.ARGMAX,)),
    Lesson("11", 30, FILTERS),
    Lesson("12", 35, (after_logits.POSITIONS, after_logits.GENERATE)),
    Lesson("13", 45, (quantised.Q8_0, quantised.Q4_0)),
    Lesson("14", 45, (on_torch.RMS_NORM, on_torch.ROPE)),
    Lesson("15", 25, (training.LORA_SCALING, training.LORA_DELTA)),
    Lesson("16", 25, (training.MASKED_LABELS, training.SHIFTED, training.CROSS_ENTROPY)),
    Lesson("17", 75, training.BACKWARD),
    Lesson("18", 30, (training.CLIP_BY_NORM, training.ADAMW_STEP, training.LEARNING_RATE)),
    Lesson("19", 40, (training.ACCUMULATED,)),
    Lesson("20", 30, (training.MERGED, training.INTERLEAVE, training.GGUF_ALPHA)),
)
BY_NUMBER: Mapping[str, Lesson] = {lesson.number: lesson for lesson in LESSONS}
PARTS: Mapping[str, Exercise] = {exercise.name: exercise for lesson in LESSONS for exercise in lesson.parts}
LESSON_OF: Mapping[str, Lesson] = {exercise.name: lesson for lesson in LESSONS for exercise in lesson.parts}
