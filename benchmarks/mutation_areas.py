"""Which tests guard which source files: the areas that `mutants.py` plants bugs in."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Area:
    """Source files and the tests that hold them.

    Attributes:
        name: On the command line.
        sources: Patterns below `llorch`, without suffix; a file is in one area.
        guards: Patterns of test files, without `test_` and suffix.
        live: Whether the tests that run the engines are among them.
    """

    name: str
    sources: str
    guards: str
    live: bool = False

    def files(self) -> list[Path]:
        """Source files, relative to the repository."""
        return _matching("llorch", self.sources.split())

    def tests(self) -> list[Path]:
        """Test files, relative to the repository."""
        return _matching("tests", (f"test_{name}" for name in self.guards.split()))


def _matching(folder: str, patterns: Iterable[str]) -> list[Path]:
    """Files below a folder; every pattern has one at least.

    Raises:
        ValueError: A pattern that fits no file.
    """
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
        "ops/* forward backward cache numerics memory finite",
        "ops_* forward backward cache finite memory lora_adapted train_numpy_step checkpoints",
    ),
    Area("config", "config fields errors builtin", "config* fields weights weights_hostile examples"),
    Area(
        "files",
        "weights/[!ep]* weights/packed weights/blocks/*",
        "weights* gguf* safetensors* matrix quant quant_blocks residency verify_folder",
    ),
    Area(
        "export",
        "convert weights/e* weights/placing tokenizer/export*",
        "export* convert convert_checks convert_failures quant_blocks",
    ),
    Area("tokenizer", "tokenizer/[!e]*", "tokenizer* export_tokenizer quality_windows"),
    Area("generation", "sampling generate model", "sampling generate model model_adapters teeth_forward cli_run"),
    Area(
        "torch",
        "torch_model torch_cache torch_backend/[!otv]*",
        "torch_* kernels_fused_model lora_torch_serving bench",
    ),
    Area("kernels", "kernels/*", "kernels_* torch_reproducible torch_model torch_quantised"),
    Area("lora", "lora/*", "lora_* cli_lora_files model_adapters"),
    Area("data", "train/data/*", "train_data_* cli_data"),
    Area("train", "train/*", "train_[!d]* train_disk cli_lora_train"),
    Area(
        "verification",
        "compare diagnose evidence foundation half model_places quantised quantised_goldens quantised_limits "
        "quantised_models replay stages sums truth verifier verify verify_quantised",
        "compare* evidence half matrix mistakes quantised* replay stages sums verifier* verify* checkpoint_13 teeth",
    ),
    Area("mistakes", "mistakes/*", "mistakes teeth*"),
    Area(
        "training_proof",
        "training_* verify_training",
        "training_* checkpoint_1[5-9] checkpoint_20 make_training teeth_training",
    ),
    Area(
        "torch_proof",
        "torch_backend/observed torch_backend/training_path torch_backend/v*",
        "torch_verifier torch_quantised checkpoint_14 teeth_torch training_half cli_verify_torch",
    ),
    Area("quality", "quality/* bench", "quality_[sw]* cli_quality bench cli_bench"),
    Area("report", "report/*", "pages report_half readme cli_verify"),
    Area("producers", "producers/*", "producers* trace_check evidence", live=True),
    Area("cli", "__init__ __main__ threads cli/*", "cli* layers"),
    Area("cli_lora", "cli/lora/* cli/data/*", "cli_lora* cli_data cli_run_adapter"),
)
