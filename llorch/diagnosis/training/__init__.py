"""Diagnosis of training: find the first wrong quantity of a LoRA step, and the mistake that causes it."""
