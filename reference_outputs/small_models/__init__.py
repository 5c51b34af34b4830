"""Recipes of the small committed models: text, vocabulary, training and the GGUF file."""
