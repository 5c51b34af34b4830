"""Goldens from transformers: the family's own class with eager attention, watched by hooks; in float32, if not told.

A Hugging Face folder is loaded by transformers itself. So are the weights of a GGUF file and the hyperparameters that
its loader knows, so that a number which llorch misreads does not get into the float64 reference. What it does not read
(`head_dim` of Qwen3, a frequency scaling, whether there are biases) it is told by us; tensors of which it does not know
the type are read and decoded by us. The route says both.

In float64 every cast to a narrower dtype is widened, see `float64_everywhere`: this is the float64 reference, by
which others are judged. A model that does not fit the memory has one layer at a time in it, see transformers_streamed.
In bfloat16 and float16 all weights are cast, gains of norms too, as `from_pretrained(dtype=...)` does it; the RoPE
frequencies stay float32, which `model.to(dtype)` would round.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, redirect_stderr
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cached_property, partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import Cache, GenerationConfig, LogitsProcessorList
from transformers.cache_utils import DynamicLayer
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llorch.engines.child import tell
from llorch.engines.interface import OURS, Call, LoadPath, Trace, check_ids, checked_trace, one_by_one
from llorch.engines.transformers_capture import as_array, captured, float64_everywhere
from llorch.engines.transformers_streamed import (
    FileTensors,
    FolderTensors,
    OurTensors,
    Streamed,
    Tensors,
    named_once,
    without_weights,
)
from llorch.families.config import FactorScaling, LinearScaling, Llama3Scaling, ModelConfig, YarnScaling
from llorch.families.family import Family
from llorch.families.layers import Experts
from llorch.families.rules import BETA
from llorch.families.table import FAMILIES
from llorch.files import Weights, open_weights
from llorch.files.export_huggingface import bias_settings, delta_net_settings
from llorch.files.layerwise import fits
from llorch.files.quantised import QuantisedFolder
from llorch.files.tensor_names import count_parameters, written_family
from llorch.ops.numerics import DtypeName
from llorch.ops.sampling import SamplingSettings
from llorch.runtime.threads import limited, n_threads_for
from llorch.stages.comparison import Difference, distance
from llorch.stages.table import ATTENTION, key, keys


def _classes_of(family: Family) -> tuple[Any, Any]:
    """Return the classes of a configuration and a model; of the whole where the text part has none."""
    stem, alone = family.classes, family.written_as is None
    config = f"{stem}TextConfig" if family.multimodal_type and alone else f"{stem}Config"
    model = f"{stem}ForCausalLM" if alone else f"{stem}ForConditionalGeneration"
    return getattr(transformers, config), getattr(transformers, model)


CLASSES: dict[str, tuple[Any, Any]] = {name: _classes_of(family) for name, family in FAMILIES.items()}
AS_CONFIG = "as config.json says"
DIVIDED = "inv_freq divided by rope_freqs.weight of the file"
ROPE_TYPES = {LinearScaling: "linear", YarnScaling: "yarn", Llama3Scaling: "llama3"}  # transformers' names
# What the converter of llama.cpp turned into rope_freqs.weight: Llama 3.1, Llama 3.2.
PUBLISHED_LLAMA3 = tuple(
    Llama3Scaling(factor=f, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    for f in (8.0, 32.0)
)


class Transformers:
    """The reference engine `transformers`; a context manager for symmetry with the other one."""

    name = "transformers"

    def __init__(
        self,
        path: str | Path,
        *,
        n_threads: int | None = None,
        dtype: DtypeName = "float32",
        streamed: bool | None = None,
    ) -> None:
        """Load a model, `streamed` with one layer at a time in memory; its threads are the process's until `close`."""
        self.path, self.dtype = Path(path), dtype
        weights = open_weights(self.path)
        if not self.path.is_dir():  # a file has no eyes, and transformers no class for the text of a model that has
            weights.config = replace(weights.config, family=written_family(weights.config))
        self.config = weights.config
        self.n_threads = n_threads or n_threads_for(count_parameters(self.config))
        self._streamed: Streamed | None = None
        with ExitStack() as resources, _quiet(), _refusals(), self._arithmetic(refuse=False):
            resources.enter_context(limited(self.n_threads))
            resources.enter_context(closing(weights.source))
            if not fits(weights, dtype) if streamed is None else streamed:
                model, tensors, self.rope, self.load_path = _model_without_weights(weights, dtype)
                self._streamed = Streamed(model, tensors, getattr(torch, dtype), self.n_threads, tell)
                resources.callback(self._streamed.close)
            else:
                model, self.rope, self.load_path = _model_with_weights(weights, dtype)
            self._resources = resources.pop_all()
        model.generation_config = GenerationConfig()  # not the folder's end tokens, penalties and sampling
        if self.config.experts is not None:  # expert by expert, which shows what each of them makes
            model.set_experts_implementation("eager")
        self._loaded = model.eval()

    def __enter__(self) -> "Transformers":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the model."""
        self._resources.close()
        self._loaded = None

    @property
    def _model(self) -> Any:
        if self._loaded is None:
            raise ValueError("transformers: the engine is closed")
        return self._loaded

    def _arithmetic(self, *, refuse: bool = True) -> AbstractContextManager[None]:
        """Return the context in which models are made and run."""
        return float64_everywhere(refuse=refuse) if self.dtype == "float64" else nullcontext()

    def trace(self, ids: Sequence[int], *, first_position: int = 0) -> Trace:
        """Run the tokens from an empty cache and return every stage of the model's family."""
        with captured(self._model, self.config) as stages:
            self.logits(ids, first_position=first_position)
        dtype = np.float64 if self.dtype == "float64" else np.float32
        return checked_trace(stages, self.config, len(ids), self.name, dtype)

    def isolated(
        self, ids: Sequence[int], golden: Mapping[str, np.ndarray], *, first_position: int = 0
    ) -> dict[str, Difference]:
        """Measure the error of each stage of a trace against this engine's output for the trace's own inputs.

        `l0.attention` stands for the context of a layer, made without its scores and probabilities.
        """
        rows = {name: (golden[name], stage) for name, stage, _ in keys(self.config)}
        for layer in range(self.config.n_layers):
            if key("attn_context", layer) in rows:
                rows[key(ATTENTION, layer)] = rows[key("attn_context", layer)]

        def note(name: str, true: np.ndarray) -> Difference:
            array, stage = rows[name]
            return distance(array, true, stage)

        with captured(self._model, self.config, golden, note) as found:
            self.logits(ids, first_position=first_position)
        if missing := rows.keys() - found.keys():
            raise RuntimeError(f"{self.name}: the captured stages are not the expected stages: no {sorted(missing)}")
        return found

    @torch.no_grad()
    def logits(self, ids: Sequence[int], *, first_position: int = 0) -> np.ndarray:
        """Return the logits of every token from a run without capture, bit-identical to the logits of `trace`."""
        positions = torch.arange(first_position, first_position + len(ids))[None]
        # Llama 4 counts positions by its cache: far on it is given one that has dropped what came before.
        counts_by_cache = "counts_by_cache" in FAMILIES[self.config.family].transformers.habits
        layers = [_LayerFrom(first_position) for _ in range(self.config.n_layers)] if counts_by_cache else None
        cache = None if layers is None else Cache(layers=layers)
        with self._arithmetic():
            shown = self._model(self._ids(ids), position_ids=positions, use_cache=True, past_key_values=cache)
        return as_array(shown.logits[0])

    @torch.no_grad()
    def selected_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the logits of the last token, the only ones computed, as in `generate`."""
        with self._arithmetic():
            return as_array(self._model(self._ids(ids), logits_to_keep=1).logits[0, 0])

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """Continue by `n` tokens with transformers' `generate` and its cache; end tokens do not stop it."""
        return self.continued(ids, n)[0]

    @torch.no_grad()
    def continued(self, ids: Sequence[int], n: int) -> tuple[list[int], np.ndarray]:
        """Generate the tokens of `greedy`, and return them with the logits that each token was chosen by."""
        prompt = self._ids(ids)
        with self._arithmetic():
            out = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=n, pad_token_id=0,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            return out.sequences[0, len(ids) :].tolist(), as_array(torch.cat(out.logits))

    def call_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Answer each of the calls; a streamed model reads every layer once for all of them."""
        if self._streamed is None:
            return one_by_one(self, calls)
        jobs = [partial(getattr(self, method), *args, **kwargs) for method, args, kwargs in calls]
        n_passes = max((args[1] for method, args, _ in calls if method in ("greedy", "continued")), default=1)
        with self._arithmetic():  # of this thread, and the default dtype, which all threads have in common
            return self._streamed.call_batch(jobs, n_passes=n_passes)

    def probabilities(self, logits: np.ndarray, settings: SamplingSettings, history: Sequence[int]) -> np.ndarray:
        """Compute the distribution that transformers draws from after its logits processors.

        Removed tokens get 0. Temperature 0 means the argmax of `generate`.
        """
        scores = torch.tensor(logits, dtype=torch.float64 if self.dtype == "float64" else torch.float32)[None]
        with self._arithmetic():
            scores = _processors(settings, history)(torch.LongTensor([list(history)]), scores)
            if settings.temperature == 0:
                return as_array(nn.functional.one_hot(scores[0].argmax(), scores.shape[-1]))
            return as_array(nn.functional.softmax(scores[0], dim=-1))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int] | None:
        """Return the token ids of the folder's tokenizer; None without a `tokenizer.json`."""
        if self._tokenizer is None:
            return None
        out = self._tokenizer(text, add_special_tokens=add_special, split_special_tokens=not parse_special)
        return out["input_ids"]

    @cached_property
    def _tokenizer(self) -> Any:
        if not (self.path / "tokenizer.json").is_file():
            return None
        with _quiet():
            return transformers.AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)

    def provenance(self) -> dict[str, object]:
        """Return the facts about a golden's origin that the golden must state."""
        return {
            "producer": self.name,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkl": torch.backends.mkl.is_available(),
            "n_threads": self.n_threads,
            "knobs": {"dtype": self.dtype, "attn_implementation": "eager", "device": "cpu", "rope": self.rope}
            | ({"weights": "one layer at a time"} if self._streamed else {}),
            "route": self.load_path.stored(),
        }

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        check_ids(ids, self.config)
        return torch.tensor([list(ids)])


