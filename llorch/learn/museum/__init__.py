"""The bug museum: reports of people whose engine was wrong, as exercises. A dump comes in, the cause goes out.

`reports.toml` holds what happened, by thread; `exhibit` reads it, plants the cause in our forward pass of a built-in
model and writes the dump of that run; `answers` judges what somebody takes for the cause.
"""
