"""Metrics of a server, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from .engine import Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Metrics of one server, which start at 0 with it."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._seconds = Histogram(
            "compressive_request_seconds",
            "Seconds from the start of a request to the end of its response.",
            ("route", "status"),
            buckets=SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "compressive_first_token_seconds",
            "Seconds from the start of a request to its first generated token.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self.cancelled = Counter(
            "compressive_cancelled", "Requests whose clients disconnected before the end.", registry=self._registry
        )

    def on_response(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request by its route; its path would be a label for each session."""
        route = getattr(scope.get("route"), "path", "none")
        self._seconds.labels(route, str(status)).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the present numbers of the engine."""
        sessions, worker = self._engine.sessions, self._engine.worker
        yield GaugeMetricFamily("compressive_sessions", "Sessions, those on disk included.", len(sessions))
        yield GaugeMetricFamily("compressive_sessions_resident", "Sessions in main memory.", sessions.resident)
        yield GaugeMetricFamily("compressive_queue", "Waiting and running requests.", worker.unfinished)
        yield CounterMetricFamily("compressive_tokens_read", "Tokens that were read.", worker.tokens_read)
        yield CounterMetricFamily("compressive_tokens_written", "Tokens that were generated.", worker.tokens_written)
        yield CounterMetricFamily("compressive_put_away", "Sessions that were moved to disk.", sessions.offloads)
        yield CounterMetricFamily("compressive_came_back", "Sessions that were loaded from disk.", sessions.loads)
        yield CounterMetricFamily("compressive_forgotten", "Idle sessions that were deleted.", sessions.drops)
