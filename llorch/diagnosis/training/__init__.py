"""Diagnosis of training: the first wrong quantity of a LoRA step, and the mistake that makes it."""
