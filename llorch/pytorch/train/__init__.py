"""Training on torch.

Input: settings of `llorch.training`. Output: a trained adapter in a folder, and snapshots. Reading order:

    run         a run in its folder: steps, log, validations, snapshots
    trainer     model, adapter, optimizer and data at some step; comparison of base and adapter on data
    sharded_snapshots      snapshots of several processes, saved during the run; `snapshot_parts` reads them
    step        one optimizer step on given batches, by one process or a rank of a mesh
    forward     the forward pass of a batch with separate documents
    loss        cross entropy in chunks, without all logits at once
    adamw       the update; `eight_bit` stores its moments in 8 bits
    loading     a model whose modules support backward
"""
