"""Check that an engine ran these weights: hashes of its decoded tensors compared with llorch's.

Equal numbers in another layout, under another name or in another layer count as these weights: the diagnosis judges
the engine's use of them. Other numbers are other weights, and a comparison would blame the engine's code for them.
If only quantised matrices of a folder have other numbers, the engine's reader of the folder is the suspect instead.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.quantised_folders import QUANTISED_FOLDERS, wrong_readings
from llorch.engines.dumps.raw import digest
from llorch.engines.dumps.stage_dump import Misread
from llorch.families.config import ModelConfig
from llorch.files import Weights
from llorch.files.export import assembled
from llorch.files.quantised.matrix import QuantisedMatrix
from llorch.files.tensor_names import Tensor, Weight, huggingface_tensors, interleave, inventory, undo_interleave
from llorch.files.tensor_storage import AS_IS
from llorch.ops.rounding import round_activations
from llorch.runtime.errors import GuardFailed

Change = Callable[[np.ndarray], np.ndarray]
ROUNDED: Mapping[str, Change] = {
    "": lambda array: array,
    "bfloat16": lambda array: round_activations(array, "BF16"),
    "float16": lambda array: round_activations(array, "F16"),
}
_SHOWN = 3


def check_weights(
    weights: Weights, hashes: Mapping[str, str], *, source: str, dtype: str
) -> tuple[list[str], Misread | None]:
    """Compare the weights that an engine ran with the file.

    `hashes` are the `digest` of decoded tensors, by the engine's names; `dtype` is that in which the engine says that
    it computes: weights rounded to it count as equal. Return a sentence for each way in which tensors of equal numbers
    differ from llorch's, and what the engine's reader of a quantised folder got wrong, if it is the suspect.

    Raises:
        GuardFailed: Some have other numbers, and the engine's reader is not the suspect.
    """
    ours = _Ours(weights, dtype)
    notes, others, n_equal = _sort(ours, hashes)
    said = [f"weights: {_sentence(names, how)}" for how, names in notes.items()]
    if not others:
        return said, None
    names = [name for each in others.values() for name in each]
    what = "; ".join(_sentence(each, how) for how, each in others.items())
    message = f"expected the numbers of {weights.path}, got others in {len(names)} of {len(hashes)} tensors: {what}"
    named = [ours.mistakes[how] for how in others if how in ours.mistakes]
    if not named and not (n_equal and all(map(ours.is_quantised, names))):
        raise GuardFailed("weights", f"{message}; give the file that the engine loads", source=source)
    mistakes = {mistake.name: mistake.diagnosis for mistake in named} if len(named) == len(others) else {}
    found = frozenset(filter(None, map(ours.find, names)))
    if others.keys() <= ours.roundings:
        return said, Misread(f"{message}; the engine rounds matrices after decoding", found, {}, is_rounding=True)
    return said, Misread(f"{message}; {_advice(len(named), n_equal)}", found, mistakes)


def _sort(ours: "_Ours", hashes: Mapping[str, str]) -> tuple[dict[str, list[str]], dict[str, list[str]], int]:
    """Sort unequal tensors into those with llorch's numbers and those with others; count all with llorch's."""
    notes: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    n_equal = 0
    for name, told in hashes.items():
        mine = ours.find(name)
        how, is_ours = ("", True) if ours.is_as_stored(name, told) else ours.guise(mine, told)
        n_equal += is_ours and mine is not None
        if how:
            (notes if is_ours else others).setdefault(how, []).append(name)
    return notes, others, n_equal


def _advice(n_mistakes: int, n_equal: int) -> str:
    """Say what to do about a reader that gets matrices of a quantised folder wrong."""
    if n_mistakes:
        what = "this mistake" if n_mistakes == 1 else "these mistakes"
        return f"the engine's reader of this folder makes {what}; mend the reader"
    equal = f"the other {n_equal} tensors are equal" if n_equal > 1 else "the other tensor is equal"
    return f"only quantised matrices differ, and {equal}; suspect the engine's reader of this folder"


class _Ours:
    """Our weights under every guise in which an engine may hold them."""

    def __init__(self, weights: Weights, dtype: str) -> None:
        self._weights, self._dtype, self._inventory = weights, dtype, inventory(weights.config)
        self._names = _names(weights.config)
        self._own_roundings = [ROUNDED[name] for name in ("", dtype) if name in ROUNDED]
        self._tried: dict[str, tuple[str, str] | None] = {}  # by short name: layout and rounding of the first one
        self.mistakes: dict[str, Mistake[QuantisedMatrix]] = {}  # known mistakes of reading, by the words of `guise`
        self.roundings: set[str] = set()  # words of `guise` for llorch's numbers rounded to another dtype
        self._unknown: set[str] = set()  # short names of which a matrix was read with no known mistake

    def find(self, name: str) -> str | None:
        """Return llorch's name of a tensor; None if it is no weight of the model."""
        return next((self._names[end] for end in _name_suffixes(name) if end in self._names), None)

    def is_quantised(self, name: str) -> bool:
        """Tell if a tensor is a matrix of a quantised folder, stored in codes."""
        mine = self.find(name)
        return (
            mine is not None
            and mine in self._weights.slots
            and isinstance(self._weights.as_stored(mine), QuantisedMatrix)
        )

    def guise(self, name: str | None, told: str) -> tuple[str, bool]:
        """Describe how a tensor got another hash than llorch's weight; tell if the tensor has llorch's numbers."""
        if told in self._by_digest:
            return f"is our {self._by_digest[told]}", True
        if name is None:
            return "is not compared: no weight of the model has this name or this hash", True
        way = self._way(name, told)
        if way is None:
            return self._reading(name, told) or "has other numbers in every known layout", False
        layout, rounding = way
        how = " ".join(filter(None, ["has llorch's numbers", layout, rounding and f"rounded to {rounding}"]))
        if rounding in ("", self._dtype):
            return how, True
        self.roundings.add(how)
        return how, False

    def _reading(self, name: str, told: str) -> str:
        """Name the known mistake that reads these numbers from a matrix of a quantised folder; empty if none does.

        Mistakes that were found come first. Nothing else is tried after a matrix of this kind that none explained.
        """
        if name not in self._weights.slots:
            return ""
        short, found = name.rpartition(".")[2], list(self.mistakes.values())
        others = [] if short in self._unknown else [one for one in QUANTISED_FOLDERS if one not in found]
        for mistake, array in wrong_readings(self._weights.as_stored(name), [*found, *others]):
            if told in {digest(rounding(array)) for rounding in self._own_roundings}:
                how = f"is read with the mistake {mistake.name} ({mistake.diagnosis.removesuffix('.')})"
                self.mistakes[how] = mistake
                return how
        self._unknown.add(short)
        return ""

    def is_as_stored(self, name: str, told: str) -> bool:
        """Tell if a tensor is llorch's, or is as a Hugging Face folder has it."""
        mine = self.find(name)
        return (mine is not None and digest(self._weights.array(mine)) == told) or self.is_in_folder(name, told)

    def is_in_folder(self, name: str, told: str) -> bool:
        """Tell if a tensor is as a Hugging Face folder has it: joined, gains less one, the logarithm of a decay."""
        tensor = next((self._in_folder[end] for end in _name_suffixes(name) if end in self._in_folder), None)
        if tensor is None:
            return False
        arrays = [assembled(self._weights, tensor, in_gguf=False)]
        slot = self._weights.slots[tensor.weights[0].name]
        if slot.layout == tensor.weights[0].in_huggingface:  # less one, its last digits are in the file alone
            arrays.append(self._weights.source.array(slot.source_name))
        singles = [array.astype(np.float32) for array in arrays]
        return told in {digest(rounding(array)) for array in singles for rounding in self._own_roundings}

    @cached_property
    def _in_folder(self) -> dict[str, Tensor]:
        """Tensors whose numbers or layout differ between a folder and llorch, by the ends of their names."""
        others = (
            tensor
            for tensor in huggingface_tensors(self._weights.config)
            if tensor.expert is None and tensor.weights[0].in_huggingface != AS_IS
        )
        return {name: tensor for tensor in others for name in (tensor.name, tensor.name.removeprefix("model."))}

    @cached_property
    def _by_digest(self) -> dict[str, str]:
        return {digest(self._weights.array(name)): name for name in self._inventory}

    def _way(self, name: str, told: str) -> tuple[str, str] | None:
        """Find layout and rounding; for tensors of one kind, only the first match is tried again."""
        array, short = self._weights.array(name), name.rpartition(".")[2]
        layouts = dict(_layouts(self._inventory[name], self._weights.config))
        ways = [(layout, rounding) for rounding in ROUNDED for layout in layouts]
        if short in self._tried:
            ways = [way for way in ways if way == self._tried[short]]
        found = next((way for way in ways if digest(ROUNDED[way[1]](layouts[way[0]](array))) == told), None)
        self._tried.setdefault(short, found)
        return found


