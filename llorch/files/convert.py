"""Conversion of a model between file formats and number types, with tokenizer and chat template.

A Hugging Face folder becomes a GGUF file. A GGUF file becomes a folder, or a GGUF file of another type. A quantised
folder can also become a folder of floats.

The target is written atomically: under a temporary name, read back, then renamed. One tensor is in memory at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llorch.families.llamacpp_limits import cannot_express
from llorch.files import GGUFFile, Weights, open_weights
from llorch.files.export import FILE_TYPES, NO_VOCABULARY, gguf_size, gguf_types, most_frequent_type, write_gguf_content
from llorch.files.export_blocks import Blocks, find_blocks
from llorch.files.export_huggingface import DTYPES, huggingface_config, huggingface_size, write_json, write_safetensors
from llorch.files.hub.reference import name_of
from llorch.files.new_file import new_file, new_folder
from llorch.files.output_paths import (
    CONFIG,
    check_target,
    copy_companions,
    count_tensors,
    read_back,
    reporting_disk_errors,
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

# Metadata keys that a conversion between GGUF files copies, by prefix, except keys that the writer sets itself.
_COPIED_PREFIXES = ("general.", "tokenizer.", "llorch.")
_SET_BY_WRITER = [f"general.{key}" for key in ("architecture", "file_type", "quantization_version", "alignment")]
# Sampling defaults: key in generation_config.json -> key after `general.sampling.` in GGUF files.
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip
_MAX_TOP_K = 2**31 - 1  # INT32 in a GGUF file
_UNREAD_TOKENIZERS = ("tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")  # llorch reads none of them


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Summary of a conversion."""

    source: Path
    target: Path
    ggml_type: GGMLType  # of most elements of the matrices
    n_tensors: int
    n_bytes: int
    fallbacks: list[str]  # matrices in F16, because their rows are no multiple of the block size
    kept: dict[str, str]  # quantised matrices repacked without loss -> type
    decoded: dict[str, str]  # quantised matrices that became floats -> reason
    has_vocabulary: bool
    notes: list[str]  # losses, such as what the target cannot store


@dataclass
class _Job:
    """State of one conversion."""

    weights: Weights
    target: Path
    ggml_type: GGMLType  # of matrices that are not in `blocks.kept`
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
    """Convert between a GGUF file and a Hugging Face folder, or to another type; a target named .gguf is a GGUF file.

    A quantised folder can also become a folder of floats. Type None keeps the type of the matrices if the target can
    store it without loss, else F32 is used. A folder has one type for all tensors, also for norms and biases. A
    quantised matrix is repacked for a GGUF file if a ggml type represents it exactly. Raises FileExistsError for an
    existing target (`force` replaces a file, or a folder with only a model's files), UserError for a type that the
    format lacks or if the target is the source, FormatError for a model that the target cannot represent. An error
    leaves no new target.
    """
    source, target = Path(source), Path(target)
    if source.is_dir() and target.suffix != ".gguf" and not _is_quantised_folder(source):
        raise UserError(f"{target}: expected a target that ends in .gguf, because the source is a Hugging Face folder")
    check_target(source, target=target, force=force)
    weights = open_weights(source)
    with closing(weights.source):
        return write_model(weights, target, ggml_type=ggml_type, report=report)


def write_model(
    weights: Weights, target: Path, *, ggml_type: GGMLType | None = None, report: Callable[[str], None]
) -> Conversion:
    """Write an open model, with tokenizer and chat template of its source, to a checked target path."""
    to_gguf = target.suffix == ".gguf"
    blocks = find_blocks(weights) if to_gguf and ggml_type is None else Blocks()
    job = _Job(weights, target, choose_type(weights, ggml_type, to_gguf=to_gguf), report, blocks)
    job.notes += weights.notes_on_left_out("not written")
    _note_second_rounding(job)
    write_folder = _write_folder_from_gguf if isinstance(weights.source, GGUFFile) else _write_decoded_folder
    has_vocabulary = (_write_gguf if to_gguf else write_folder)(job)
    types = gguf_types(weights.config, job.ggml_type, blocks.kept) if to_gguf else {}
    shapes = {name: weight.shape for name, weight in inventory(weights.config).items()}
    block_size = BLOCK_SIZES[job.ggml_type][0]
    return Conversion(
        source=weights.path,
        target=target,
        ggml_type=most_frequent_type(weights.config, job.ggml_type, blocks.kept),
        n_tensors=len(shapes),
        n_bytes=size_of(target),
        fallbacks=[name for name, kind in types.items() if kind is GGMLType.F16 and shapes[name][-1] % block_size],
        kept={name: kind.name for name, kind in blocks.kept.items()},
        decoded=blocks.decoded,
        has_vocabulary=has_vocabulary,
        notes=job.notes,
    )


