"""Commands that regenerate goldens and verify torch against the stored ones, one per line.

python .ci/goldens.py day         five models and checkpoint 13 (`quantised`), torch in one dtype
python .ci/goldens.py nightly     every model, and torch in every dtype
"""

import sys

from llorch.judging.goldens.training import MODELS as TRAINED
from llorch.runtime.builtin import EVERY

# The models that differ most: `micro-llama` has goldens of training, `micro-mistral` is a folder whose layers have
# windows, `micro-qwen3.5-moe` has delta nets and experts, `story` has trained weights.
BY_DAY = ("micro-llama", "micro-mistral", "micro-qwen3.5-moe", "story", "micro-qwen2")
DTYPES = ("bfloat16", "float32", "float16")  # the first by day


def commands(extent: str) -> list[str]:
    """List the commands for `day` or `nightly`, those that take longest first.

    Models with goldens of training take longest, so each has a process. The others share one, because a process needs
    longer to import the engines than to make the goldens of a small model.
    """
    names = ("quantised", *(EVERY if extent == "nightly" else BY_DAY))
    verifications = [
        f"llorch verify {' '.join(names)} --backend torch --dtype {dtype}"
        for dtype in (DTYPES if extent == "nightly" else DTYPES[:1])
    ]
    trained = [name for name in names if name in TRAINED]
    joined = " ".join(name for name in names if name not in TRAINED)
    return [*verifications, *(f"python reference_outputs/regenerate.py --check {args}" for args in (*trained, joined))]


if __name__ == "__main__":
    print("\n".join(commands(sys.argv[1])))
