"""Training on torch.

In come settings of `llorch.training`; out comes a folder with a trained adapter, and snapshots to go on from. In the
order to read:

    run         a run in its folder: steps, log, validations, snapshots
    trainer     model, adapter, optimizer and data at some step; what an adapter changes on data
    sharded_snapshots      states of a run of several processes, saved while it goes on; `snapshot_parts` reads them
    step        one optimizer step on given batches, by one process or a rank of a mesh
    forward     the model's pass over a batch whose documents do not see each other
    loss        cross entropy without all logits at once
    adamw       the update; `eight_bit` its moments in 8 bits
    loading     a model whose modules record gradients
"""
