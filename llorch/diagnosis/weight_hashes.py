"""Check that an engine ran these weights: hashes of its decoded tensors compared with llorch's.

Equal numbers in another layout, under another name or in another layer count as these weights: the diagnosis checks how
the engine uses them. Other numbers are other weights, and a comparison would blame the engine's code for them. If only
matrices of a quantised Hugging Face folder have other numbers, the code that decodes them (*reader*) is the suspect.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import numpy as np

from llorch.diagnosis.mistakes.mistake import Mistake
from llorch.diagnosis.mistakes.quantised_folders import QUANTISED_FOLDERS, wrong_reading
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
ROUNDED: Mapping[str, Change] = {  # dtype to which an engine may round decoded weights; empty for none
    "": lambda array: array,
    "bfloat16": lambda array: round_activations(array, "BF16"),
    "float16": lambda array: round_activations(array, "F16"),
}
_N_LISTED = 3


def check_weights(
    weights: Weights, hashes: Mapping[str, str], *, source: str, dtype: str
) -> tuple[list[str], Misread | None]:
    """Compare the weights that an engine ran with the file.

    `hashes` has the `digest` of decoded tensors by the engine's names. `dtype` is the engine's declared dtype: weights
    rounded to it count as equal. Return a note for each difference of tensors with equal numbers (layout, name, layer),
    and the matrices that the engine's reader of a quantised folder misread, if the reader is the suspect.

    Raises:
        GuardFailed: Some tensors have other numbers, and the engine's reader is not the suspect.
    """
    index = _Ours(weights, dtype)
    notes, unequal, n_equal = _sort(index, hashes)
    lines = [f"weights: {_sentence(names, description)}" for description, names in notes.items()]
    if not unequal:
        return lines, None
    names = [name for tensors in unequal.values() for name in tensors]
    details = "; ".join(_sentence(tensors, description) for description, tensors in unequal.items())
    message = f"expected the numbers of {weights.path}, got others in {len(names)} of {len(hashes)} tensors: {details}"
    causes = [index.mistakes[description] for description in unequal if description in index.mistakes]
    if not causes and not (n_equal and all(map(index.is_quantised, names))):
        raise GuardFailed("weights", f"{message}; give the file that the engine loads", source=source)
    # Mistakes are named only if they explain all unequal tensors.
    mistakes = {mistake.name: mistake.diagnosis for mistake in causes} if len(causes) == len(unequal) else {}
    misread = frozenset(filter(None, map(index.find, names)))
    if unequal.keys() <= index.roundings:
        return lines, Misread(f"{message}; the engine rounds matrices after decoding", misread, {}, is_rounding=True)
    return lines, Misread(f"{message}; {_advice(len(causes), n_equal)}", misread, mistakes)


def _sort(index: "_Ours", hashes: Mapping[str, str]) -> tuple[dict[str, list[str]], dict[str, list[str]], int]:
    """Sort differing tensors by description, into equal and unequal numbers; count weights with llorch's numbers."""
    notes: dict[str, list[str]] = {}
    unequal: dict[str, list[str]] = {}
    n_equal = 0
    for name, engine_hash in hashes.items():
        key = index.find(name)
        text, is_equal = ("", True) if index.is_as_stored(name, engine_hash) else index.describe(key, engine_hash)
        n_equal += is_equal and key is not None
        if text:
            (notes if is_equal else unequal).setdefault(text, []).append(name)
    return notes, unequal, n_equal


def _advice(n_mistakes: int, n_equal: int) -> str:
    """Advise on a reader that decodes matrices wrongly; without a known mistake, say how many tensors are equal."""
    if n_mistakes:
        mistakes = "this mistake" if n_mistakes == 1 else "these mistakes"
        return f"the engine's reader of this folder makes {mistakes}; mend the reader"
    equal = f"the other {n_equal} tensors are equal" if n_equal > 1 else "the other tensor is equal"
    return f"only quantised matrices differ, and {equal}; suspect the engine's reader of this folder"


