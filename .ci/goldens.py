"""The commands that make goldens again, one a line.

    python .ci/goldens.py day TREE         five models and checkpoint 13
    python .ci/goldens.py nightly TREE     every model

Four of the five differ most: `micro-llama` has goldens of training, `micro-mistral` is a folder whose layers have
windows, `micro-qwen3.5-moe` has delta nets and experts, `story` has trained weights. TREE draws the fifth. It is the
hash of the commit's tree, so the same sources draw the same model.
"""

import sys
from collections.abc import Sequence

from llorch.builtin import EVERY

ALWAYS = ("micro-llama", "micro-mistral", "micro-qwen3.5-moe", "story")


def chosen(extent: str, tree: str, models: Sequence[str] = EVERY) -> tuple[str, ...]:
    """Choose the models.

    Args:
        extent: `day` or `nightly`.
        tree: A hash in hexadecimal digits.
        models: All models.

    Returns:
        Names for `regenerate.py`.
    """
    others = sorted(set(models) - {*ALWAYS})
    drawn = others[int(tree, 16) % len(others)]
    return ("quantised", *(models if extent == "nightly" else (*ALWAYS, drawn)))


if __name__ == "__main__":
    for name in chosen(*sys.argv[1:3]):
        print("python reference_outputs/regenerate.py --check", name)
