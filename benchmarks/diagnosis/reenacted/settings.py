"""Settings that were not read, or read as another model's."""

from benchmarks.diagnosis.port import Port
from benchmarks.diagnosis.reenacted.reporting import HEADS, report

NORMS = ("attn_norm", "q_norm", "k_norm", "ffn_norm", "final_norm")


@report("ggml-org/llama.cpp#2373", "perplexity 5.90 where 5.83 is right", NORMS, "norm-eps-1e-6-for-1e-5 norm-eps",
        model="micro-llama", value="1e-06")  # fmt: skip
def eps_of_llama_1(port: Port) -> None:
    """Use eps 1e-6 where Llama 2 has 1e-5."""
    port.eps = 1e-6


@report("Wenyueh/MinivLLM#82", "a small drift from the first layer on", NORMS, "norm-eps-1e-5-for-1e-6 norm-eps",
        model="micro-qwen3", value="1e-05")  # fmt: skip
def eps_not_read(port: Port) -> None:
    """Use the default eps of the class instead of the config's."""
    port.eps = 1e-5


@report("ollama/ollama#2379", "a code model writes garbage", HEADS, "rope-base-1e4 rope-theta", model="micro-qwen2",
        value="10000")  # fmt: skip
def base_not_read(port: Port) -> None:
    """Use base 10000 instead of the base of the file, a million, which the engine did not read."""
    port.theta = 1e4


@report("lyogavin/airllm#368", "incoherent after 800 to 1000 tokens", HEADS, "rope-base-1e4 rope-theta",
        model="micro-llama3", plan="far", value="10000")  # fmt: skip
def base_lost_on_the_way_to_a_layer(port: Port) -> None:
    """Use a default base in one of two paths, which does not copy the base."""
    port.theta = 1e4


@report("ggml-org/llama.cpp#8650", "Llama 3.1 loses the thread in long contexts", HEADS, "rope-scaling-missing",
        model="micro-llama3", plan="far")  # fmt: skip
def no_llama3_scaling(port: Port) -> None:
    """Leave out the scaling of Llama 3.1, which was not known yet."""
    port.stretch = {}


@report("ikawrakow/ik_llama.cpp#2291", "perplexity 2916 for 5.50 at 32k, right near the start", HEADS,
        "rope-scaling-missing", model="micro-llama3")  # fmt: skip
def frequency_factors_are_null(port: Port) -> None:
    """Leave out rope_freqs, which the operation did not get."""
    port.around("slowed", lambda right, speeds: speeds)


@report("meta-llama/llama-models#241", "Llama 3.2 is wrong beyond 80k", HEADS, "rope-scaling-factor",
        model="micro-llama3", plan="far", value="32")  # fmt: skip
def factor_of_another_size(port: Port) -> None:
    """Use the factor 32 where the model has 8; the report had the opposite."""
    port.stretch = port.stretch | {"factor": 32}


@report("FareedKhan-dev/train-llm-from-scratch#3", "attention is too flat", ("attn_scores",), "scores-scaled-by-hidden",
        model="micro-llama")  # fmt: skip
def scale_of_the_embedding(port: Port) -> None:
    """Divide scores by the root of the embedding's width."""
    port.scale = port.hidden**-0.5


@report("mlc-ai/mlc-llm#3426", "cosine 0.862 of embeddings", ("attn_scores",), "scores-not-scaled", model="micro-llama")
def no_scale_in_a_fallback(port: Port) -> None:
    """Multiply by the default scale, 1, in a fallback path."""
    port.scale = 1.0