class _LayerFrom(DynamicLayer):
    """The cache of a layer that begins at a position, as one of a window does that was filled."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def get_seq_length(self) -> int:
        """Return the next position, tokens before the first one included."""
        return self._first + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys, and the position of the first of them."""
        return super().get_seq_length() + query_length, self._first


def _model_with_weights(weights: Weights, dtype: DtypeName) -> tuple[Any, str, LoadPath]:
    """Load the whole model. Return it with a note on its RoPE, and the load path."""
    path = Path(weights.path)
    if isinstance(weights.source, QuantisedFolder):
        return _model_of_codes(weights, dtype), AS_CONFIG, LoadPath(OURS, OURS)
    if path.is_dir():
        return _model_of_folder(path, weights.config, dtype), AS_CONFIG, LoadPath("transformers", "transformers")
    return _model_of_file(weights, dtype)


def _model_of_folder(path: Path, config: ModelConfig, dtype: DtypeName) -> Any:
    model, report = _from_pretrained(CLASSES[config.family][1], path, dtype, use_safetensors=True)
    faults = {kind: names for kind, names in report.items() if names}
    if faults:
        raise RuntimeError(f"transformers: the tensors of {path} do not match the model: {faults}")
    return model


def _from_pretrained(model_class: Any, path: Path, dtype: DtypeName, **settings: object) -> tuple[Any, dict]:
    """Load a model by transformers' own loader. Return it with the loader's report."""
    settings |= {"local_files_only": True, "dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    return model_class.from_pretrained(path, output_loading_info=True, **settings)


def _config_of_folder(path: Path, config_class: Any) -> Any:
    """Load the engine's configuration without the settings of a quantised folder, because the model holds floats."""
    config = config_class.from_pretrained(path, local_files_only=True)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def _model_of_codes(weights: Weights, dtype: DtypeName) -> Any:
    """Build the model of a quantised folder in floats, as llorch's readers decode it."""
    config_class, model_class = CLASSES[weights.config.family]
    config = _config_of_folder(Path(weights.path), config_class)
    config._attn_implementation = "eager"
    return _filled(model_class, config, weights, dtype)


def _filled(model_class: Any, config: Any, weights: Weights, dtype: DtypeName) -> Any:
    """Build a model of the numbers that llorch's readers decode."""
    with no_init_weights():
        model = model_class(config)
    model.tie_weights()  # or the output matrix would be asked for, too
    ours = OurTensors(weights, getattr(torch, dtype))
    model.load_state_dict({name: ours.read(name) for name in named_once(model)}, strict=False, assign=True)
    model.tie_weights()
    return model


def _model_without_weights(weights: Weights, dtype: DtypeName) -> tuple[Any, Tensors, str, LoadPath]:
    """Build a model without weights.

    Return it with the reader of its weights, a note on its RoPE, and the load path.
    """
    path, precision = Path(weights.path), getattr(torch, dtype)
    config_class, model_class = CLASSES[weights.config.family]
    if path.is_dir():
        model = without_weights(model_class, _config_of_folder(path, config_class), precision)
        if isinstance(weights.source, QuantisedFolder):
            return model, OurTensors(weights, precision), AS_CONFIG, LoadPath(OURS, OURS)
        return model, FolderTensors(path, precision), AS_CONFIG, LoadPath("transformers", "safetensors")
    theirs = _as_transformers_understands(path)
    engine_config, note, told = _config_of_file(weights.config, theirs, dtype)
    model, load_path = without_weights(model_class, engine_config, precision), LoadPath("transformers", "gguf")
    if note == DIVIDED:
        _divide_frequencies(model, weights.config)
    try:
        tensors: Tensors = FileTensors(path, model, theirs, precision)
    except (ImportError, LookupError, NotImplementedError, ValueError):
        tensors, load_path = OurTensors(weights, precision), LoadPath(OURS, OURS)
    return model, tensors, note, replace(load_path, set_by_llorch=tuple(told))


def _model_of_file(weights: Weights, dtype: DtypeName) -> tuple[Any, str, LoadPath]:
    """Load the model of a GGUF file. Return it with a note on its RoPE, and the load path."""
    path, (_, model_class) = Path(weights.path), CLASSES[weights.config.family]
    engine_config, note, told = _config_of_file(weights.config, _as_transformers_understands(path), dtype)
    model, reader = None, OURS
    if not (dtype == "float64" and weights.config.delta_net):  # gains and decays would be rounded on the way
        model, reader = _as_transformers_reads(path, model_class, deepcopy(engine_config), dtype), "transformers"
    if model is None:
        model, reader = _filled(model_class, engine_config, weights, dtype), OURS
    if note == DIVIDED:
        _divide_frequencies(model, weights.config)
    return model, note, LoadPath(reader, reader, set_by_llorch=tuple(told))


def _config_of_file(config: ModelConfig, theirs: dict[str, Any], dtype: DtypeName) -> tuple[Any, str, list[str]]:
    """Build the engine's configuration.

    Return it with a note on its RoPE, and the names of the settings that transformers did not understand in the file.
    llorch gives those settings to the engine.
    """
    rope, note = _rope_parameters(config, dtype)
    ours = _expected_config(config) | {"rope_parameters": rope | {k: theirs[k] for k in ("rope_theta",) if k in theirs}}
    theirs = {name: value for name, value in theirs.items() if name in ours or name == "rope_theta"}
    config_class, _ = CLASSES[config.family]
    alone = config_class(**theirs)
    alone.head_dim = getattr(alone, "head_dim", None) or alone.hidden_size // alone.num_attention_heads  # as qwen2 does
    told = {name: value for name, value in ours.items() if name not in theirs and value != getattr(alone, name, None)}
    divided = ["inv_freq"] if note == DIVIDED else []
    names = [*told, *divided] if theirs else ["hyperparameters"]
    return config_class(attn_implementation="eager", **theirs | told), note, names


def _expected_config(config: ModelConfig) -> dict[str, Any]:
    """Translate llorch's hyperparameters to transformers' names."""
    family = FAMILIES[config.family]
    return (
        bias_settings(config, family)
        | _experts_settings(config.experts)
        | delta_net_settings(config)
        | {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.rms_norm_eps,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "tie_word_embeddings": config.tie_word_embeddings,
        }
        | {**family.transformers.engine_settings(config)}
    )


def _experts_settings(experts: Experts | None) -> dict[str, Any]:
    """Return the settings of a transformers config that describe the experts of a model; empty for a dense one."""
    if experts is None or experts.scaled_inputs:
        return {}
    shared = {"shared_expert_intermediate_size": experts.shared_size} if experts.shared_size else {}
    return shared | {
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.n_experts_per_token,
        "moe_intermediate_size": experts.expert_size,
        "norm_topk_prob": experts.norm_topk_prob,
    }


def _as_transformers_understands(path: Path) -> dict[str, Any]:
    """Read the hyperparameters that transformers' own reader finds in a GGUF file; none if the reader fails."""
    try:
        return load_gguf_checkpoint(str(path), return_tensors=False)["config"]
    except (ImportError, NotImplementedError, RuntimeError, ValueError):
        return {}


def _as_transformers_reads(path: Path, model_class: Any, engine_config: Any, dtype: DtypeName) -> Any:
    """Load the model by transformers' own GGUF loader; None if the loader cannot.

    The loader fails on types that it does not decode, and on biases of which the file has only a part.
    """
    try:
        with redirect_stderr(StringIO()):  # its progress bar has no switch
            settings = {"gguf_file": path.name, "config": engine_config}
            model, report = _from_pretrained(model_class, path.parent, dtype, **settings)
    except (ImportError, NotImplementedError, RuntimeError, ValueError):
        return None
    return None if any(report.values()) else model


def _rope_parameters(config: ModelConfig, dtype: DtypeName) -> tuple[dict[str, object], str]:
    """Build the RoPE settings for transformers, and a note on them for the provenance.

    The divisors of a file are float32. In float64 they do not equal the divisors that the published settings give, to
    1e-8.
    """
    theta: dict[str, object] = {"rope_theta": config.rope_theta}
    if BETA in FAMILIES[config.family].rope_defaults:
        theta[BETA] = 0.0 if config.temperature is None else config.temperature.scale
    if config.delta_net is not None:
        theta["partial_rotary_factor"] = config.rotated / config.head_dim
    if FAMILIES[config.family].sections:  # of a position in a text all three are the same
        theta["mrope_section"] = [config.rotated // 2, 0, 0]
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default"} | theta, "default"
    if not isinstance(scaling, FactorScaling):
        rope_type = ROPE_TYPES[type(scaling)]
        return {"rope_type": rope_type} | asdict(scaling) | theta, rope_type
    for published in PUBLISHED_LLAMA3 if dtype != "float64" else ():
        rope = {"rope_type": "llama3"} | asdict(published) | theta
        if np.allclose(_factors_of(rope, config.head_dim), scaling.factors, rtol=1e-6, atol=0):
            return rope, f"llama3 with factor {published.factor:g}, the divisors of the file"
    return {"rope_type": "default"} | theta, DIVIDED


def _factors_of(rope: dict[str, object], head_dim: int) -> np.ndarray:
    """Compute the divisors that transformers' own llama3 scaling means."""
    probe = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](probe)
    return (rotary.compute_default_rope_parameters(probe)[0] / scaled).numpy()


def _divide_frequencies(model: Any, config: ModelConfig) -> None:
    """Bring a file's own divisors in, which no rope_type of transformers can express."""
    assert isinstance(config.rope_scaling, FactorScaling)
    frequencies = model.model.rotary_emb.inv_freq
    frequencies /= torch.tensor(config.rope_scaling.factors, dtype=frequencies.dtype)


def _processors(settings: SamplingSettings, history: Sequence[int]) -> LogitsProcessorList:
    """List transformers' logits processors for the settings; greedy decoding has only the penalty."""
    processors = LogitsProcessorList()
    if settings.repetition_penalty != 1 and history:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.temperature == 0:
        return processors
    if settings.temperature != 1:
        processors.append(transformers.TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        processors.append(transformers.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(settings.top_p))
    if settings.min_p > 0:
        processors.append(transformers.MinPLogitsWarper(settings.min_p))
    return processors


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise RuntimeError for a configuration that transformers refuses.

    Some models of llama.cpp have no configuration here: hidden_size must be a multiple of the number of heads.
    """
    try:
        yield
    except StrictDataclassError as error:
        raise RuntimeError(f"transformers refuses the configuration: {error.__cause__ or error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal while a model loads."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
