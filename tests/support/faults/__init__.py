"""Mistakes to inject: into goldens' inputs, running code, ranks, dumps and readers."""
