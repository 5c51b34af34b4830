"""Findings that one change of an engine's code explains are joined, also where only one type of matrix is wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from faults.wrong_dumps import dump_of

from llorch.diagnosis.diagnose import diagnose
from llorch.diagnosis.replay import Change, LayerSetting
from llorch.diagnosis.search.hypotheses import ChangedWeights
from llorch.files import Weights, open_weights
from llorch.judging.expectations.quantised_models import write_model
from llorch.ops.numerics import QuantMethod
from llorch.stages.stage_ref import Tokens


def with_wrong_decoder(weights: Weights, kind: str) -> Change:
    """Exchange the halves of each 32 columns in the matrices of one type, but for the embedding."""

    def decode(layer: int | None, name: str, weight: Any) -> Any:
        full_name = name if layer is None else f"layers.{layer}.{name}"
        is_matrix = full_name in weights and len(weights.shape(full_name)) == 2 and name != "embed_tokens"
        if not is_matrix or weights.stored_type(full_name).name != kind:
            return weight
        array = weight.dequantize() if isinstance(weight, QuantMethod) else np.asarray(weight)
        return array.reshape(len(array), -1, 2, 16)[:, :, ::-1].reshape(array.shape)

    def change(setting: LayerSetting) -> LayerSetting:
        def layer_weights(layer: int | None) -> ChangedWeights:
            return ChangedWeights(setting.layer_weights(layer), lambda name, weight: decode(layer, name, weight))

        return replace(setting, layer_weights=layer_weights)

    return Change(setting=change)


def test_wrong_decoder_of_one_type_is_one_finding(tmp_path: Path):
    weights = open_weights(write_model("Q4_K_M", tmp_path)).astype(np.float64, keep=True)
    dump = dump_of(weights, [Tokens(tuple(range(5, 17)))], with_wrong_decoder(weights, "Q6_K"))
    (finding,) = diagnose(weights, dump).findings
    assert {key.rpartition(".")[2] for _, key in finding.places} == {"v_proj", "ffn_out", "logits"}
    scope = "every stage that reads a Q6_K matrix, those with other matrices are right"
    assert finding.sentence.endswith(f"The same in {scope}: look for one cause.")
