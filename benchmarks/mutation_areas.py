"""Areas in which `mutants.py` injects bugs: source files, and the tests that guard them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Area:
    """Source files and the tests that guard them."""

    name: str  # name on the command line
    sources: str  # patterns below `llorch`, without suffix; a file is in one area
    guards: str  # patterns of test files below `tests`, without `test_` and suffix
    live: bool = False  # True if the tests that run engines guard it, too

    def files(self) -> list[Path]:
        """List the source files, relative to the repository."""
        return _matching("llorch", self.sources.split())

    def tests(self) -> list[Path]:
        """List the test files, relative to the repository."""
        return _matching("tests", map(_test_pattern, self.guards.split()))


def _test_pattern(name: str) -> str:
    folder, slash, module = name.rpartition("/")
    return f"{folder}{slash}test_{module}"


def _matching(folder: str, patterns: Iterable[str]) -> list[Path]:
    """List the files below a folder; every pattern matches at least one."""
    matching_files: list[Path] = []
    for pattern in patterns:
        files = sorted((ROOT / folder).glob(f"{pattern}.py"))
        if not files:
            raise ValueError(f"mutation_areas: a file for {folder}/{pattern}.py, got none")
        matching_files += [file.relative_to(ROOT) for file in files]
    return list(dict.fromkeys(matching_files))


AREAS = (
    Area(
        "ops",
        "ops/[!s]* ops/s[!a]* model/[!gm]* model/blocks/* runtime/memory",
        "ops/[!s]* ops/s[!a]* model/[!gm]* model/blocks/* runtime/memory lora/adapted_weights training/numpy_step "
        "judging/checkpoints",
    ),
    Area(
        "config",
        "families/* runtime/fields runtime/errors runtime/builtin stages/__init__ stages/table",
        "families/config* runtime/fields files/weights* stages/table repository/small_models",
    ),
    Area("hub", "files/hub/*", "files/hub/*"),
    Area("machine", "apps/doctor/* apps/doctor/machine/*", "apps/doctor/machine/* cli/doctor"),
    Area(
        "files",
        "files/[!ceob]* files/opening files/blocks/*",
        "files/[!ceob]* files/opening judging/verify_folder model/model_chat",
    ),
    Area("quantised", "files/quantised/*", "files/quantised/*"),
    Area(
        "export",
        "files/convert files/output_paths files/e* files/tokenizer/export*",
        "files/export* files/tokenizer/export files/convert* files/quant_blocks",
    ),
    Area("tokenizer", "files/tokenizer/[!e]*", "files/tokenizer/* apps/evaluate/windows"),
    Area(
        "generation",
        "ops/sampling model/generate model/model",
        "ops/sampling model/generate model/model* faults/teeth_numpy cli/run",
    ),
    Area("torch", "pytorch/* pytorch/[!kt]*/* engines/capture/*", "pytorch/* pytorch/[!kt]*/* engines/capture/*"),
    Area(
        "kernels",
        "pytorch/kernels/* pytorch/kernels/*/* ops/compiled/* files/compiled",
        "pytorch/kernels/* pytorch/kernels/*/* ops/compiled/* pytorch/model pytorch/quantised files/compiled",
    ),
    Area("lora", "lora/* apps/doctor/adapter/*", "lora/* apps/doctor/adapter/* cli/lora_files model/model"),
    Area("data", "training/data/*", "training/data_* cli/data"),
    Area("train", "training/* pytorch/train/*", "training/[!d]* pytorch/train/* cli/lora_train"),
    Area(
        "verification",
        "stages/[!_t]* judging/* judging/goldens/[!t]* judging/runners/[!t]* judging/tolerances/[!t]* "
        "judging/expectations/[!apt]* judging/expectations/tokens",
        "stages/comparison* judging/[!t]* judging/goldens/* judging/tolerances/* judging/expectations/* faults/* "
        "files/matrix",
    ),
    Area("source", "judging/source/*", "judging/source/*"),
    Area(
        "learn",
        "apps/__init__ apps/learn/* apps/learn/exercises/* apps/learn/checks/* apps/learn/museum/* "
        "apps/learn/beginners/* apps/learn/on_torch/*",
        # tests/cli/test_learn_watch.py judges what a learner wrote
        "apps/learn/[!c]* apps/learn/check apps/learn/choice cli/learn_[!w]* repository/pages",
    ),
    Area(
        "diagnosis",
        "engines/dumps/* engines/dumps/writers/* diagnosis/* diagnosis/[ps]*/* diagnosis/training/*",
        "engines/dumps/* diagnosis/* diagnosis/patterns/* diagnosis/search/* diagnosis/training/*",
    ),
    Area("mistakes", "diagnosis/mistakes/*", "diagnosis/mistakes/* faults/*"),
    Area(
        "training_proof",
        "judging/goldens/t* judging/tolerances/t* judging/expectations/training* judging/expectations/a* "
        "judging/runners/training_numpy stages/training",
        "judging/training_* faults/teeth_training scripts/make_training",
    ),
    Area(
        "torch_proof",
        "judging/runners/torch* judging/expectations/p* judging/runners/training_[!n]*",
        "judging/runners/torch judging/training_checkpoints pytorch/quantised judging/checkpoint_14 faults/teeth_torch "
        "cli/verify_torch",
    ),
    Area("quality", "apps/evaluate/* apps/bench/*", "apps/evaluate/[sw]* cli/quality apps/bench/*"),
    Area("report", "diagnosis/report/*", "diagnosis/report/*"),
    Area("engines", "engines/*", "engines/* judging/engine_outputs", live=True),
    Area("serve", "apps/serve/*", "apps/serve/*"),
    Area(
        "cli",
        "__init__ __main__ runtime/__init__ runtime/launched_rank runtime/channel runtime/[tw]* cli/*",
        "cli/* repository/layers runtime/[tw]*",
    ),
    Area("cli_learn", "cli/learn/*", "cli/learn_*"),
    Area("cli_lora", "cli/lora/* cli/data/*", "cli/lora* cli/data cli/run pytorch/train/verify_resume"),
)