class _Ours:
    """llorch's weights and their hashes in every layout and rounding that an engine may use."""

    def __init__(self, weights: Weights, dtype: str) -> None:
        self._weights, self._dtype, self._inventory = weights, dtype, inventory(weights.config)
        self._names = _names(weights.config)
        self._equal_roundings = [ROUNDED[name] for name in ("", dtype) if name in ROUNDED]
        self._known_layouts: dict[str, tuple[str, str] | None] = {}  # short name -> layout and rounding
        self.mistakes: dict[str, Mistake[QuantisedMatrix]] = {}  # by description
        self.roundings: set[str] = set()  # descriptions of llorch's numbers rounded to another dtype
        self._unknown: set[str] = set()  # short names of a matrix that no known mistake explains

    def find(self, name: str) -> str | None:
        """Return llorch's name of a tensor; None if it is no weight of the model."""
        return next((self._names[end] for end in _name_suffixes(name) if end in self._names), None)

    def is_quantised(self, name: str) -> bool:
        """Tell if a tensor is a matrix of a quantised folder, stored in codes."""
        llorch_name = self.find(name)
        return (
            llorch_name is not None
            and llorch_name in self._weights.slots
            and isinstance(self._weights.as_stored(llorch_name), QuantisedMatrix)
        )

    def describe(self, name: str | None, engine_hash: str) -> tuple[str, bool]:
        """Describe why a tensor's hash differs from llorch's; tell if the tensor has llorch's numbers.

        Record the description in `mistakes` or `roundings` if it is of that kind.
        """
        if engine_hash in self._by_digest:
            return f"is our {self._by_digest[engine_hash]}", True
        if name is None:
            return "is not compared: no weight of the model has this name or this hash", True
        layout_and_rounding = self._find_layout(name, engine_hash)
        if layout_and_rounding is None:
            return self._find_mistake(name, engine_hash) or "has other numbers in every known layout", False
        layout, rounding = layout_and_rounding
        description = " ".join(filter(None, ["has llorch's numbers", layout, rounding and f"rounded to {rounding}"]))
        if rounding in ("", self._dtype):
            return description, True
        self.roundings.add(description)
        return description, False

    def _find_mistake(self, name: str, engine_hash: str) -> str:
        """Describe the known mistake that reads these numbers from a quantised folder; empty if none does.

        To save time, try mistakes of earlier matrices first, and only them if none explained a matrix of this short
        name (`q_proj`, in any layer).
        """
        if name not in self._weights.slots:
            return ""
        packed, short, earlier = self._weights.as_stored(name), name.rpartition(".")[2], list(self.mistakes.values())
        later = [] if short in self._unknown else [m for m in QUANTISED_FOLDERS if m not in earlier]
        for mistake in (*earlier, *later):
            array = wrong_reading(mistake, packed)
            if array is not None and engine_hash in {digest(rounding(array)) for rounding in self._equal_roundings}:
                description = f"is read with the mistake {mistake.name} ({mistake.diagnosis.removesuffix('.')})"
                self.mistakes[description] = mistake
                return description
        self._unknown.add(short)
        return ""

    def is_as_stored(self, name: str, target: str) -> bool:
        """Tell if a tensor equals llorch's array, or the tensor of a Hugging Face folder."""
        key = self.find(name)
        return (key is not None and digest(self._weights.array(key)) == target) or self.is_in_folder(name, target)

    def is_in_folder(self, name: str, engine_hash: str) -> bool:
        """Tell if a tensor equals the tensor of a folder: fused, with gains minus 1, with the logarithm of a decay."""
        tensor = next((self._in_folder[end] for end in _name_suffixes(name) if end in self._in_folder), None)
        if tensor is None:
            return False
        arrays = [assembled(self._weights, tensor, in_gguf=False)]
        slot = self._weights.slots[tensor.weights[0].name]
        if slot.layout == tensor.weights[0].in_huggingface:  # a gain minus 1 has its last digits only in the file
            arrays.append(self._weights.source.array(slot.source_name))
        singles = [array.astype(np.float32) for array in arrays]
        return engine_hash in {digest(rounding(array)) for array in singles for rounding in self._equal_roundings}

    @cached_property
    def _in_folder(self) -> dict[str, Tensor]:
        """Tensors whose numbers or layout differ between a folder and llorch, by name without prefixes."""
        tensors = (
            tensor
            for tensor in huggingface_tensors(self._weights.config)
            if tensor.expert is None and tensor.weights[0].in_huggingface != AS_IS
        )
        return {name: tensor for tensor in tensors for name in (tensor.name, tensor.name.removeprefix("model."))}

    @cached_property
    def _by_digest(self) -> dict[str, str]:
        return {digest(self._weights.array(name)): name for name in self._inventory}

    def _find_layout(self, name: str, engine_hash: str) -> tuple[str, str] | None:
        """Find layout and rounding of a tensor; in later layers, try only those that matched in the first."""
        array, short = self._weights.array(name), name.rpartition(".")[2]
        layouts = dict(_layouts(self._inventory[name], self._weights.config))
        candidates = [(layout, rounding) for rounding in ROUNDED for layout in layouts]
        if short in self._known_layouts:
            candidates = [c for c in candidates if c == self._known_layouts[short]]
        match = next((c for c in candidates if digest(ROUNDED[c[1]](layouts[c[0]](array))) == engine_hash), None)
        self._known_layouts.setdefault(short, match)
        return match


