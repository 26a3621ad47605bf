"""What the daemon does, as Prometheus metrics on the loopback interface: read-only, and never in the loop's way.

The loop hands over its newest notice and what it has just finished; a thread answers scrapes from those.  What programs
report is asked of the database at a scrape, read-only and at most once in PROGRAMS_S.  Names and units follow
https://prometheus.io/docs/practices/naming; docs/metrics.md lists them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gemmtuned.configs.errors import GemmtunedError, SettingError

if TYPE_CHECKING:
    from gemmtuned.daemon.seats.seat import Solved
    from gemmtuned.daemon.status_file import Notice

logger = logging.getLogger("gemmtuned.daemon")

HOST: Final = "127.0.0.1"
PROGRAMS_S: Final = 10.0
MOST_RUNS: Final = 100  # names of programs; the others are summed up as "other"
_STATES: Final = ("waiting", "ready", "tuning", "stuck")
_SEARCH_S: Final = (0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_ACTIVE_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Serves http://127.0.0.1:<port>/metrics until closed. Raises SettingError when the port is taken.

    database: asked for what programs report; None: only what the daemon itself knows.
    """

    def __init__(self, port: int, database: Path | None = None) -> None:
        self.registry = CollectorRegistry()
        self._notice = _Daemon()
        self.registry.register(self._notice)
        self._search = Histogram(
            "gemmtuned_search_duration_seconds",
            "Time from the order to the verdict of one problem.",
            ("device", "verdict"),
            buckets=_SEARCH_S,
            registry=self.registry,
        )
        self._published = Counter(
            "gemmtuned_publications", "Tables published since the daemon started.", registry=self.registry
        )
        if database is not None:
            self.registry.register(Programs(database))
        try:
            self._server, self._thread = start_http_server(port, HOST, self.registry)
        except OSError as err:
            raise SettingError(
                f"metrics port {port}: {err.strerror or err}. Choose another with --metrics-port"
            ) from err
        self.port = int(self._server.server_port)
        logger.info("metrics url=http://%s:%d/metrics", HOST, self.port)

    @property
    def server(self) -> WSGIServer:
        """Where it listens."""
        return self._server

    def tell(self, notice: Notice, *, used_today_s: float) -> None:
        """What the daemon does now; used_today_s: device time of today, all devices together."""
        if notice.generation > self._notice.generation:
            if self._notice.generation >= 0:
                self._published.inc()
            self._notice.generation = notice.generation
        self._notice.newest = (notice, used_today_s)

    def solved(self, verdicts: Iterable[Solved]) -> None:
        """Searches that have just ended with a verdict."""
        for one in verdicts:
            self._search.labels(one.device, "faster" if one.faster else "torch_is_best").observe(one.took_s)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)


class _Daemon(Collector):
    """The newest notice as metrics."""

    def __init__(self) -> None:
        self.newest: tuple[Notice, float] | None = None
        self.generation = -1

    def collect(self) -> Iterator[Metric]:
        if self.newest is None:
            return
        notice, used_s = self.newest
        yield _counter(
            "gemmtuned_problems_solved", "Problems that got a verdict since the daemon started.", notice.solved
        )
        yield _gauge("gemmtuned_published_generation", "Newest published generation.", notice.generation)
        yield _gauge("gemmtuned_start_time_seconds", "Unix time when the daemon started.", notice.started_s)
        text = "Unix time of the daemon's newest turn: it stands still when the daemon hangs."
        yield _gauge("gemmtuned_last_turn_timestamp_seconds", text, notice.updated_s)
        yield _gauge("gemmtuned_paused", "1 while the operator's rules forbid tuning.", int(notice.state == "paused"))
        yield _gauge("gemmtuned_device_used_today_seconds", "Device time used today, all devices together.", used_s)
        state = GaugeMetricFamily(
            "gemmtuned_device_state", "1 for the state a device is in.", labels=("device", "id", "state")
        )
        others = GaugeMetricFamily(
            "gemmtuned_device_used_by_others_ratio",
            "Share of the device that others use, 0 to 1; absent when not known.",
            labels=("device", "id"),
        )
        for seat in notice.seats:
            for name in _STATES:
                state.add_metric((seat.name, seat.id, name), int(seat.state == name))
            if seat.others is not None:
                others.add_metric((seat.name, seat.id), seat.others)
        yield state
        yield others


