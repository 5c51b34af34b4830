"""Cases of `benchmarks/speed.py`: one file a case, and what they share."""
