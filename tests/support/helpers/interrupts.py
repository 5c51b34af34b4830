"""Signals of processes that tests start."""

import signal


def heed_interrupts() -> None:
    """Give SIGINT its default back, as `preexec_fn` of a process that a test interrupts.

    Whoever runs the tests in the background (`nohup`, `&` in a script) has it ignored. Children inherit that, and
    Python makes no KeyboardInterrupt then.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
