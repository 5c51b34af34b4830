"""Reference engine transformers: its class for the model, with eager attention, hooks, and float32 by default.

transformers loads Hugging Face folders itself. It also loads the weights of GGUF files and the hyperparameters that its
GGUF loader knows. So numbers that llorch misreads cannot get into the float64 reference. llorch supplies
hyperparameters that this loader does not read (`head_dim` of Qwen3, RoPE scaling, whether there are biases), and
decodes tensors of types that it does not know. The `LoadPath` (see interface) records both.

In float64, the float64 reference, `float64_everywhere` replaces every cast to a narrower dtype by float64. If a
model does not fit into memory, it is streamed layer by layer, see transformers_streamed. In bfloat16 and float16, all
weights are cast, including norm gains, as in `from_pretrained(dtype=...)`. The RoPE frequencies stay float32;
`model.to(dtype)` would round them.
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
from llorch.engines.interface import OURS, Call, LoadPath, Trace, call_each, check_ids, checked_trace
from llorch.engines.transformers_capture import as_array, captured, float64_everywhere
from llorch.engines.transformers_streamed import (
    FileTensors,
    FolderTensors,
    LlorchTensors,
    Streamed,
    Tensors,
    parameter_names,
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
from llorch.runtime.threads import limit_threads, n_threads_for
from llorch.stages.comparison import Difference, distance
from llorch.stages.table import ATTENTION, key, keys


def _family_classes(family: Family) -> tuple[Any, Any]:
    """Return the configuration and model class of a family: the text model's, or else the multimodal model's."""
    stem, is_text_only = family.classes, family.written_as is None
    config = f"{stem}TextConfig" if family.multimodal_type and is_text_only else f"{stem}Config"
    model = f"{stem}ForCausalLM" if is_text_only else f"{stem}ForConditionalGeneration"
    return getattr(transformers, config), getattr(transformers, model)


CLASSES: dict[str, tuple[Any, Any]] = {name: _family_classes(family) for name, family in FAMILIES.items()}
AS_CONFIG = "as config.json says"  # notes on RoPE for the provenance
DIVIDED = "inv_freq divided by rope_freqs.weight of the file"
ROPE_TYPES = {LinearScaling: "linear", YarnScaling: "yarn", Llama3Scaling: "llama3"}  # transformers' names
# RoPE scalings of Llama 3.1 and 3.2, which llama.cpp's converter stores as rope_freqs.weight.
PUBLISHED_LLAMA3 = tuple(
    Llama3Scaling(factor=f, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    for f in (8.0, 32.0)
)


class Transformers:
    """The reference engine `transformers`; a context manager that frees the model."""

    name = "transformers"

    def __init__(
        self,
        path: str | Path,
        *,
        n_threads: int | None = None,
        dtype: DtypeName = "float32",
        streamed: bool | None = None,
    ) -> None:
        """Load or stream a model, see `open_engine` for arguments; set the process's thread number until `close`."""
        self.path, self.dtype = Path(path), dtype
        weights = open_weights(self.path)
        if not self.path.is_dir():  # a GGUF file has only the text model: use the family of the text model's class
            weights.config = replace(weights.config, family=written_family(weights.config))
        self.config = weights.config
        self.n_threads = n_threads or n_threads_for(count_parameters(self.config))
        self._streamed: Streamed | None = None
        with ExitStack() as resources, _quiet(), _wrap_rejections(), self._arithmetic(refuse=False):
            resources.enter_context(limit_threads(self.n_threads))
            resources.enter_context(closing(weights.source))
            if not fits(weights, dtype) if streamed is None else streamed:
                model, tensors, self.rope, self.load_path = _model_without_weights(weights, dtype)
                self._streamed = Streamed(model, tensors, getattr(torch, dtype), self.n_threads, tell)
                resources.callback(self._streamed.close)
            else:
                model, self.rope, self.load_path = _model_with_weights(weights, dtype)
            self._resources = resources.pop_all()
        model.generation_config = GenerationConfig()  # ignore the folder's EOS, penalties and sampling
        if self.config.experts is not None:  # one expert after the other, so that hooks see each expert's stages
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
        """Return the context in which models are created and run; for `refuse` see `Float64Everywhere`."""
        return float64_everywhere(refuse=refuse) if self.dtype == "float64" else nullcontext()

    def trace(self, ids: Sequence[int], *, first_position: int = 0) -> Trace:
        """Run the tokens from an empty cache; return every stage (named intermediate array, see `stages.table`)."""
        with captured(self._model, self.config) as stages:
            self.logits(ids, first_position=first_position)
        dtype = np.float64 if self.dtype == "float64" else np.float32
        return checked_trace(stages, self.config, len(ids), self.name, dtype)

    def isolated(
        self, ids: Sequence[int], golden: Mapping[str, np.ndarray], *, first_position: int = 0
    ) -> dict[str, Difference]:
        """Measure each stage of the trace `golden`: its distance from this engine's stage for the golden's inputs.

        `l0.attention` is the attention context of layer 0, computed without the golden's scores and probabilities.
        """
        goldens = {name: (golden[name], stage) for name, stage, _ in keys(self.config)}
        for layer in range(self.config.n_layers):
            if key("attn_context", layer) in goldens:
                goldens[key(ATTENTION, layer)] = goldens[key("attn_context", layer)]

        def measure(name: str, reference: np.ndarray) -> Difference:
            array, stage = goldens[name]
            return distance(array, reference, stage)

        with captured(self._model, self.config, golden, measure) as differences:
            self.logits(ids, first_position=first_position)
        if missing := goldens.keys() - differences.keys():
            raise RuntimeError(f"{self.name}: the captured stages are not the expected stages: no {sorted(missing)}")
        return differences

    @torch.no_grad()
    def logits(self, ids: Sequence[int], *, first_position: int = 0) -> np.ndarray:
        """Return the logits of every token from a run without capture, bit-identical to the logits of `trace`."""
        positions = torch.arange(first_position, first_position + len(ids))[None]
        # Llama 4 derives positions from the length of its cache, so a far start needs a cache with dropped tokens.
        counts_by_cache = "counts_by_cache" in FAMILIES[self.config.family].transformers.habits
        layers = [_LayerFrom(first_position) for _ in range(self.config.n_layers)] if counts_by_cache else None
        cache = None if layers is None else Cache(layers=layers)
        with self._arithmetic():
            output = self._model(self._ids(ids), position_ids=positions, use_cache=True, past_key_values=cache)
        return as_array(output.logits[0])

    @torch.no_grad()
    def selected_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the logits of the last token, the only ones computed, as in `generate`."""
        with self._arithmetic():
            return as_array(self._model(self._ids(ids), logits_to_keep=1).logits[0, 0])

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        """Generate `n` tokens with transformers' `generate` and its cache; EOS does not stop it."""
        return self.continued(ids, n)[0]

    @torch.no_grad()
    def continued(self, ids: Sequence[int], n: int) -> tuple[list[int], np.ndarray]:
        """Generate the tokens of `greedy`; return them with the logits of each step."""
        prompt = self._ids(ids)
        with self._arithmetic():
            generated = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=n, pad_token_id=0,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            return generated.sequences[0, len(ids) :].tolist(), as_array(torch.cat(generated.logits))

    def call_batch(self, calls: Sequence[Call]) -> list[Any]:
        """Return the result of each call; a streamed model reads every layer once for all calls."""
        if self._streamed is None:
            return call_each(self, calls)
        jobs = [partial(getattr(self, method), *args, **kwargs) for method, args, kwargs in calls]
        # Each generated token needs a pass: `args` of both methods are (ids, n).
        n_passes = max((args[1] for method, args, _ in calls if method in ("greedy", "continued")), default=1)
        with self._arithmetic():  # also here, because the default dtype is shared by all threads
            return self._streamed.call_batch(jobs, n_passes=n_passes)

    def probabilities(self, logits: np.ndarray, settings: SamplingSettings, history: Sequence[int]) -> np.ndarray:
        """Compute the distribution from which transformers draws after its logits processors.

        Removed tokens get 0. Temperature 0 means the argmax of `generate`.
        """
        scores = torch.tensor(logits, dtype=torch.float64 if self.dtype == "float64" else torch.float32)[None]
        with self._arithmetic():
            scores = _make_processors(settings, history)(torch.LongTensor([list(history)]), scores)
            if settings.temperature == 0:
                return as_array(nn.functional.one_hot(scores[0].argmax(), scores.shape[-1]))
            return as_array(nn.functional.softmax(scores[0], dim=-1))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int] | None:
        """Return the token ids of the folder's tokenizer; None without a `tokenizer.json`."""
        if self._tokenizer is None:
            return None
        encoded = self._tokenizer(text, add_special_tokens=add_special, split_special_tokens=not parse_special)
        return encoded["input_ids"]

    @cached_property
    def _tokenizer(self) -> Any:
        if not (self.path / "tokenizer.json").is_file():
            return None
        with _quiet():
            return transformers.AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)

    def provenance(self) -> dict[str, object]:
        """Return the versions and settings that a golden must record."""
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
    """Cache of a layer that starts at a position, like the cache of a full sliding window."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def get_seq_length(self) -> int:
        """Return the next position, which counts the dropped tokens, too."""
        return self._first + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the position of the first key."""
        return super().get_seq_length() + query_length, self._first


