"""Conversion of a model between a Hugging Face folder and a GGUF file, tokenizer and chat template included.

The target is written under another name beside its place, read back, and renamed: it is complete or absent. One
tensor is in memory at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llorch.families.llamacpp_limits import cannot_express
from llorch.files import GGUFFile, Weights, open_weights
from llorch.files.export import FILE_TYPES, NO_VOCABULARY, gguf_size, gguf_types, most_used, write_gguf_content
from llorch.files.export_blocks import Blocks, find_blocks
from llorch.files.export_huggingface import DTYPES, huggingface_config, huggingface_size, write_json, write_safetensors
from llorch.files.hub.reference import name_of
from llorch.files.new_file import new_file, new_folder
from llorch.files.output_paths import (
    CONFIG,
    check_places,
    copied_beside,
    counting,
    placing,
    read_back,
    size_of,
    without_quantisation,
)
from llorch.files.packed import StoredType, has_codes
from llorch.files.quant import BLOCK_SIZES, LARGEST, GGMLType, decode, encode
from llorch.files.quantised import is_quantised
from llorch.files.strict_json import read_settings
from llorch.files.tensor_names import inventory, written_family
from llorch.files.tensor_storage import Layout
from llorch.files.tokenizer.export_gguf import probes_for, read_tokenizer, require_same_ids
from llorch.files.tokenizer.export_huggingface import translate_vocabulary
from llorch.files.tokenizer.gguf_vocabulary import GGUFVocabulary
from llorch.files.tokenizer.huggingface import HuggingFaceVocabulary
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.errors import FormatError, UserError
from llorch.runtime.fields import Fields

# Keys of a GGUF file that a copy of it keeps; the writer makes those about the weights anew.
_KEPT, _MADE = ("general.", "tokenizer.", "llorch."), ("architecture", "file_type", "quantization_version", "alignment")
# Defaults for sampling: name in generation_config.json, and behind `general.sampling.` in GGUF files.
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip
_LARGEST_TOP_K = 2**31 - 1  # of an INT32 in a GGUF file
_FOREIGN_TOKENIZERS = ("tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was done."""

    source: Path
    target: Path
    ggml_type: GGMLType
    n_tensors: int
    n_bytes: int
    fallbacks: list[str]  # matrices that are F16, because their rows are no whole number of blocks
    kept: dict[str, str]  # quantised matrices that stay packed, and their types
    decoded: dict[str, str]  # quantised matrices that no type of ggml holds exactly, and why
    has_vocabulary: bool
    notes: list[str]  # what the target cannot hold


@dataclass
class _Job:
    weights: Weights
    target: Path
    ggml_type: GGMLType
    report: Callable[[str], None]
    blocks: Blocks
    notes: list[str] = field(default_factory=list)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    ggml_type: GGMLType | None = None,
    force: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Conversion:
    """Write a GGUF file or Hugging Face folder as the other, or in another type; by its name a .gguf is a GGUF file.

    A quantised folder can become a folder of floats, too. Type None keeps that of the matrices where the target can
    hold it without loss, else takes F32; a folder has one type for all, norms and biases too. A matrix of a quantised
    folder stays packed in a GGUF file where a type of ggml has exactly its numbers. Refused: a target that exists
    (FileExistsError; with `force` a file, and a folder of nothing but a model's, is replaced), a type that its format
    lacks or a target that is the source (ValueError), what it cannot express (FormatError). After an error nothing is
    left of the target.
    """
    source, target = Path(source), Path(target)
    if source.is_dir() and target.suffix != ".gguf" and not _stores_codes(source):
        raise UserError(f"{target}: expected a target that ends in .gguf, because the source is a Hugging Face folder")
    check_places(source, target=target, force=force)
    weights = open_weights(source)
    with closing(weights.source):
        return write_model(weights, target, ggml_type=ggml_type, report=report)


def write_model(
    weights: Weights, target: Path, *, ggml_type: GGMLType | None = None, report: Callable[[str], None]
) -> Conversion:
    """Write an open model, with tokenizer and chat template of its file or folder, to a place that was checked."""
    to_gguf = target.suffix == ".gguf"
    blocks = find_blocks(weights) if to_gguf and ggml_type is None else Blocks()
    job = _Job(weights, target, choose_type(weights, ggml_type, to_gguf=to_gguf), report, blocks)
    job.notes += weights.notes_on_left_out("not written")
    _note_second_loss(job)
    from_folder = not isinstance(weights.source, GGUFFile)
    has_vocabulary = _to_gguf(job) if to_gguf else _to_floats(job) if from_folder else _to_huggingface(job)
    types = gguf_types(weights.config, job.ggml_type, blocks.kept) if to_gguf else {}
    shapes = {name: row.shape for name, row in inventory(weights.config).items()}
    block_size = BLOCK_SIZES[job.ggml_type][0]
    return Conversion(
        source=weights.path,
        target=target,
        ggml_type=most_used(weights.config, job.ggml_type, blocks.kept),
        n_tensors=len(shapes),
        n_bytes=size_of(target),
        fallbacks=[name for name, kind in types.items() if kind is GGMLType.F16 and shapes[name][-1] % block_size],
        kept={name: kind.name for name, kind in blocks.kept.items()},
        decoded=blocks.decoded,
        has_vocabulary=has_vocabulary,
        notes=job.notes,
    )


