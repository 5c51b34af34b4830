"""Compare a file with the model that it was made from: `llorch verify FILE --source SOURCE`.

compare       the comparison of two models
settings      hyperparameters by meaning; `vocabulary` the tokenizer and the chat template
forms         lawful forms of weights in files, stated independently of llorch's reader and writer
tensors       weights, row by row; `grids` judges quantised blocks
adapters      a base with an adapter as the source
wrong_forms   mistakes of converters that explain the weights that differ
"""
