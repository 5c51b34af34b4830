"""Checkpoints 15 to 20: training against PEFT, torch and llama.cpp."""
