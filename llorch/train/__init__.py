"""Training of LoRA adapters: data, loss, optimizer, snapshots, the loop. Modules named `torch_*` need torch."""