def choose_type(weights: Weights, requested: GGMLType | None, *, to_gguf: bool) -> GGMLType:
    """Choose the type of matrices: `requested` (else UserError), or the source's if the target can store it, or F32."""
    allowed: Mapping[GGMLType, object] = FILE_TYPES if to_gguf else DTYPES
    if requested is None:
        types = _stored_types(weights)
        stored_type = types.pop() if len(types) == 1 else GGMLType.F32
        if not isinstance(stored_type, GGMLType) or stored_type not in allowed:
            return GGMLType.F32
        return stored_type if to_gguf or _represents_vectors(weights, stored_type) else GGMLType.F32
    if requested not in allowed:
        targets = "GGUF files" if to_gguf else "Hugging Face folders"
        allowed_names = ", ".join(allowed_type.name for allowed_type in allowed)
        raise UserError(f"type: expected one of {allowed_names} for {targets}, got {requested.name}")
    return requested


def _represents_vectors(weights: Weights, float_type: GGMLType) -> bool:
    """Check if a folder of this type represents norms and biases exactly, which GGUF files store as F32."""
    for name, weight in inventory(weights.config).items():
        if not weight.stays_f32:
            continue
        array = np.empty(weight.shape, np.float32)  # as the folder stores the weight: for some families norm - 1
        Layout(form=weight.in_huggingface.form).put(weights.array(name), array)
        if np.abs(array).max() > LARGEST[float_type]:
            return False
        raw = np.concatenate([*encode(array, float_type, name=name, path=Path(weights.path))])
        if not np.array_equal(decode(raw, float_type, array.shape), array):
            return False
    return True


def _stored_types(weights: Weights) -> set[StoredType]:
    """Return the stored types of the matrices, without tensors that GGUF files store as F32."""
    matrices = (weight for weight in inventory(weights.config).values() if not weight.stays_f32)
    return {weights.stored_type(weight.name) for weight in matrices}


def _note_second_rounding(job: _Job) -> None:
    """Add a note if already quantised values are rounded again."""
    quantised = {kind for kind in _stored_types(job.weights) if has_codes(kind)}
    if quantised - {job.ggml_type} and job.ggml_type is not GGMLType.F32:
        names = ", ".join(sorted(kind.name for kind in quantised))
        job.notes.append(f"the source is already quantised ({names}); {job.ggml_type.name} adds a second rounding")


def _write_gguf(job: _Job) -> bool:
    """Write a model as a GGUF file; return True if it has a tokenizer."""
    weights, source = job.weights, job.weights.source
    if reason := cannot_express(weights.config):
        message = f"cannot convert to GGUF, llama.cpp would compute another model: {reason}"
        raise FormatError("Unsupported", message, path=weights.path)
    if isinstance(source, GGUFFile):
        metadata: dict[str, object] = {key: value for key, value in source.metadata.items() if _is_copied(key)}
    else:
        job.report("tokenizer")
        folder = Path(weights.path)
        metadata = {"general.name": name_of(folder.resolve())} | _sampling_metadata(folder) | _tokenizer_metadata(job)
    if not (has_vocabulary := "tokenizer.ggml.tokens" in metadata):
        metadata |= NO_VOCABULARY
    kept, on_tensor = job.blocks.kept, count_tensors(weights, job.report)
    n_bytes = gguf_size(weights.config, job.ggml_type, kept)
    with reporting_disk_errors(job.target, n_bytes), new_file(job.target) as temporary:
        write_gguf_content(
            weights, temporary, ggml_type=job.ggml_type, metadata=metadata, kept=kept, on_tensor=on_tensor
        )
        read_back(temporary, weights, job.target)
    return has_vocabulary


def _is_copied(key: str) -> bool:
    return key.startswith(_COPIED_PREFIXES) and key not in _SET_BY_WRITER


def _tokenizer_metadata(job: _Job) -> dict[str, object]:
    folder = Path(job.weights.path)
    if not (folder / "tokenizer.json").is_file():
        unread_files = [name for name in _UNREAD_TOKENIZERS if (folder / name).exists()]
        if unread_files:
            message = f"expected tokenizer.json, got {unread_files[0]}"
            remedy = "save the tokenizer with transformers as tokenizer.json"
            raise FormatError("Missing", f"{message}; {remedy}", path=folder)
        job.notes.append("the folder has no tokenizer.json, so the GGUF file has no vocabulary")
        return {}
    tokenizer = read_tokenizer(folder, job.weights.config.vocab_size)
    job.notes += tokenizer.notes
    return tokenizer.metadata


