"""Make the small models of the package, trained on generated stories.

    python reference_outputs/make_models.py [NAME ...] [--out DIR] [--steps N] [--state DIR]

The same seed gives the same files on the same machine. Needs the `golden` extra, and for families that are not dense
the source of llama.cpp in LLORCH_LLAMACPP. Progress goes to stderr.
"""

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

from small_models import converted, folder, gguf_file
from small_models.check import check, check_folder
from small_models.corpus import stories
from small_models.provenance import note
from small_models.shapes import RECIPES
from small_models.training import train
from small_models.vocabulary import train_vocabulary

from llorch.families.table import FAMILIES
from llorch.runtime.builtin import FOLDERS, OTHERS

MODELS = Path(__file__).resolve().parent.parent / "llorch" / "models"
VOCABULARY_STORIES = 8000


def make(name: str, *, out: Path, steps: int | None, state: Path | None) -> None:
    """Make one model and note where it came from.

    Args:
        name: Name of the recipe.
        out: Folder for the file or folder and `provenance.json`.
        steps: Optimiser steps, None for the recipe's.
        state: Folder for states to resume from, or None.
    """
    recipe = RECIPES[name] if steps is None else dataclasses.replace(RECIPES[name], steps=steps)
    texts = itertools.islice(stories(recipe.seed), VOCABULARY_STORIES)
    vocabulary = train_vocabulary(recipe.vocabulary, texts, size=recipe.config["vocab_size"])
    model, losses = train(name, recipe, vocabulary, state=state)
    path = out / (name if name in FOLDERS else f"{name}.gguf")
    if name in FOLDERS:
        transposed = FAMILIES[recipe.family].layout.transposed_experts == "files"
        folder.write(path, model, vocabulary, transposed=transposed)
    elif name in OTHERS:
        converted.write(path, model, vocabulary.metadata)
    else:
        gguf_file.write(path, model, recipe, vocabulary.metadata)
    reader = "transformers" if name in FOLDERS else "llamacpp"
    difference = (check_folder if name in FOLDERS else check)(path, model, vocabulary.tokenizer, recipe)
    note(path, recipe, losses, reader=reader, difference=difference)
    print(f"{path}: {reader} within {difference:.1e}", file=sys.stderr)


def main() -> None:
    """Make the models named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(RECIPES)}; default all")
    parser.add_argument("--out", type=Path, default=MODELS, help="folder for the GGUF files")
    parser.add_argument("--steps", type=int, help="optimiser steps instead of the recipe's")
    parser.add_argument("--state", type=Path, help="folder for states to resume from")
    options = parser.parse_args()
    if unknown := set(options.names) - set(RECIPES):
        parser.error(f"unknown model {', '.join(sorted(unknown))}, expected any of {', '.join(RECIPES)}")
    for name in options.names or RECIPES:
        make(name, out=options.out, steps=options.steps, state=options.state)


if __name__ == "__main__":
    main()
