"""Configurations that an engine cannot check, with reasons: llama.cpp reads them and computes something else.

llorch computes what the configuration says, and the other engine gives the verdict.
"""

import numpy as np

from llorch.families.config import ModelConfig
from llorch.families.family import EPSILON
from llorch.families.llamacpp_limits import cannot_express
from llorch.families.table import FAMILIES
from llorch.ops.delta_rule import L2_EPS
from llorch.runtime.fields import shortest


def unsupported_reason(engine: str, config: ModelConfig, n_tokens: int) -> str:
    """Explain why an engine cannot judge runs of up to so many tokens; empty if it can."""
    if engine != "llamacpp":
        return ""
    if config.delta_net is not None and np.float32(config.rms_norm_eps) != np.float32(L2_EPS):  # llama.cpp#28068
        eps = shortest(config.rms_norm_eps)
        return f"llama.cpp uses rms_norm_eps for the L2 norms of delta nets, too: {eps}, not {L2_EPS}"
    if EPSILON not in FAMILIES[config.family].llamacpp.reads:  # a fault: a later version of its file reads the key
        gguf = FAMILIES[config.family].gguf
        return f"llama.cpp does not read {EPSILON} for {gguf}, so its norms use an epsilon of 0"
    if pairs := unturned(config):  # a fault: transformers turns them, and models that see are trained with it
        sections, left = (", ".join(map(str, listed)) for listed in (config.rope_sections, pairs))
        return f"llama.cpp does not rotate pairs {left} of a head in a text: rope.dimension_sections is {sections}"
    return cannot_express(config, n_tokens)


def not_a_number(engine: str, family: str, stage: str) -> str:
    """Explain a known NaN of an engine in a stage, as the end of a message; empty if none is known."""
    divides = FAMILIES[family].llamacpp.nodes.get("shared_gate", ("", ""))[0] == "DIV"
    if (engine, stage) == ("llamacpp", "shared_gate") and divides:
        return "; llama.cpp computes sigmoid(x) as silu(x) / x, and x is 0 for one token"
    return ""


def unturned(config: ModelConfig) -> list[int]:
    """List the pairs of a head that llama.cpp puts on a fourth axis, on which every token of a text has position 0.

    Source: ggml `ops.cpp`, `ggml_mrope_cache_init`; llama.cpp `llama-graph.cpp`, `llm_graph_input_pos::set_input`.
    """
    if not (sections := config.rope_sections):
        return []
    period, mixed = sum(sections), FAMILIES[config.family].sections == "interleaved"
    ends = [3 * end for end in sections[:3]] if mixed else [sum(sections[:3])] * 3
    return [i for i in range(config.rotated // 2) if i % period >= ends[i % period % 3]]