def _sampling_metadata(folder: Path) -> dict[str, object]:
    """Return the sampling defaults of a folder as GGUF metadata, {} for greedy decoding."""
    path = folder / "generation_config.json"
    values = Fields(read_settings(path), path)
    if not values.boolean("do_sample", default=False):
        return {}
    return {f"general.sampling.{_SAMPLING[key]}": value for key, value in _read_sampling(values, {}).items()}


def _read_sampling(values: Fields, names: Mapping[str, str]) -> dict[str, float]:
    """Read the sampling defaults and check their ranges; `names` maps settings to keys of `values`."""
    defaults: dict[str, float] = {}
    for key in _SAMPLING:
        name = names.get(key, key)
        if not values.has(name):
            continue
        defaults[key] = values.integer(name) if key == "top_k" else values.number(name)
        if key == "top_k" and defaults[key] > _MAX_TOP_K:
            raise values.error("OutOfRange", name, f"at most {_MAX_TOP_K}", defaults[key])
        try:
            SamplingSettings(**{key: defaults[key]})  # type: ignore[arg-type] (`key` is no literal); raises if out of range
        except ValueError as error:
            raise FormatError("OutOfRange", f"{name}: {error}", path=values.path) from None
    return defaults


def _is_quantised_folder(folder: Path) -> bool:
    """Check if a folder is quantised, so that it can be converted to a folder of floats."""
    path = folder / CONFIG
    return path.is_file() and is_quantised(read_settings(path), folder)


def _write_decoded_folder(job: _Job) -> bool:
    """Write a quantised folder as a folder of floats; return True if it has a tokenizer."""
    source, dtype = Path(job.weights.path), DTYPES[job.ggml_type]
    with new_model_folder(job.weights, job.target, job.ggml_type, job.report, source=source) as folder:
        values = without_quantisation(read_settings(source / CONFIG))
        write_json(folder / CONFIG, values | {key: dtype for key in ("dtype", "torch_dtype") if key in values})
    return (source / "tokenizer.json").is_file()


@contextmanager
def new_model_folder(
    weights: Weights, target: Path, ggml_type: GGMLType, report: Callable[[str], None], *, source: Path | None = None
) -> Iterator[Path]:
    """Write tensors; copy settings and tokenizer of `source`; the body adds other files; then read the folder back."""
    with reporting_disk_errors(target, huggingface_size(weights.config, ggml_type)), new_folder(target) as folder:
        if source is not None:
            copy_companions(source, folder)
        write_safetensors(weights, folder, ggml_type=ggml_type, on_tensor=count_tensors(weights, report))
        yield folder
        read_back(folder, weights, target)


def _write_folder_from_gguf(job: _Job) -> bool:
    """Write a GGUF file as a Hugging Face folder; return True if it has a tokenizer."""
    weights, source = job.weights, job.weights.source
    assert isinstance(source, GGUFFile)
    if (family := written_family(weights.config)) != weights.config.family:
        job.notes.append(f"the text part of {weights.config.family} is written as a {family} model")
    config = huggingface_config(weights.config, job.ggml_type, path=source.path)
    vocabulary = GGUFVocabulary(source.metadata, source.path) if "tokenizer.ggml.tokens" in source.metadata else None
    if vocabulary is None:
        job.notes.append("the file has no vocabulary, so the folder has no tokenizer")
    with new_model_folder(weights, job.target, job.ggml_type, job.report) as folder:
        token_ids = {} if vocabulary is None else _write_tokenizer(job, folder, source, vocabulary)
        write_json(folder / CONFIG, config | token_ids)
    return vocabulary is not None


def _write_tokenizer(job: _Job, folder: Path, source: GGUFFile, vocabulary: GGUFVocabulary) -> dict[str, object]:
    """Write the tokenizer files; return the special token ids by key of config.json."""
    job.report("tokenizer")
    family, context = written_family(job.weights.config), job.weights.config.max_position_embeddings
    tokenizer = translate_vocabulary(source.metadata, vocabulary, source.path, family=family, context=context)
    job.notes += tokenizer.notes
    write_json(folder / "tokenizer.json", tokenizer.tokenizer)
    write_json(folder / "tokenizer_config.json", tokenizer.config)
    eos_ids = tokenizer.eos_token_ids
    ids = {**tokenizer.token_ids, **({"eos_token_id": eos_ids if len(eos_ids) > 1 else eos_ids[0]} if eos_ids else {})}
    names = {key: f"general.sampling.{name}" for key, name in _SAMPLING.items()}
    sampling = _read_sampling(Fields(source.metadata, source.path), names)
    write_json(folder / "generation_config.json", ids | ({"do_sample": True} if sampling else {}) | sampling)
    probe_texts = probes_for(source.metadata)
    require_same_ids(vocabulary, HuggingFaceVocabulary(folder), probe_texts, path=source.path)
    return ids
