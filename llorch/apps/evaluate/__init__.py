"""Quality of a model's predictions on a text, and difference between a quantised and the unquantised model on it.

The text is cut into windows of `context` tokens that do not overlap. If the vocabulary adds a BOS token, it replaces
the first token of every window. The first half of a window is prefilled without a score. Each token of the second half
is scored, given all earlier tokens of the window. `llama-perplexity` has the same windows, so that perplexities are
comparable. Its `--kl-divergence` stores the reference's log probabilities in 16 bits and clips each at 16 below the
largest; llorch uses the unclipped logits of both models in float64, and stores none.

Source: llama.cpp tools/perplexity/perplexity.cpp, `perplexity` and `kl_divergence`.
"""
