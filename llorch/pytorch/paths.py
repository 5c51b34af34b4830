"""The paths of weights in the torch modules: as in transformers, but experts are one stack and decays are made."""

from llorch.files.tensor_names import LAYER_WEIGHTS, MODEL_WEIGHTS, prefixes_of

_WORDS = {"mlp": "mlp", "router": "gate", "e": ""}
PATHS = {row.name: row.huggingface.format(**_WORDS).replace("..", ".") for row in (*MODEL_WEIGHTS, *LAYER_WEIGHTS)}
PATHS["decay"] = "linear_attn.decay"


def path_of(name: str) -> str:
    """Return the attribute path of a weight, given its canonical name."""
    *layer, short = name.split(".")
    return (prefixes_of(int(layer[1]))[2] if layer else "") + PATHS[short]
