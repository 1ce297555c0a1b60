"""What /metrics shows, in Prometheus' words. Every server has a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fedweave.serving.jobs import Backend

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    def __init__(self, backend: Backend):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "fedweave_requests", "Finished requests.", ["endpoint", "status"], registry=self.registry
        )
        self.tokens = Counter("fedweave_tokens", "Tokens read and written.", ["kind"], registry=self.registry)
        self.answers = Counter("fedweave_answers", "Answers by expert.", ["expert"], registry=self.registry)
        self.first = Histogram(
            "fedweave_first_token_seconds", "From request to first text.", registry=self.registry, buckets=_SECONDS
        )
        self.whole = Histogram(
            "fedweave_request_seconds", "From request to last text.", registry=self.registry, buckets=_SECONDS
        )
        running = Gauge("fedweave_running", "Answers under way.", registry=self.registry)
        waiting = Gauge("fedweave_waiting", "Requests in the queue.", registry=self.registry)
        running.set_function(lambda: backend.running)
        waiting.set_function(lambda: backend.waiting)

    def text(self) -> bytes:
        return generate_latest(self.registry)
