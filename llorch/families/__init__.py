"""Facts of each model family, and the readers of hyperparameters: `config` is what the rest of llorch reads."""
