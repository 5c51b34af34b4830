"""The lessons: the exercises of each checkpoint (a numbered validation point), in the order of teaching.

A lesson's page, stub, hints and `mistakes.py` are in `checkpoints/NN_name/` of the repository; the wheel has a copy. A
learner writes `lNN_name.py` in a separate folder.
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

WARM_UP = "00w"  # on the page of 00: only one constant of its stub is wrong, so that the first PASS takes a minute


@dataclass(frozen=True)
class Lesson:
    """The exercises of one checkpoint; the first lesson, WARM_UP, has one of checkpoint 00."""

    number: str  # of the checkpoint, or WARM_UP
    minutes: int  # expected time of a learner
    parts: tuple[Exercise, ...]  # the exercises

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
        """True if the exercises of the lesson take torch tensors; chained checks of other lessons leave them out."""
        return any(exercise.on_torch for exercise in self.parts)

    @cached_property
    def folder(self) -> Path:
        """Folder with the page, stub and hints of the lesson."""
        if self.number == WARM_UP:
            return BY_NUMBER["00"].folder / self.name
        return lessons_folder() / f"{self.number}_{self.name}"


def lessons_folder() -> Path:
    """Return the folder `checkpoints/` of the wheel, else that of the repository."""
    module_path = Path(__file__).resolve()
    wheel_folder = module_path.parents[2] / "checkpoints"
    return wheel_folder if wheel_folder.is_dir() else module_path.parents[3] / "checkpoints"


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
    """List a lesson's file and the files of the folder that it imports; empty while the lesson's file is missing."""
    files: set[Path] = set()
    new_files = {folder / f"{lesson.module}.py"}
    while new_files := {path for path in new_files - files if path.is_file()}:
        files |= new_files
        new_files = {folder / f"{module}.py" for path in new_files for module in _imported_modules(path)}
    return sorted(files)


def lesson_fingerprint(folder: Path, lesson: Lesson) -> str:
    """Hash the learner's files of a lesson with SHA-256."""
    digest = hashlib.sha256()
    for path in sources(folder, lesson):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _imported_modules(path: Path) -> Iterator[str]:
    """Yield the names of the modules that a file imports; none if Python cannot parse it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
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
    """Read the three hints of every exercise: a direction, the formula with shapes, the function itself."""
    tables = tomllib.loads((lesson.folder / "hints.toml").read_text(encoding="utf-8"))
    return {name: table["steps"] for name, table in tables.items()}


@cache
def typed_mistakes(lesson: Lesson) -> Mapping[str, Mapping[str, Call]]:
    """Map exercise names to the names of known mistakes, and these to functions that contain the mistake.

    Most functions are made from llorch's known mistakes (module `typed_mistakes`). The lesson's `mistakes.py` holds
    functions that its page shows, and those that cannot be made; they win over a made one of the same name.
    """
    by_hand = run_path(str(lesson.folder / "mistakes.py"))["WRONG"]
    by_exercise = {
        exercise.name: {**make_typed_mistakes(exercise), **by_hand.get(exercise.name, {})} for exercise in lesson.parts
    }
    in_order = {key: {name: calls[name] for name in MISTAKES if name in calls} for key, calls in by_exercise.items()}
    return {key: calls for key, calls in in_order.items() if calls}
