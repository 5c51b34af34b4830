"""LoRA adapters in the leaves of the torch path."""
