"""The lessons: which parts belong to each checkpoint, in the order in which they are learned.

Whose files lie where is said here once: a lesson's page, stub, hints and typed mistakes are in `checkpoints/NN_name/`
of the repository, which the wheel carries; what a learner writes is `lNN_name.py` in a folder of their own.
"""

import ast
import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from runpy import run_path

from llorch.apps.learn.exercise import Call, Exercise
from llorch.apps.learn.exercises import after_logits, forward, foundation, training
from llorch.apps.learn.typed_mistakes import make_typed_mistakes
from llorch.diagnosis.mistakes import MISTAKES
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
    Lesson("05b", 60, (forward.SHORT_CONV, forward.L2_NORM, forward.LOG_DECAY, forward.DELTA_RULE)),
    Lesson("06", 25, (forward.SWIGLU, forward.FEED_FORWARD)),
    Lesson("06b", 35, (forward.TOP_K, forward.TOPK_WEIGHTS, forward.EXPERT_OUTPUTS, forward.MIXED)),
    Lesson("07", 30, (forward.BLOCK,)),
    Lesson("08", 20, (forward.LOGITS,)),
    Lesson("09", 10, (after_logits.LAST_ROW,)),
    Lesson("10", 10, (after_logits.ARGMAX,)),
    Lesson("11", 30, FILTERS),
    Lesson("12", 35, (after_logits.POSITIONS, after_logits.GENERATE)),
    Lesson("13", 45, (after_logits.Q8_0, after_logits.Q4_0)),
    Lesson("14", 45, (after_logits.TORCH_RMS_NORM, after_logits.TORCH_ROPE)),
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


def sources(folder: Path, lesson: Lesson) -> list[Path]:
    """List the files of a lesson, by name; none while the lesson's file is missing."""
    found: set[Path] = set()
    new = {folder / f"{lesson.module}.py"}
    while new := {path for path in new - found if path.is_file()}:
        found |= new
        new = {folder / f"{module}.py" for path in new for module in _imported(path)}
    return sorted(found)


def lesson_fingerprint(folder: Path, lesson: Lesson) -> str:
    """Hash the files of a lesson with SHA-256."""
    digest = hashlib.sha256()
    for path in sources(folder, lesson):
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _imported(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # it imports nothing
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def stub_of(lesson: Lesson) -> str:
    """Read the text of the file that a learner completes."""
    return (lesson.folder / "stub.py").read_text(encoding="utf-8")


@cache
def hints_of(lesson: Lesson) -> Mapping[str, Sequence[str]]:
    """Return three hints for every part: a direction, the formula with shapes, the function itself."""
    found = tomllib.loads((lesson.folder / "hints.toml").read_text(encoding="utf-8"))
    return {name: table["steps"] for name, table in found.items()}


@cache
def typed_mistakes(lesson: Lesson) -> Mapping[str, Mapping[str, Call]]:
    """Map the lesson's parts to the names of known mistakes, and these to functions that people write then.

    Most are made from the library (`typed_mistakes`). The lesson's `mistakes.py` holds the ones that its page
    shows, and those that cannot be made.
    """
    by_hand = run_path(str(lesson.folder / "mistakes.py"))["WRONG"]
    wrong = {
        exercise.name: {**make_typed_mistakes(exercise), **by_hand.get(exercise.name, {})} for exercise in lesson.parts
    }
    in_order = {part: {name: found[name] for name in MISTAKES if name in found} for part, found in wrong.items()}
    return {part: found for part, found in in_order.items() if found}
