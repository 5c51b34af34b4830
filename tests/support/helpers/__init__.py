"""Runners of tests: commands, ranks, engines, training; and checks that several tests share."""