def _model_with_weights(weights: Weights, dtype: DtypeName) -> tuple[Any, str, LoadPath]:
    """Load the whole model; return it with a note on its RoPE and the load path."""
    path = Path(weights.path)
    if isinstance(weights.source, QuantisedFolder):
        return _build_quantised(weights, dtype), AS_CONFIG, LoadPath(OURS, OURS)
    if path.is_dir():
        return _load_folder(path, weights.config, dtype), AS_CONFIG, LoadPath("transformers", "transformers")
    return _load_file(weights, dtype)


def _load_folder(path: Path, config: ModelConfig, dtype: DtypeName) -> Any:
    model, report = _from_pretrained(CLASSES[config.family][1], path, dtype, use_safetensors=True)
    faults = {kind: names for kind, names in report.items() if names}
    if faults:
        raise RuntimeError(f"transformers: the tensors of {path} do not match the model: {faults}")
    return model


def _from_pretrained(model_class: Any, path: Path, dtype: DtypeName, **settings: object) -> tuple[Any, dict]:
    """Load a model with transformers' loader; return it with the loader's report."""
    settings |= {"local_files_only": True, "dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    return model_class.from_pretrained(path, output_loading_info=True, **settings)


def _config_of_folder(path: Path, config_class: Any) -> Any:
    """Load the engine's configuration without quantisation settings, because the model holds floats."""
    config = config_class.from_pretrained(path, local_files_only=True)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def _build_quantised(weights: Weights, dtype: DtypeName) -> Any:
    """Build the float model of a quantised folder with weights that llorch decodes."""
    config_class, model_class = CLASSES[weights.config.family]
    config = _config_of_folder(Path(weights.path), config_class)
    config._attn_implementation = "eager"
    return _build_decoded(model_class, config, weights, dtype)


def _build_decoded(model_class: Any, config: Any, weights: Weights, dtype: DtypeName) -> Any:
    """Build a model with weights that llorch decodes."""
    with no_init_weights():
        model = model_class(config)
    model.tie_weights()  # before the parameters are listed, so that a tied head is not read from the file
    tensors = LlorchTensors(weights, getattr(torch, dtype))
    model.load_state_dict({name: tensors.read(name) for name in parameter_names(model)}, strict=False, assign=True)
    model.tie_weights()
    return model


def _model_without_weights(weights: Weights, dtype: DtypeName) -> tuple[Any, Tensors, str, LoadPath]:
    """Build a model without weights; return it, the reader of its weights, a note on its RoPE, and the load path."""
    path, precision = Path(weights.path), getattr(torch, dtype)
    config_class, model_class = CLASSES[weights.config.family]
    if path.is_dir():
        model = without_weights(model_class, _config_of_folder(path, config_class), precision)
        if isinstance(weights.source, QuantisedFolder):
            return model, LlorchTensors(weights, precision), AS_CONFIG, LoadPath(OURS, OURS)
        return model, FolderTensors(path, precision), AS_CONFIG, LoadPath("transformers", "safetensors")
    file_settings = _read_file_settings(path)
    engine_config, note, supplied = _config_of_file(weights.config, file_settings, dtype)
    model, load_path = without_weights(model_class, engine_config, precision), LoadPath("transformers", "gguf")
    if note == DIVIDED:
        _divide_frequencies(model, weights.config)
    try:
        tensors: Tensors = FileTensors(path, model, file_settings, precision)
    except (ImportError, LookupError, NotImplementedError, ValueError):
        tensors, load_path = LlorchTensors(weights, precision), LoadPath(OURS, OURS)
    return model, tensors, note, replace(load_path, set_by_llorch=tuple(supplied))


def _load_file(weights: Weights, dtype: DtypeName) -> tuple[Any, str, LoadPath]:
    """Load the model of a GGUF file; return it with a note on its RoPE and the load path."""
    path, (_, model_class) = Path(weights.path), CLASSES[weights.config.family]
    engine_config, note, supplied = _config_of_file(weights.config, _read_file_settings(path), dtype)
    model, reader = None, OURS
    if not (dtype == "float64" and weights.config.delta_net):  # transformers would round norm gains and decays
        model, reader = _load_by_transformers(path, model_class, deepcopy(engine_config), dtype), "transformers"
    if model is None:
        model, reader = _build_decoded(model_class, engine_config, weights, dtype), OURS
    if note == DIVIDED:
        _divide_frequencies(model, weights.config)
    return model, note, LoadPath(reader, reader, set_by_llorch=tuple(supplied))


def _config_of_file(config: ModelConfig, loaded: dict[str, Any], dtype: DtypeName) -> tuple[Any, str, list[str]]:
    """Build transformers' configuration from `loaded`, the settings that it read from the file, and llorch's.

    Return it with a note on its RoPE, and the names of the settings that only llorch could read.
    """
    rope, note = _build_rope_parameters(config, dtype)
    needed = _expected_config(config) | {  # the rope_theta that transformers read itself wins
        "rope_parameters": rope | {k: loaded[k] for k in ("rope_theta",) if k in loaded}
    }
    loaded = {name: value for name, value in loaded.items() if name in needed or name == "rope_theta"}
    config_class, _ = CLASSES[config.family]
    probe = config_class(**loaded)
    probe.head_dim = getattr(probe, "head_dim", None) or probe.hidden_size // probe.num_attention_heads  # as qwen2 does
    supplied = {
        name: value for name, value in needed.items() if name not in loaded and value != getattr(probe, name, None)
    }
    divided_names = ["inv_freq"] if note == DIVIDED else []
    names = [*supplied, *divided_names] if loaded else ["hyperparameters"]  # transformers could read none
    return config_class(attn_implementation="eager", **loaded | supplied), note, names


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
    """Return the expert settings of a transformers config; empty for a dense model."""
    if experts is None or experts.scaled_inputs:
        return {}
    shared = {"shared_expert_intermediate_size": experts.shared_size} if experts.shared_size else {}
    return shared | {
        "num_experts": experts.n_experts,
        "num_experts_per_tok": experts.n_experts_per_token,
        "moe_intermediate_size": experts.expert_size,
        "norm_topk_prob": experts.norm_topk_prob,
    }


def _read_file_settings(path: Path) -> dict[str, Any]:
    """Read the hyperparameters of a GGUF file with transformers' reader; empty if the reader fails."""
    try:
        return load_gguf_checkpoint(str(path), return_tensors=False)["config"]
    except (ImportError, NotImplementedError, RuntimeError, ValueError):
        return {}


def _load_by_transformers(path: Path, model_class: Any, engine_config: Any, dtype: DtypeName) -> Any:
    """Load the model with transformers' GGUF loader; None if it fails: unknown types, or only some of the biases."""
    try:
        with redirect_stderr(StringIO()):  # its progress bar has no switch
            settings = {"gguf_file": path.name, "config": engine_config}
            model, report = _from_pretrained(model_class, path.parent, dtype, **settings)
    except (ImportError, NotImplementedError, RuntimeError, ValueError):
        return None
    return None if any(report.values()) else model


def _build_rope_parameters(config: ModelConfig, dtype: DtypeName) -> tuple[dict[str, object], str]:
    """Build the RoPE settings for transformers, and a note on them for the provenance.

    The divisors in a file are float32, 1e-8 from those of the published settings: in float64 too far to replace them.
    """
    theta: dict[str, object] = {"rope_theta": config.rope_theta}
    if BETA in FAMILIES[config.family].rope_defaults:
        theta[BETA] = 0.0 if config.temperature is None else config.temperature.scale
    if config.delta_net is not None:
        theta["partial_rotary_factor"] = config.rotated / config.head_dim
    if FAMILIES[config.family].sections:  # in a text, all three position components are equal
        theta["mrope_section"] = [config.rotated // 2, 0, 0]
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default"} | theta, "default"
    if not isinstance(scaling, FactorScaling):
        rope_type = ROPE_TYPES[type(scaling)]
        return {"rope_type": rope_type} | asdict(scaling) | theta, rope_type
    for published in PUBLISHED_LLAMA3 if dtype != "float64" else ():
        rope = {"rope_type": "llama3"} | asdict(published) | theta
        if np.allclose(_llama3_factors(rope, config.head_dim), scaling.factors, rtol=1e-6, atol=0):
            return rope, f"llama3 with factor {published.factor:g}, the divisors of the file"
    return {"rope_type": "default"} | theta, DIVIDED


def _llama3_factors(rope: dict[str, object], head_dim: int) -> np.ndarray:
    """Compute the frequency divisors of transformers' llama3 scaling."""
    # The context length does not change the divisors; it must be above the 8192 of PUBLISHED_LLAMA3.
    probe = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](probe)
    return (rotary.compute_default_rope_parameters(probe)[0] / scaled).numpy()


def _divide_frequencies(model: Any, config: ModelConfig) -> None:
    """Apply the divisors in a file, which no rope_type of transformers can express."""
    assert isinstance(config.rope_scaling, FactorScaling)
    frequencies = model.model.rotary_emb.inv_freq
    frequencies /= torch.tensor(config.rope_scaling.factors, dtype=frequencies.dtype)


def _make_processors(settings: SamplingSettings, history: Sequence[int]) -> LogitsProcessorList:
    """Build transformers' logits processors for the settings; greedy decoding has only the penalty."""
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
def _wrap_rejections() -> Iterator[None]:
    """Raise RuntimeError for a configuration that transformers rejects.

    Some models that llama.cpp runs are invalid in transformers: hidden_size must be a multiple of the number of heads.
    """
    try:
        yield
    except StrictDataclassError as error:
        raise RuntimeError(f"transformers refuses the configuration: {error.__cause__ or error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings while a model loads."""
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
