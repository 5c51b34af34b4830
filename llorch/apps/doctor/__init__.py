"""Checks that name a repair: `adapter` for a LoRA adapter, `machine` for this machine."""
