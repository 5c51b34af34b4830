"""IBM's Foundation Model Stack: `get_model` finds class and settings in the folder; hooks record block outputs."""
# pyright: basic, reportMissingImports=false

from typing import Any

import torch
from fms.models import get_model
from harness import HarnessRun, answer


def load(run: HarnessRun) -> Any:
    """Load the model, in evaluation mode."""
    if len(run.parts) > 1:
        raise NotImplementedError("this adapter does not continue a prompt")
    dtype = getattr(torch, run.options.get("dtype", "float32"))
    try:
        return get_model("hf_pretrained", variant=run.model, data_type=dtype).eval()
    except KeyError as error:
        if "must map to" not in str(error):
            raise
        raise NotImplementedError(error.args[0]) from None  # fms reports unsupported architectures by a KeyError


def compute(model: Any, run: HarnessRun, dump: Any) -> None:
    """Run the pass of a run and add its stages to the dump."""
    ids, first_position = run.passes[0]
    dump.begin(ids, first_position)

    def show(layer: int, output: Any) -> None:
        dump.add("block_out", (output[0] if isinstance(output, tuple) else output)[0].float().numpy(), layer=layer)

    for layer, block in enumerate(model.base_model.layers):
        block.register_forward_hook(lambda _module, _inputs, output, layer=layer: show(layer, output))
    with torch.no_grad():
        output = model(torch.tensor([ids]))
    dump.add("logits", (output[0] if isinstance(output, tuple) else output)[0].float().numpy())


if __name__ == "__main__":
    answer("ibm-fms", load, compute)
