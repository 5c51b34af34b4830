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
from llorch.families.config import ModelConfig
from llorch.stages.table import CHECKPOINTS, keys

WARM_UP = "00w"  # on the page of 00: only one constant of its stub is wrong, so that the first PASS takes a minute


@dataclass(frozen=True)
class Lesson:
    """The exercises of one checkpoint; the first lesson, WARM_UP, has one of checkpoint 00."""

    number: str  # of the checkpoint, or WARM_UP
    minutes: int  # expected time of a learner
    idea: str
    pitfall: str  # what usually goes wrong
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
BLOCKS: Mapping[str, tuple[Lesson, ...]] = {  # titles of blocks, in the order of the path
    "From a row of numbers to a layer": (
        Lesson(
            WARM_UP, 2, "a number of 16 bits is the upper half of one of 32", "the wrong shift",
            (foundation.BFLOAT16,),
        ),
        Lesson("01", 20, "every token to the same size", "where epsilon stands", (forward.RMS_NORM,)),
        Lesson(
            "01b", 45, "position as the angle of clock hands", "which two numbers are a pair",
            (forward.FREQUENCIES, forward.SCALE_FREQUENCIES, forward.ROPE_TABLES, forward.ROPE),
        ),
        Lesson(
            "02", 35, "a query, a key and a value for each head", "heads cut from the wrong axis",
            (forward.LINEAR, forward.QKV),
        ),
        Lesson("03", 40, "keys and values are kept", "a position that is off by one", (forward.APPEND,)),
        Lesson(
            "04", 35, "a query asks, keys answer, the future is hidden", "a mask that forgets the cache",
            (forward.ATTENTION_SCORES, forward.ATTENTION_PROBS),
        ),
        Lesson(
            "05", 20, "values mixed, heads joined", "heads joined in the wrong order",
            (forward.ATTENTION_CONTEXT, forward.ATTENTION_OUTPUT),
        ),
        Lesson("06", 25, "widen, gate, narrow", "the wrong curve", (forward.SWIGLU, forward.FEED_FORWARD)),
        Lesson("07", 30, "two additions make a layer", "adding to the normalised stream", (forward.BLOCK,)),
    ),
    "From a layer to text": (
        Lesson("08", 20, "the stream becomes scores of words", "the last norm", (forward.LOGITS,)),
        Lesson("09", 10, "the only row that sampling sees", "the row of another token", (after_logits.LAST_ROW,)),
        Lesson("10", 10, "the largest wins", "ties", (after_logits.ARGMAX,)),
        Lesson("11", 30, "a distribution is shaped before it is drawn from", "the order of the filters", FILTERS),
        Lesson(
            "12", 35, "a loop that reads its own output", "the beginning token twice",
            (after_logits.POSITIONS, after_logits.GENERATE),
        ),
    ),
    "Files and tokens (optional)": (
        Lesson(
            "00", 80, "a model is a table of named arrays; text becomes ids, ids pick rows",
            "axes that a file lists fastest first", (foundation.TENSOR_TABLE, foundation.MERGE, forward.EMBEDDING),
        ),
        Lesson(
            "13", 45, "16 to 256 numbers share a scale", "two codes in a byte, which is first",
            (after_logits.Q8_0, after_logits.Q4_0),
        ),
    ),
    "On torch (optional)": (
        Lesson(
            "14", 45, "the same numbers on torch", "a sum taken in half precision",
            (after_logits.TORCH_RMS_NORM, after_logits.TORCH_ROPE),
        ),
    ),
    "Other layers (optional)": (
        Lesson(
            "05b", 60, "a memory of constant size", "the decay after the look-up",
            (forward.SHORT_CONV, forward.L2_NORM, forward.LOG_DECAY, forward.DELTA_RULE),
        ),
        Lesson(
            "06b", 35, "a router chooses a few of many", "weights that are not normalised",
            (forward.TOP_K, forward.TOPK_WEIGHTS, forward.EXPERT_OUTPUTS, forward.MIXED),
        ),
    ),
    "Training": (
        Lesson(
            "15", 25, "a small detour next to a large matrix", "an adapter that is still zero",
            (training.LORA_SCALING, training.LORA_DELTA),
        ),
        Lesson(
            "16", 25, "surprise per token", "labels that are not shifted",
            (training.MASKED_LABELS, training.SHIFTED, training.CROSS_ENTROPY),
        ),
        Lesson("17", 75, "the chain rule by hand", "the second term of a norm", training.BACKWARD),
        Lesson(
            "18", 30, "a step with a memory", "the first step, uncorrected",
            (training.CLIP_BY_NORM, training.ADAMW_STEP, training.LEARNING_RATE),
        ),
        Lesson("19", 40, "many steps", "a mean of means", (training.ACCUMULATED,)),
        Lesson(
            "20", 30, "the detour merged and exported", "rows in another order",
            (training.MERGED, training.INTERLEAVE, training.GGUF_ALPHA),
        ),
    ),
}  # fmt: skip
OPTIONAL = frozenset(lesson.number for title, lessons in BLOCKS.items() if "(optional)" in title for lesson in lessons)
LESSONS: tuple[Lesson, ...] = tuple(lesson for lessons in BLOCKS.values() for lesson in lessons)
BY_NUMBER: Mapping[str, Lesson] = {lesson.number: lesson for lesson in LESSONS}
PARTS: Mapping[str, Exercise] = {exercise.name: exercise for lesson in LESSONS for exercise in lesson.parts}
LESSON_OF: Mapping[str, Lesson] = {exercise.name: lesson for lesson in LESSONS for exercise in lesson.parts}


