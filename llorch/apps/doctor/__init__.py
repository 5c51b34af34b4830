"""Health checks with repairs: `adapter` checks a LoRA adapter, `machine` checks this machine."""
