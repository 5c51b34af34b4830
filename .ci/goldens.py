"""The commands that make goldens again and judge torch by the stored ones, one a line.

    python .ci/goldens.py day TREE         five models and checkpoint 13 (`quantised`), torch in one dtype
    python .ci/goldens.py nightly TREE     every model, and float16, which has the code of bfloat16

Four are always taken, those that differ most: `micro-llama` has goldens of training, `micro-mistral` is a folder
whose layers have windows, `micro-qwen3.5-moe` has delta nets and experts, `story` has trained weights. TREE draws the
fifth, and the dtype in which torch is judged. It is the hash of the commit's tree, so the same sources draw the same.
"""

import sys
from collections.abc import Sequence

from llorch.judging.goldens.training import MODELS as TRAINED
from llorch.runtime.builtin import EVERY

ALWAYS = ("micro-llama", "micro-mistral", "micro-qwen3.5-moe", "story")
DTYPES = ("bfloat16", "float32", "float16")


def chosen(extent: str, tree: str, models: Sequence[str] = EVERY) -> tuple[str, ...]:
    """Choose the models.

    Args:
        extent: `day` or `nightly`.
        tree: A hash in hexadecimal digits.
        models: All models.

    Returns:
        Names for `regenerate.py` and `llorch verify`.
    """
    others = sorted(set(models) - {*ALWAYS})
    drawn = others[int(tree, 16) % len(others)]
    return ("quantised", *(models if extent == "nightly" else (*ALWAYS, drawn)))


def commands(extent: str, tree: str) -> list[str]:
    """List the commands, those that take longest first; for the arguments see `chosen`.

    Models with goldens of training take longest, so each has a process. The others share one, because a process needs
    longer to import the engines than to make the goldens of a small model.
    """
    names = chosen(extent, tree)
    dtypes = DTYPES if extent == "nightly" else (DTYPES[int(tree, 16) // len(EVERY) % 2],)  # the first or the second
    judged = [f"llorch verify {' '.join(names)} --backend torch --dtype {dtype}" for dtype in dtypes]
    alone = [name for name in names if name in TRAINED]
    together = " ".join(name for name in names if name not in TRAINED)
    return [*judged, *(f"python reference_outputs/regenerate.py --check {made}" for made in (*alone, together))]


if __name__ == "__main__":
    print("\n".join(commands(*sys.argv[1:3])))
