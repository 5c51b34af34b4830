"""Training without torch: everything of a run that is not the model itself; `pytorch/train` is the loop.

In come settings and a data set. Out go batches, rates and, from the run, snapshots, a log and a curve. In the order to
read:

    settings       every setting once: default, text, range; `settings_file` reads them from YAML, TOML and options
    data/          rows of a file to the batches of a step
    batch          what a batch is
    numpy_step     loss and gradients of one step in NumPy: the reference
    adamw          clipping, the update and the learning rates, in NumPy
    snapshots      states on disk that survive a crash; `snapshot_files` their files, every bit under a digest
    resume         what has to be equal for a resumed run to be the same to the last bit
    log            one line per step, and the curve
    stopping       signals that end a run
"""
