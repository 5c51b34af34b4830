"""Run other engines on some of the folders, for goldens of logits.

The float64 runs use `float64_everywhere`: transformers and compressed-tensors name float32 and BF16 in places, and
those casts become float64 too. FP8 and FP4 roundings of activations stay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llorch.engines.transformers_capture import float64_everywhere
from quantised_writers.base import VOCAB
from quantised_writers.dequantise import row_of

TOKENS = [(5 * i + 3) % VOCAB for i in range(24)]
POSITIONS = slice(2, None, 3)  # the rows of logits that are stored
Logits = dict[str, torch.Tensor]  # numerics, as "weights" or "activations": logits [8, vocabulary]


class Engine(NamedTuple):
    """Engine that runs a folder: its function, its packages, and the dtype that it computes in."""

    run: Callable[[Path], Logits]
    packages: tuple[str, ...]
    dtype: str = "float64"


@contextmanager
def loaded(folder: Path, **options: Any) -> Iterator[Any]:
    """Load a folder with transformers in float64, and stay in float64."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad(), torch.compiler.set_stance("force_eager"), float64_everywhere(refuse=False):
        yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()


def logits(model: Any) -> torch.Tensor:
    """Return the stored rows of logits."""
    return model(torch.tensor([TOKENS])).logits[0, POSITIONS].detach()


def compressed(folder: Path) -> Logits:
    """Compute with weights alone, with quantised activations, and with a quantised KV cache if there is one."""
    with loaded(folder) as model:
        quantised = [module for module in model.modules() if hasattr(module, "quantization_scheme")]
        attention = [module for module in quantised if not isinstance(module, torch.nn.Linear)]
        has_activations = any(module.quantization_scheme.input_activations for module in quantised)
        switch(quantised, False)
        by_numerics = {"weights": logits(model)}
        if has_activations:
            switch(quantised, True)
            switch(attention, False)
            by_numerics["activations"] = logits(model)
        if attention:
            switch(attention, True)
            by_numerics["activations and KV cache"] = logits(model)
    return by_numerics


def switch(quantised: list[Any], enabled: bool) -> None:
    """Switch the quantisation of activations on or off."""
    for module in quantised:
        module.quantization_enabled = enabled


def compressed_weights(folder: Path) -> Logits:
    """Compute with weights alone: compressed-tensors cannot split rows narrower than a group of activations."""
    with loaded(folder) as model:
        switch([module for module in model.modules() if hasattr(module, "quantization_scheme")], False)
        return {"weights": logits(model)}


def bitnet(folder: Path) -> Logits:
    """Compute with activations of 8 bits per token, as transformers always does for BitNet."""
    with loaded(folder) as model:
        widen(model, torch.float64)
        return {"activations": logits(model)}


def widen(model: Any, dtype: torch.dtype) -> None:
    """Cast the float weights that the loader left in BF16."""
    for weight in model.parameters():
        if weight.dtype in (torch.bfloat16, torch.float32):
            weight.data = weight.data.to(dtype)


def bitsandbytes(folder: Path) -> Logits:
    """Compute in training mode: in evaluation, bitsandbytes computes in BF16 on this CPU."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    widen(model, torch.float32)
    for module in model.modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            module.weight.quant_state.dtype = torch.float32  # else the weights are rounded to BF16
    with torch.no_grad():
        return {"weights": logits(model.train())}


def torchao(folder: Path) -> Logits:
    """Compute in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return {"weights": logits(model)}


def mlx(folder: Path) -> Logits:
    """Compute with mlx-lm after a cast of everything to float32."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    rows: Any = model(mx.array([TOKENS])).astype(mx.float32)
    return {"weights": torch.tensor(rows.tolist())[0, POSITIONS]}


def dense(folder: Path) -> Logits:
    """Compute in float64 with transformers' float model and the weights of the independent dequantiser."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    row = row_of(folder.name)
    config = AutoConfig.from_pretrained(folder)
    delattr(config, "quantization_config")
    tensors = load_file(folder / "model.safetensors") | row.run(folder)
    with torch.no_grad(), float64_everywhere(refuse=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        state = {name: tensors[name].double() for name in model.state_dict() if name in tensors}
        model.load_state_dict(state)
        return {"weights": logits(model.eval())}


GPTQ = Engine(dense, ("transformers", "gptqmodel"))
COMPRESSED = Engine(compressed, ("transformers", "compressed-tensors==0.20.0"))
BITNET = Engine(bitnet, ("transformers",))
MLX = Engine(mlx, ("mlx-lm", "mlx"), "float32")
ENGINES: dict[str, Engine] = {
    "gptq-4bit-act-order": GPTQ,
    "gptq-4bit-asym": GPTQ,
    "gptq-4bit-qwen2": GPTQ,
    "awq-gemm": Engine(dense, ("transformers", "autoawq")),
    "fp8-block-partial": Engine(dense, ("transformers", "llama.cpp")),
    "ct-w4a16": COMPRESSED,
    "ct-w3a16": COMPRESSED,
    "ct-w8a8": COMPRESSED,
    "ct-fp8-static-kv": COMPRESSED,
    "ct-fp8-dynamic": COMPRESSED,
    "ct-fp8-block": COMPRESSED._replace(run=compressed_weights),
    "ct-fp8-block-wide": COMPRESSED,
    "ct-nvfp4": COMPRESSED,
    "ct-mxfp4": COMPRESSED,
    "ct-mxfp8": COMPRESSED,
    "ct-mixed": COMPRESSED,
    "bnb-nf4-double": Engine(bitsandbytes, ("transformers", "bitsandbytes"), "float32"),
    "bitnet-autobitlinear": BITNET,
    "bitnet-bitlinear": BITNET,
    "mlx-4bit": MLX,
    "mlx-3bit": MLX,
    "mlx-4bit-g64-overrides": MLX,
    "mlx-4bit-experts": MLX,
    "mlx-mxfp4": MLX,
    "mlx-nvfp4": MLX,
    "mlx-mxfp8": MLX,
    "torchao-int8": Engine(torchao, ("transformers", "torchao"), "float32"),
}
