"""Logits that do not depend on the other rows of a batch."""
