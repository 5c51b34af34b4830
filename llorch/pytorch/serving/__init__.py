"""Continuous batching: jobs join and leave while others run. A page pool, the cache in its pages, and the batch."""
