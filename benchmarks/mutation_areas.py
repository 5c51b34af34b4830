"""Areas that `mutants.py` plants bugs in: source files, and the tests that guard them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Area:
    """Source files and the tests that hold them."""

    name: str  # on the command line
    sources: str  # patterns below `llorch`, without suffix; a file is in one area
    guards: str  # patterns of test files below `tests`, without `test_` and suffix
    live: bool = False  # whether the tests that run the engines are among them

    def files(self) -> list[Path]:
        """List the source files, relative to the repository."""
        return _matching("llorch", self.sources.split())

    def tests(self) -> list[Path]:
        """List the test files, relative to the repository."""
        return _matching("tests", map(_of_tests, self.guards.split()))


def _of_tests(name: str) -> str:
    folder, slash, module = name.rpartition("/")
    return f"{folder}{slash}test_{module}"


def _matching(folder: str, patterns: Iterable[str]) -> list[Path]:
    """List the files below a folder; every pattern matches at least one."""
    found: list[Path] = []
    for pattern in patterns:
        files = sorted((ROOT / folder).glob(f"{pattern}.py"))
        if not files:
            raise ValueError(f"mutation_areas: a file for {folder}/{pattern}.py, got none")
        found += [file.relative_to(ROOT) for file in files]
    return list(dict.fromkeys(found))


AREAS = (
    Area(
        "ops",
        "ops/* families/* forward backward cache numerics memory finite",
        "ops/* families/* forward backward cache finite memory lora/adapted_weights train/numpy_step "
        "verify/checkpoints",
    ),
    Area(
        "config",
        "config/* architecture config_reader errors builtin stages",
        "config* files/weights* stages repository/examples",
    ),
    Area("hub", "hub/*", "hub/*"),
    Area("machine", "machine/*", "machine/* cli/doctor"),
    Area("files", "files/[!e]* files/blocks/*", "files/[!e]* verify/verify_folder model_images"),
    Area("quantised", "files/quantised/*", "files/quantised/*"),
    Area(
        "export",
        "convert output_paths files/e* tokenizer/export*",
        "files/export* tokenizer/export convert convert_failures files/quant_blocks",
    ),
    Area("tokenizer", "tokenizer/[!e]*", "tokenizer/* evaluate/windows"),
    Area("generation", "sampling generate model", "sampling generate model model_images faults/teeth_numpy cli/run"),
    Area("torch", "pytorch/* pytorch/[!kt]*/*", "pytorch/* pytorch/[!kt]*/*"),
    Area(
        "kernels",
        "pytorch/kernels/* pytorch/kernels/*/*",
        "pytorch/kernels/* pytorch/kernels/*/* pytorch/model pytorch/quantised",
    ),
    Area("lora", "lora/* doctor/*", "lora/* doctor/* cli/lora_files model"),
    Area("data", "train/data/*", "train/data_* cli/data"),
    Area("train", "train/* pytorch/train/*", "train/[!d]* pytorch/train/* cli/lora_train"),
    Area(
        "verification",
        "places comparison verify/* verify/runners/[!t]* verify/tolerances/* verify/expectations/[!p]*",
        "comparison* verify/[!t]* verify/tolerances/* verify/expectations/* faults/* files/matrix",
    ),
    Area(
        "learn",
        "learn/* learn/exercises/* learn/checks/* learn/museum/* learn/on_torch/*",
        "learn/[!c]* learn/check learn/choice cli/learn_[!w]*",  # the other file judges what a learner wrote
    ),
    Area(
        "diagnosis",
        "dumps/* dumps/writers/* diagnosis/* diagnosis/search/* diagnosis/training/*",
        "dumps/* diagnosis/* diagnosis/training/*",
    ),
    Area("mistakes", "diagnosis/mistakes/*", "diagnosis/mistakes/* faults/*"),
    Area("training_proof", "verify/training/[!t]*", "verify/training_* faults/teeth_training repository/make_training"),
    Area(
        "torch_proof",
        "verify/runners/t* verify/expectations/p* verify/training/t*",
        "verify/runners/torch verify/training_checkpoints pytorch/quantised verify/checkpoint_14 faults/teeth_torch "
        "cli/verify_torch",
    ),
    Area("quality", "evaluate/* bench", "evaluate/[sw]* cli/quality bench cli/bench"),
    Area("report", "diagnosis/report/*", "diagnosis/report/*"),
    Area("producers", "engines/*", "engines/* verify/evidence", live=True),
    Area("serve", "serve/*", "serve/*"),
    Area("cli", "__init__ __main__ torchrun threads channel worker cli/*", "cli/* repository/layers worker channel"),
    Area("cli_learn", "cli/learn/*", "cli/learn_*"),
    Area("cli_lora", "cli/lora/* cli/data/*", "cli/lora* cli/data cli/run pytorch/train/verify_resume"),
)