def _layouts(weight: Weight, config: ModelConfig) -> Iterator[tuple[str, Change]]:
    """Yield the ways to hold the same numbers."""
    yield "", lambda array: array
    short = weight.name.rpartition(".")[2]
    if len(weight.shape) == 2:
        yield "transposed", lambda array: array.T
    if weight.name.endswith(("q_proj", "q_bias", "k_proj", "k_bias")):
        own = config.n_heads if short[0] == "q" else config.n_kv_heads
        for n_heads, said in {config.n_heads: " of as many heads as q has", own: ""}.items():
            if weight.shape[0] % (2 * n_heads) == 0:
                yield f"with neighbouring pairs{said}", lambda array, n=n_heads: interleave(array, n)
                yield f"with pairs{said} undone twice", lambda array, n=n_heads: undo_interleave(array, n)
    if short.endswith("norm"):
        yield "plus 1", lambda array: array + 1


def _names(config: ModelConfig) -> dict[str, str]:
    """Map every name that a weight has in files to llorch's name."""
    tied = ("lm_head.weight", "output.weight") if config.tie_word_embeddings else ()
    known: dict[str, str] = dict.fromkeys(tied, "embed_tokens")
    for weight in inventory(config).values():
        names = (weight.name, weight.gguf, weight.huggingface, weight.huggingface.removeprefix("model."))
        known |= dict.fromkeys(names, weight.name)
    return known


def _name_suffixes(name: str) -> Iterator[str]:
    """Yield a name, and the name without its first parts, the longest first: wrappers add parts in front."""
    parts = name.split(".")
    return (".".join(parts[n:]) for n in range(len(parts)))


def _sentence(names: list[str], how: str) -> str:
    """Join names and what they have in common, a verb in the singular and the rest."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    verb, _, rest = how.partition(" ")
    verb = verb if len(names) == 1 else {"is": "are", "has": "have"}[verb]
    return f"{', '.join(names[:_SHOWN])}{more} {verb} {rest}"
