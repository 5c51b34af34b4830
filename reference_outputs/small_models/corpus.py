"""The training text: short stories expanded from the grammar, the same for the same seed.

A story is an opening, a trait or two, one plot and an ending. The characters, their pronouns and every prop are drawn
once, so a red ball stays red and a "she" stays a "she".
"""

import random
import re
from collections.abc import Callable, Iterator

from small_models import grammar
from small_models.words import ANIMAL_NAMES, ANIMALS, BOYS, BUILDS, GIRLS, LEXICON, NOISES

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_SHE = {"he": "she", "him": "her", "his": "her"}
_HE = {"he": "he", "him": "him", "his": "his"}


def stories(seed: int) -> Iterator[str]:
    """Yield stories without end.

    Args:
        seed: Seed of the generator; equal seeds give equal stories.

    Yields:
        One story of a few sentences on one line.
    """
    rng = random.Random(seed)
    while True:
        yield story(rng)


def story(rng: random.Random) -> str:
    """Write one story.

    Args:
        rng: Source of every choice.

    Returns:
        The sentences, joined by single spaces.
    """
    plot = rng.choice(grammar.PLOTS)
    openings, when = rng.choice(((grammar.OPENINGS, grammar.WHEN),) * 3 + ((grammar.SCENES, grammar.WHEN_LATER),))
    lines = [rng.choice(openings), *rng.sample(grammar.TRAITS, rng.choice((0, 1, 1, 2)))]
    if plot.friend == "known":
        lines.append(rng.choice(grammar.FRIEND_INTROS))
    lines += [line.removeprefix("?") for line in plot.lines if not line.startswith("?") or rng.random() < 0.5]
    lines += _ending(rng, plot)
    props = _Props(rng, when=when)
    return " ".join(sentence(props.fill(line)) for line in lines)


def _ending(rng: random.Random, plot: grammar.Plot) -> list[str]:
    lines = [rng.choice(grammar.ENDINGS + (grammar.FRIEND_ENDINGS if plot.friend else ()))]
    if rng.random() < 0.4:
        lines.append(rng.choice(grammar.MORALS).replace("{moral}", plot.moral))
    return lines + ["The end."] * (rng.random() < 0.15)


def expand(line: str, rng: random.Random, value: Callable[[str], str]) -> str:
    """Expand choices and slots until neither is left; a slot in a side not taken draws nothing.

    Args:
        line: With `[a|b]` and `{slot}`.
        rng: Source of every choice.
        value: Gives the value of a slot.

    Returns:
        The sentence.
    """
    while _CHOICE.search(line) or _SLOT.search(line):
        if _CHOICE.search(line):
            line = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), line)
        else:
            line = _SLOT.sub(lambda match: value(match[1]), line)
    return line


class _Props:
    """Words that a story has drawn so far: every slot keeps its first value."""

    def __init__(self, rng: random.Random, *, when: str) -> None:
        self._rng = rng
        hero = _person(rng, taken="")
        friend = _person(rng, taken=hero["short"])
        self._values = {"hero": hero["short"], "hero_full": hero["full"], "hero_long": hero["long"]}
        self._values |= {
            "friend": friend["short"],
            "friend_full": friend["full"],
            "friend_call": friend["call"],
        }
        for slot in ("he", "him", "his"):
            self._values |= {slot: hero[slot], "f" + slot: friend[slot]}
        self._values["when"] = when
        self._draw_things()

    def fill(self, line: str) -> str:
        """Expand one line."""
        return expand(line, self._rng, self._value)

    def _value(self, slot: str) -> str:
        if slot not in self._values:
            kind = slot.rstrip("234")
            used = {value for slot_name, value in self._values.items() if slot_name.rstrip("234") == kind}
            self._values[slot] = self._rng.choice([word for word in LEXICON[kind] if word not in used])
        return self._values[slot]

    def _draw_things(self) -> None:
        """Draw the props of several words that belong together."""
        for number, toy in zip(("", "2", "3", "4"), self._rng.sample(LEXICON["toy"], 4), strict=True):
            adjective = self._rng.choice(LEXICON[self._rng.choice(("color", "color", "look"))])
            self._values |= {f"toy{number}": toy, f"thing{number}": f"{adjective} {toy}"}
        self._values |= zip(("build", "built", "parts"), self._rng.choice(BUILDS), strict=True)
        self._values |= zip(("noise", "sound"), self._rng.choice(NOISES), strict=True)


def _person(rng: random.Random, *, taken: str) -> dict[str, str]:
    """Draw a child or an animal that is not called `taken`."""
    person = (_child if rng.random() < 0.5 else _animal)(rng)
    return person if person["short"] != taken else _person(rng, taken=taken)


def _child(rng: random.Random) -> dict[str, str]:
    word, names, pronouns = rng.choice((("girl", GIRLS, _SHE), ("boy", BOYS, _HE)))
    name = rng.choice(names)
    full = f"a {_adjective(rng, always=False)}{word} named {name}"
    return {"full": full, "long": name, "short": name, "call": name, **pronouns}


def _animal(rng: random.Random) -> dict[str, str]:
    species, pronouns, adjective = rng.choice(ANIMALS), rng.choice((_SHE, _HE)), _adjective(rng, always=True)
    if rng.random() < 0.6:
        short = f"the {species}"
        return {
            "full": f"a {adjective}{species}", "long": f"the {adjective}{species}", "short": short,
            "call": "my friend", **pronouns,
        }  # fmt: skip
    name = rng.choice(ANIMAL_NAMES)
    full = f"a {_adjective(rng, always=False)}{species} named {name}"
    return {"full": full, "long": f"{name} the {species}", "short": name, "call": name, **pronouns}


def _adjective(rng: random.Random, *, always: bool) -> str:
    if not always and rng.random() < 0.4:
        return ""
    return rng.choice(LEXICON[rng.choice(("size", "size", "trait"))]) + " "


def sentence(line: str) -> str:
    """Make articles agree and begin every sentence and every speech with a capital."""
    line = re.sub(r"\b([Aa]) (?=[aeiou]|honest)", r"\1n ", line)
    return re.sub(r'(^|[.!?] |(?:^| )")([a-z])', lambda match: match[1] + match[2].upper(), line)