def choose_type(weights: Weights, wanted: GGMLType | None, *, to_gguf: bool) -> GGMLType:
    """Choose the type of matrices: the wanted one, else the source's if the target can hold it; ValueError if not."""
    allowed: Mapping[GGMLType, object] = FILE_TYPES if to_gguf else DTYPES
    if wanted is None:
        stored = _stored_types(weights)
        kind = next(iter(stored)) if len(stored) == 1 else GGMLType.F32
        fits = isinstance(kind, GGMLType) and kind in allowed and (to_gguf or _holds_vectors(weights, kind))
        return kind if isinstance(kind, GGMLType) and fits else GGMLType.F32
    if wanted not in allowed:
        kind = "GGUF files" if to_gguf else "Hugging Face folders"
        known = ", ".join(one.name for one in allowed)
        raise UserError(f"type: expected one of {known} for {kind}, got {wanted.name}")
    return wanted


def _holds_vectors(weights: Weights, kind: GGMLType) -> bool:
    """Tell if a dtype keeps every bit of norms and biases, which GGUF files store as F32."""
    for name, weight in inventory(weights.config).items():
        if not weight.stays_f32:
            continue
        stored = np.empty(weight.shape, np.float32)
        Layout(form=weight.in_huggingface.form).put(weights.array(name), stored)
        if np.abs(stored).max() > LARGEST[kind]:
            return False
        raw = np.concatenate([*encode(stored, kind, name=name, path=Path(weights.path))])
        if not np.array_equal(decode(raw, kind, stored.shape), stored):
            return False
    return True


def _stored_types(weights: Weights) -> set[StoredType]:
    """Return the types in which the matrices are stored; tensors that always stay F32 do not count."""
    matrices = (weight for weight in inventory(weights.config).values() if not weight.stays_f32)
    return {weights.stored_type(weight.name) for weight in matrices}


def _note_second_loss(job: _Job) -> None:
    """Note that values quantised already are rounded again, if the job does so."""
    quantised = {kind for kind in _stored_types(job.weights) if has_codes(kind)}
    if quantised - {job.ggml_type} and job.ggml_type is not GGMLType.F32:
        names = ", ".join(sorted(kind.name for kind in quantised))
        job.notes.append(f"the source is already quantised ({names}); {job.ggml_type.name} adds a second rounding")


def _to_gguf(job: _Job) -> bool:
    """Write a model as a GGUF file; return whether it has a tokenizer."""
    weights, source = job.weights, job.weights.source
    if reason := cannot_express(weights.config):
        message = f"cannot convert to GGUF, llama.cpp would compute another model: {reason}"
        raise FormatError("Unsupported", message, path=weights.path)
    if isinstance(source, GGUFFile):
        metadata: dict[str, object] = {key: value for key, value in source.metadata.items() if _is_kept(key)}
    else:
        job.report("tokenizer")
        folder = Path(weights.path)
        metadata = {"general.name": name_of(folder.resolve())} | _sampling_metadata(folder) | _tokenizer_metadata(job)
    if not (has_vocabulary := "tokenizer.ggml.tokens" in metadata):
        metadata |= NO_VOCABULARY
    kept, on_tensor = job.blocks.kept, counting(weights, job.report)
    with placing(job.target, gguf_size(weights.config, job.ggml_type, kept)), new_file(job.target) as temporary:
        write_gguf_content(
            weights, temporary, ggml_type=job.ggml_type, metadata=metadata, kept=kept, on_tensor=on_tensor
        )
        read_back(temporary, weights, job.target)
    return has_vocabulary


def _is_kept(key: str) -> bool:
    """Tell if a metadata key is copied from the source; the writer makes some of `general.` itself."""
    return key.startswith(_KEPT) and key.removeprefix("general.") not in _MADE


def _tokenizer_metadata(job: _Job) -> dict[str, object]:
    folder = Path(job.weights.path)
    if not (folder / "tokenizer.json").is_file():
        others = [name for name in _FOREIGN_TOKENIZERS if (folder / name).exists()]
        if others:
            message = f"expected tokenizer.json, got {others[0]}"
            remedy = "save the tokenizer with transformers as tokenizer.json"
            raise FormatError("Missing", f"{message}; {remedy}", path=folder)
        job.notes.append("the folder has no tokenizer.json, so the GGUF file has no vocabulary")
        return {}
    tokenizer = read_tokenizer(folder, job.weights.config.vocab_size)
    job.notes += tokenizer.notes
    return tokenizer.metadata


