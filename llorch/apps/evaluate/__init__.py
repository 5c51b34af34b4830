"""Quality of a model's predictions on a text, and difference between a quantised and the unquantised model on it.

The text is cut into windows of `context` tokens that do not overlap. If the vocabulary starts texts with a
beginning token, that token replaces the first token of every window. The first half of a window is only
read; each token after it is scored, given all before it in the window. These are the windows of `llama-perplexity`,
so that perplexities can be compared. Its `--kl-divergence` keeps the reference in 16 bits and cuts every probability
at exp(-16) of the best; here the logits of both models are used as they are, in float64, and none are kept.

Source: llama.cpp tools/perplexity/perplexity.cpp, `perplexity` and `kl_divergence`.
"""
