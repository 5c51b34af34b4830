"""LoRA: small trained matrices beside frozen weights: configuration, tensors, file formats, merging."""