class Programs(Collector):
    """What hooked programs of this home report, from the database."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._asked_s = float("-inf")
        self._metrics: list[Metric] = []
        self._seen: dict[tuple[object, ...], int] = {}  # process: the generation whose activation was counted
        self._active = Histogram(
            "gemmtuned_publish_to_active_seconds",
            "Time from a publication to its table being in use in a running program.",
            buckets=_ACTIVE_S,
            registry=None,
        )

    def describe(self) -> list[Metric]:
        """Nothing is asked of the database when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if time.monotonic() - self._asked_s >= PROGRAMS_S:
                self._asked_s = time.monotonic()
                try:
                    self._metrics = self._ask()
                except GemmtunedError:  # a scrape does not report a database that cannot be read
                    self._metrics = []
            yield from self._metrics

    def _ask(self) -> list[Metric]:
        from gemmtuned.db import queries

        sessions = [row for row in queries.sessions(self._database) if row["state"] != "ended"]
        published = {row["generation"]: row["published_us"] for row in queries.publications(self._database)}
        for row in sessions:
            self._note_activation(row, published)
        there = {_process(row) for row in sessions}
        self._seen = {process: generation for process, generation in self._seen.items() if process in there}
        live = GaugeMetricFamily("gemmtuned_programs", "Hooked processes by what is heard of them.", labels=("state",))
        for state in ("live", "silent", "gone"):
            live.add_metric((state,), sum(row["state"] == state for row in sessions))
        oldest = min((row["generation"] for row in sessions if row["state"] == "live"), default=None)
        found: list[Metric] = [live, *self._active.collect(), *_by_run(sessions), *self._waiting(queries)]
        if oldest is not None:
            text = "Oldest table that a live program uses."
            found.append(_gauge("gemmtuned_oldest_generation_in_use", text, oldest))
        return found

    def _note_activation(self, row: dict[str, Any], published: dict[int, int]) -> None:
        key, generation = _process(row), row["generation"]
        at_us = published.get(generation)
        if at_us is None or not row["active_us"] or self._seen.get(key) == generation:
            return
        self._seen[key] = generation
        if at_us >= row["started"]:  # a program that started later found the table there
            self._active.observe(max(row["active_us"] - at_us, 0) / 1e6)

    def _waiting(self, queries: Any) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "gemmtuned_untuned_problems", "Problems without a verdict, by device.", labels=("device",)
        )
        by_device: dict[str, int] = {}
        for row in queries.environments(self._database):
            by_device[row["device"]] = by_device.get(row["device"], 0) + row["open_problems"] - row["failed"]
        for device, number in sorted(by_device.items()):
            waiting.add_metric((device,), number)
        yield waiting


def _process(row: dict[str, Any]) -> tuple[object, ...]:
    return row["host"], row["pid"], row["started"]


def _by_run(sessions: Iterable[dict[str, Any]]) -> Iterator[Metric]:
    """Sums of the processes of each program, the busiest by name."""
    sums: dict[str, list[int]] = {}
    for row in sessions:
        one = sums.setdefault(row["run"], [0, 0, 0])
        for i, column in enumerate(("calls", "dropped", "errors")):
            one[i] += row[column] or 0
    busiest = sorted(sums, key=lambda run: -sums[run][0])
    named: dict[str, list[int]] = {run: sums[run] for run in busiest[:MOST_RUNS]}
    if busiest[MOST_RUNS:]:
        rest = [
            *(sums[run] for run in busiest[MOST_RUNS:]),
            named.get("other", [0, 0, 0]),
        ]  # a program may be called so
        named["other"] = [sum(column) for column in zip(*rest, strict=True)]
    for i, (name, text) in enumerate(
        (
            ("gemmtuned_program_calls", "GEMM calls recorded in running programs."),
            ("gemmtuned_program_dropped_calls", "GEMM calls that could not be recorded in running programs."),
            ("gemmtuned_program_failed_routes", "Tuned kernels switched off in running programs because they failed."),
        )
    ):
        family = GaugeMetricFamily(name, text, labels=("run",))  # a sum over running processes: it falls when one ends
        for run, values in named.items():
            family.add_metric((run,), values[i])
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
