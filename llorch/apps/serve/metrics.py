"""What the server counts, for Prometheus; one registry a server, so that several may be in a process."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from llorch.apps.serve.work import Work

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        """Start with all counts at zero."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "llorch_requests", "Requests, by route and status.", ["route", "status"], registry=registry
        )
        self._running = Gauge("llorch_answers_running", "Answers that run in the batch.", registry=registry)
        self._waiting = Gauge(
            "llorch_answers_waiting", "Answers that wait for a place in the batch.", registry=registry
        )
        self._prompt = Counter("llorch_prompt_tokens", "Prompt tokens.", registry=registry)
        self._cached = Counter("llorch_cached_tokens", "Prompt tokens from the cache.", registry=registry)
        self._made = Counter("llorch_answer_tokens", "Generated tokens.", registry=registry)
        self.cancelled = Counter(
            "llorch_answers_cancelled", "Answers cancelled because the client left.", registry=registry
        )
        self._to_first = Histogram(
            "llorch_first_token_seconds", "Time from a request to the first token.", registry=registry, buckets=_SECONDS
        )
        self._per_token = Histogram(
            "llorch_token_seconds", "Time from one token to the next.", registry=registry, buckets=_SECONDS
        )

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Ask these how many answers there are, whenever somebody looks."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def answered(self, route: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()

    def read(self, work: Work) -> None:
        """Count a prompt that was read."""
        self._prompt.inc(len(work.job.ids))
        self._cached.inc(work.n_cached)

    def made(self, work: Work, before: float | None) -> None:
        """Count a token, made now, the one before it at `before`."""
        assert work.last is not None
        self._made.inc()
        if before is None:
            self._to_first.observe(work.last - work.submitted)
        else:
            self._per_token.observe(work.last - before)

    def text(self) -> bytes:
        """Write all metrics as Prometheus reads them."""
        return generate_latest(self._registry)