def _sampling_metadata(folder: Path) -> dict[str, object]:
    """Return the sampling defaults of a folder as GGUF metadata, {} if it does not sample."""
    path = folder / "generation_config.json"
    values = Fields(read_settings(path), path)
    if not values.boolean("do_sample", default=False):
        return {}
    return {f"general.sampling.{_SAMPLING[key]}": value for key, value in _sampling(values, {}).items()}


def _sampling(values: Fields, names: Mapping[str, str]) -> dict[str, float]:
    """Read the defaults for sampling, each in its range; `names` tells what `values` call a setting."""
    found: dict[str, float] = {}
    for key in _SAMPLING:
        name = names.get(key, key)
        if not values.has(name):
            continue
        found[key] = values.integer(name) if key == "top_k" else values.number(name)
        if key == "top_k" and found[key] > _LARGEST_TOP_K:
            raise values.error("OutOfRange", name, f"at most {_LARGEST_TOP_K}", found[key])
        try:
            SamplingSettings(**{key: found[key]})  # type: ignore[arg-type] (an integer is a number)
        except ValueError as error:
            raise FormatError("OutOfRange", f"{name}: {error}", path=values.path) from None
    return found


def _stores_codes(folder: Path) -> bool:
    """Tell if a folder is quantised: then a folder of floats can be made of it."""
    path = folder / CONFIG
    return path.is_file() and is_quantised(read_settings(path), folder)


def _to_floats(job: _Job) -> bool:
    """Write the folder of floats that a quantised folder stands for."""
    source, dtype = Path(job.weights.path), DTYPES[job.ggml_type]
    with new_model_folder(job.weights, job.target, job.ggml_type, job.report, beside=source) as folder:
        values = without_quantisation(read_settings(source / CONFIG))
        write_json(folder / CONFIG, values | {key: dtype for key in ("dtype", "torch_dtype") if key in values})
    return (source / "tokenizer.json").is_file()


@contextmanager
def new_model_folder(
    weights: Weights, target: Path, ggml_type: GGMLType, report: Callable[[str], None], *, beside: Path | None = None
) -> Iterator[Path]:
    """Write tensors, and copy the files `beside` those of the source; the body adds the rest, then all is read back."""
    with placing(target, huggingface_size(weights.config, ggml_type)), new_folder(target) as folder:
        if beside is not None:
            copied_beside(beside, folder)
        write_safetensors(weights, folder, ggml_type=ggml_type, on_tensor=counting(weights, report))
        yield folder
        read_back(folder, weights, target)


def _to_huggingface(job: _Job) -> bool:
    """Write a GGUF file as a Hugging Face folder; return whether it has a tokenizer."""
    weights, source = job.weights, job.weights.source
    assert isinstance(source, GGUFFile)
    if (family := written_family(weights.config)) != weights.config.family:
        job.notes.append(f"the text part of {weights.config.family} is written as a {family} model")
    config = huggingface_config(weights.config, job.ggml_type, path=source.path)
    vocabulary = GGUFVocabulary(source.metadata, source.path) if "tokenizer.ggml.tokens" in source.metadata else None
    if vocabulary is None:
        job.notes.append("the file has no vocabulary, so the folder has no tokenizer")
    with new_model_folder(weights, job.target, job.ggml_type, job.report) as folder:
        model_ids = {} if vocabulary is None else _write_tokenizer(job, folder, source, vocabulary)
        write_json(folder / CONFIG, config | model_ids)
    return vocabulary is not None


def _write_tokenizer(job: _Job, folder: Path, source: GGUFFile, vocabulary: GGUFVocabulary) -> dict[str, object]:
    """Write the files of a tokenizer; return the ids of special tokens under the keys of a config.json."""
    job.report("tokenizer")
    family, context = written_family(job.weights.config), job.weights.config.max_position_embeddings
    tokenizer = translate_vocabulary(source.metadata, vocabulary, source.path, family=family, context=context)
    job.notes += tokenizer.notes
    write_json(folder / "tokenizer.json", tokenizer.tokenizer)
    write_json(folder / "tokenizer_config.json", tokenizer.config)
    ends = tokenizer.eos_token_ids
    ids = {**tokenizer.token_ids, **({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})}
    names = {key: f"general.sampling.{name}" for key, name in _SAMPLING.items()}
    sampling = _sampling(Fields(source.metadata, source.path), names)
    write_json(folder / "generation_config.json", ids | ({"do_sample": True} if sampling else {}) | sampling)
    texts = probes_for(source.metadata)
    require_same_ids(vocabulary, HuggingFaceVocabulary(folder), texts, path=source.path)
    return ids