def _layouts(weight: Weight, config: ModelConfig) -> Iterator[tuple[str, Change]]:
    """Yield the layouts of a weight that engines use: description, and function from llorch's array."""
    yield "", lambda array: array
    short = weight.name.rpartition(".")[2]
    if len(weight.shape) == 2:
        yield "transposed", lambda array: array.T
    if weight.name.endswith(("q_proj", "q_bias", "k_proj", "k_bias")):
        n_own_heads = config.n_heads if short[0] == "q" else config.n_kv_heads
        for n_heads, suffix in {config.n_heads: " of as many heads as q has", n_own_heads: ""}.items():
            if weight.shape[0] % (2 * n_heads) == 0:
                yield f"with neighbouring pairs{suffix}", lambda array, n=n_heads: interleave(array, n)
                yield f"with pairs{suffix} undone twice", lambda array, n=n_heads: undo_interleave(array, n)
    if short.endswith("norm"):
        yield "plus 1", lambda array: array + 1


def _names(config: ModelConfig) -> dict[str, str]:
    """Map every file name of a weight to llorch's name."""
    tied = ("lm_head.weight", "output.weight") if config.tie_word_embeddings else ()
    llorch_names: dict[str, str] = dict.fromkeys(tied, "embed_tokens")
    for weight in inventory(config).values():
        names = (weight.name, weight.gguf, weight.huggingface, weight.huggingface.removeprefix("model."))
        llorch_names |= dict.fromkeys(names, weight.name)
    return llorch_names


def _name_suffixes(name: str) -> Iterator[str]:
    """Yield a name and its suffixes at dots, the longest first, because wrappers add prefixes."""
    parts = name.split(".")
    return (".".join(parts[n:]) for n in range(len(parts)))


def _sentence(names: list[str], description: str) -> str:
    """Join names and a description; it begins with `is` or `has`, which becomes plural for several names."""
    suffix = f" and {len(names) - _N_LISTED} more" if len(names) > _N_LISTED else ""
    verb, _, object_part = description.partition(" ")
    verb = verb if len(names) == 1 else {"is": "are", "has": "have"}[verb]
    return f"{', '.join(names[:_N_LISTED])}{suffix} {verb} {object_part}"
