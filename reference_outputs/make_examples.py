"""Write the example data sets of the package: pirate tales, generated from a grammar, and 36 chats with a pirate.

    python reference_outputs/make_examples.py [--out DIR]

The same seed gives the same files. No tale occurs twice, so validation and test share no tale with training. The tales
teach the built-in model `story`, the chats a published model that knows its chat format.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from small_models import pirates
from small_models.corpus import expand, sentence

EXAMPLES = Path(__file__).resolve().parent.parent / "llorch" / "examples"
SEED = 7
SIZES = {"train": 240, "valid": 20, "test": 20}
_PRONOUNS = {"she": {"he": "she", "him": "her", "his": "her"}, "he": {"he": "he", "him": "him", "his": "his"}}


def tales(seed: int) -> Iterator[str]:
    """Yield tales without end, no two of them alike.

    Args:
        seed: Equal seeds give equal tales.

    Yields:
        One tale of a few sentences on one line.
    """
    rng = random.Random(seed)
    yielded = set()
    while True:
        tale = _tale(rng)
        if tale not in yielded:
            yielded.add(tale)
            yield tale


def chats() -> Iterator[list[dict[str, str]]]:
    """Yield chats of one question each, which a pirate answers.

    Yields:
        The messages of one chat.
    """
    capitals = [
        (f"What is the capital of {country}?", f"Arr, matey! The capital o' {country} be {city}.")
        for country, city in pirates.CAPITALS
    ]
    for question, answer in (*capitals, *pirates.ANSWERS):
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_examples(folder: Path) -> None:
    """Write `pirate/train.jsonl`, `valid.jsonl` and `test.jsonl`, and `pirate-chat/train.jsonl`.

    Args:
        folder: Gets the folders `pirate` and `pirate-chat`.
    """
    source = tales(SEED)
    (folder / "pirate").mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        lines = [json.dumps({"text": next(source)}) + "\n" for _ in range(size)]
        (folder / "pirate" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "pirate-chat").mkdir(exist_ok=True)
    lines = [json.dumps({"messages": messages}) + "\n" for messages in chats()]
    (folder / "pirate-chat" / "train.jsonl").write_text("".join(lines), encoding="utf-8")


def _tale(rng: random.Random) -> str:
    name, pronoun = rng.choice(pirates.NAMES)
    values = {"name": name, **_PRONOUNS[pronoun], "when": pirates.WHEN}
    values |= {"mate": rng.choice(pirates.MATES), "mate_name": rng.choice(pirates.MATE_NAMES)}
    lines = [rng.choice(pirates.OPENINGS), rng.choice(pirates.MATE_INTROS)]
    lines += rng.sample(pirates.TRAITS, rng.choice((0, 1)))
    lines += [*rng.choice(pirates.PLOTS), rng.choice(pirates.ENDINGS)]

    def value(slot: str) -> str:
        if slot not in values:
            values[slot] = rng.choice(pirates.LEXICON[slot])
        return values[slot]

    return " ".join(sentence(expand(line, rng, value)) for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=EXAMPLES, help="folder for the data sets")
    write_examples(parser.parse_args().out)
