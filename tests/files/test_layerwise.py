"""Layerwise jobs: one runs at a time, layer by layer; the first that fails ends all."""

import numpy as np
import pytest

from llorch.files.layerwise import LayerwiseJobs


def test_every_job_ends_a_layer_before_any_begins_the_next():
    seen = []

    def job(name, n_layers):
        def run(turn):
            for layer in range(n_layers):
                seen.append(f"{layer}{name}")
                turn()
                seen.append(f"{layer}{name} over")  # no other job runs now
            return name

        return run

    assert LayerwiseJobs([job("a", 1), job("b", 3), job("c", 2)]).run() == ["a", "b", "c"]
    assert seen == [
        *("0a", "0b", "0c"), "0a over", "0b over", "1b", "0c over", "1c", "1b over", "2b", "1c over", "2b over",
    ]  # fmt: skip


def test_the_first_that_fails_ends_all():
    ended = []

    def endless(turn):
        try:
            while True:
                turn()
        finally:
            ended.append("endless")

    def fails(turn):
        turn()
        raise ValueError("layer 1")

    with pytest.raises(ValueError, match="layer 1"):
        LayerwiseJobs([endless, fails, endless]).run()
    assert ended == ["endless"] * 2


def test_a_job_sees_what_was_set_around_it():
    with np.errstate(divide="raise"):
        assert LayerwiseJobs([lambda turn: np.geterr()["divide"]]).run() == ["raise"]


def test_no_jobs():
    assert LayerwiseJobs([]).run() == []
