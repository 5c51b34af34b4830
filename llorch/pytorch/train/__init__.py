"""Training on the torch path."""
