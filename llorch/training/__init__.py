"""Training without torch: all parts of a run except the torch loop, which is `pytorch/train`.

Input: settings and a data set. Output: batches, learning rates, snapshots, a log and a loss curve. Reading order:

    settings       all settings: default, help text and range; `settings_file` reads them from YAML, TOML and options
    data/          from the rows of a file to the batches of a step
    batch          examples and batches
    numpy_step     loss and gradients of one step in NumPy: the reference
    adamw          gradient clipping, AdamW and learning rates in NumPy
    snapshots      crash-safe snapshots on disk; `snapshot_files`: their files, all under digests
    resume         conditions for a bit-exact resumed run
    log            one line per step, and the loss curve
    stopping       stops a run on signals
    merge_files    merges an adapter into a model on disk
"""