@dataclass(frozen=True)
class Step:
    """One step of a learner: a lesson, or a part of it on the short route.

    Attributes:
        lesson: The lesson.
        minutes: Expected time.
        parts: The exercises to write; empty if the learner only reads the page.
        on_route: True for a step of the short route.
    """

    lesson: Lesson
    minutes: int
    parts: tuple[Exercise, ...]
    on_route: bool = False


def _make_route_step(number: str, minutes: int, *parts: Exercise) -> Step:
    return Step(BY_NUMBER[number], minutes, parts, on_route=True)


ROUTE = (  # 90 minutes from the first number to text
    _make_route_step(WARM_UP, 2, *BY_NUMBER[WARM_UP].parts),
    _make_route_step("01", 20, *BY_NUMBER["01"].parts),
    _make_route_step("01b", 25, forward.ROPE),
    _make_route_step("07", 8),  # to read
    _make_route_step("12", 35, *BY_NUMBER["12"].parts),
)
PATH = tuple(Step(lesson, lesson.minutes, lesson.parts) for lesson in LESSONS if lesson.number not in OPTIONAL)
OPTIONAL_STEPS = tuple(Step(lesson, lesson.minutes, lesson.parts) for lesson in LESSONS if lesson.number in OPTIONAL)
STEPS = (*ROUTE, *PATH, *OPTIONAL_STEPS)  # in the order in which they are offered
_LAST_OF_RUN = "12"  # number of the last lesson of a run; later ones are about packed blocks, torch and training
RUN_LESSONS = tuple(lesson for lesson in LESSONS if lesson.number <= _LAST_OF_RUN and lesson.number not in OPTIONAL)


def exercises_of_run(config: ModelConfig) -> list[Exercise]:
    """List the exercises that take part when a model generates text, without those of stages that it does not have."""
    stages = {stage.name for _, stage, _ in keys(config)}
    exercises = [exercise for lesson in LESSONS if lesson.number <= _LAST_OF_RUN for exercise in lesson.parts]
    return [exercise for exercise in exercises if not exercise.stages or not stages.isdisjoint(exercise.stages)]


def exercises_of_training() -> list[Exercise]:
    """List the exercises that take part in a training run: those from the adapter to the last step, without export."""
    return [exercise for lesson in LESSONS if "15" <= lesson.number <= "19" for exercise in lesson.parts]


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
