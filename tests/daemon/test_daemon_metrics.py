"""Metrics: read by Prometheus's own parser, served on the loopback interface, documented, and used by our dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from store_cases import NEW, found, new_store, open_store, problem, saw

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Session
from gemmtuned.daemon.seats.seat import Solved
from gemmtuned.daemon.service.metrics import MOST_RUNS, Metrics, Programs
from gemmtuned.daemon.status_file import Notice, SeatNotice

DOCS = Path(__file__).resolve().parents[2] / "docs"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def notice(state: str = "tuning") -> Notice:
    seat = SeatNotice(id="GPU-1", name="cuda:0", device="cuda-x", state=state, reason="", others=0.25, clear_s=0.0)
    blind = SeatNotice(id='GPU-"2"', name="cuda:1", device="cuda-x", state="waiting", reason="", others=None, clear_s=0)
    return Notice(
        owner="h:1:b", pid=1, started_s=1.5, updated_s=2.5, state=state, reason="", generation=7, solved=3,
        seats=[seat, blind],
    )  # fmt: skip


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Metrics]:
    """Of a store with one tuned problem, one that waits, and two programs."""
    store = new_store(tmp_path)
    now_s = time.time()
    store.sightings.add("serve", NEW, [saw(problem(), 100), saw(problem(n=64), 7)], now_s=now_s - 100)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=now_s - 50)
    for pid, run, calls in ((os.getpid(), "serve", 100), (os.getppid(), "other", 7)):
        store.sightings.beat(session(pid, run, now_s, calls=calls), now_s=now_s)
    store.close()
    served = Metrics(0, tmp_path / "tune.db")
    yield served
    served.close()


def session(pid: int, run: str, now_s: float, *, calls: int = 0) -> Session:
    """Of a process that took generation 1 up 0.3 s after it was published, 50 s ago."""
    from gemmtuned.hooks.flush import new_session

    facts = {"generation": 1, "active_us": round((now_s - 49.7) * 1e6), "calls": calls, "dropped": 0, "errors": 0}
    settings = Settings.from_env({"GEMMTUNED_HOME": "/nonexistent", "GEMMTUNED_RUN": run})
    made = new_session(
        settings, path="native", started_us=round((now_s - 99) * 1e6), reload_failures=0, rank=None, note="", **facts
    )
    return Session(**{**{f: getattr(made, f) for f in made.__dataclass_fields__}, "pid": pid})


def scrape(metrics: Metrics, accept: str = "text/plain") -> tuple[str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{metrics.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def samples(text: str) -> Samples:
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_metrics_say_what_the_daemon_and_the_programs_do(metrics: Metrics) -> None:
    metrics.tell(notice(), used_today_s=12.5)
    metrics.solved([Solved("cuda:0", True, 3.0), Solved("cuda:0", False, 0.4)])
    seen = samples(scrape(metrics)[0])

    assert seen["gemmtuned_problems_solved_total", ()] == 3
    assert seen["gemmtuned_device_used_today_seconds", ()] == 12.5
    where = (("device", "cuda:0"), ("id", "GPU-1"))
    assert seen["gemmtuned_device_state", (*where, ("state", "tuning"))] == 1
    assert seen["gemmtuned_device_state", (*where, ("state", "waiting"))] == 0
    assert seen["gemmtuned_device_used_by_others_ratio", where] == 0.25
    assert ("gemmtuned_device_used_by_others_ratio", (("device", "cuda:1"), ("id", 'GPU-"2"'))) not in seen
    faster = (("device", "cuda:0"), ("verdict", "faster"))
    assert seen["gemmtuned_search_duration_seconds_sum", faster] == 3.0
    assert seen["gemmtuned_search_duration_seconds_bucket", (faster[0], ("le", "4.0"), faster[1])] == 1
    assert seen["gemmtuned_search_duration_seconds_bucket", (faster[0], ("le", "2.0"), faster[1])] == 0
    assert seen["gemmtuned_programs", (("state", "live"),)] == 2
    assert seen["gemmtuned_program_calls", (("run", "serve"),)] == 100
    assert seen["gemmtuned_untuned_problems", (("device", "cpu-test"),)] == 1
    assert seen["gemmtuned_oldest_generation_in_use", ()] == 1
    assert seen["gemmtuned_publish_to_active_seconds_count", ()] == 2
    assert seen["gemmtuned_publish_to_active_seconds_bucket", (("le", "0.5"),)] == 2
    assert seen["gemmtuned_publish_to_active_seconds_bucket", (("le", "0.25"),)] == 0


def test_a_publication_is_counted_once_and_the_first_one_is_no_publication(metrics: Metrics) -> None:
    for generation in (7, 7, 8, 8, 9):
        metrics.tell(Notice(**{**as_dict(notice()), "generation": generation}), used_today_s=0.0)

    assert samples(scrape(metrics)[0])["gemmtuned_publications_total", ()] == 2


def as_dict(one: Notice) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}


def test_both_forms_are_understood_by_prometheus_own_parsers(metrics: Metrics) -> None:
    metrics.tell(notice(), used_today_s=1.0)
    text, kind = scrape(metrics, "application/openmetrics-text; version=1.0.0")

    assert kind.startswith("application/openmetrics-text")
    assert {f.name for f in read_openmetrics(text)} >= {"gemmtuned_problems_solved", "gemmtuned_programs"}


def test_a_thousand_programs_make_a_hundred_rows(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for i in range(MOST_RUNS + 30):
        store.sightings.beat(session(100_000 + i, f"job-{i}", time.time(), calls=i + 1), now_s=time.time())
    store.close()
    metrics = Metrics(0, tmp_path / "tune.db")
    try:
        seen = samples(scrape(metrics)[0])
    finally:
        metrics.close()
    calls = {dict(labels)["run"]: value for (name, labels), value in seen.items() if name == "gemmtuned_program_calls"}

    assert len(calls) == MOST_RUNS + 1
    assert calls["other"] == sum(range(1, 31))


def test_of_programs_that_have_ended_nothing_is_remembered(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    now_s = time.time()
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=now_s - 50)
    running = session(os.getpid(), "serve", now_s)
    store.sightings.beat(running, now_s=now_s)
    programs = Programs(tmp_path / "tune.db")
    list(programs.collect())
    assert len(programs._seen) == 1
    store.sightings.end_session(running, now_s=now_s)
    programs._asked_s = float("-inf")
    list(programs.collect())
    store.close()

    assert not programs._seen


def test_a_program_called_other_keeps_its_calls(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for i in range(MOST_RUNS + 5):
        name = "other" if i == MOST_RUNS else f"job-{i}"
        store.sightings.beat(session(100_000 + i, name, time.time(), calls=i + 1), now_s=time.time())
    store.close()
    metrics = Metrics(0, tmp_path / "tune.db")
    try:
        seen = samples(scrape(metrics)[0])
    finally:
        metrics.close()

    assert sum(v for (name, _), v in seen.items() if name == "gemmtuned_program_calls") == sum(range(1, MOST_RUNS + 6))


def test_a_home_without_a_database_is_scraped_all_the_same(tmp_path: Path) -> None:
    metrics = Metrics(0, tmp_path / "tune.db")
    try:
        metrics.tell(notice(), used_today_s=0.0)
        assert samples(scrape(metrics)[0])["gemmtuned_problems_solved_total", ()] == 3
    finally:
        metrics.close()


HOSTILE = (
    'quo"te', "back\\slash", "new\nline", "car\rriage", "{brace}", "# HELP x", "</script>", "\x1b[31m", "\x00nul",
    "\u202eltr", "\u2028", "tab\t", " ", "comma,a=b", "x" * 10_000,
)  # fmt: skip


def test_names_of_any_kind_are_labels_for_both_parsers(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for at, run in enumerate(HOSTILE):
        store.sightings.beat(session(100_000 + at, run, time.time(), calls=at + 1), now_s=time.time())
        hostile = replace(NEW, device=replace(NEW.device, key=run[:500]))
        store.sightings.add(run, hostile, [saw(problem(), at + 1)], now_s=time.time())
    store.close()
    seats = [
        SeatNotice(id=run, name=run, device=run, state="ready", reason=run, others=0.5, clear_s=0.0) for run in HOSTILE
    ]
    metrics = Metrics(0, tmp_path / "tune.db")
    try:
        metrics.tell(Notice(**{**as_dict(notice()), "seats": seats}), used_today_s=0.0)
        metrics.solved([Solved(run, True, 1.0) for run in HOSTILE])
        plain, open_ = (scrape(metrics, kind)[0] for kind in ("text/plain", "application/openmetrics-text"))
    finally:
        metrics.close()
    for read, text in ((text_string_to_metric_families, plain), (read_openmetrics, open_)):
        found_: dict[str, dict[str, float]] = {}
        for one in (one for family in read(text) for one in family.samples):
            for label in ("run", "device"):
                if label in one.labels:
                    found_.setdefault(one.name, {})[one.labels[label]] = one.value
        assert found_["gemmtuned_program_calls"] == {run[:200]: at + 1 for at, run in enumerate(HOSTILE)}
        assert found_["gemmtuned_untuned_problems"].keys() == {run[:500] for run in HOSTILE}
        assert found_["gemmtuned_device_used_by_others_ratio"].keys() == set(HOSTILE)
        assert found_["gemmtuned_search_duration_seconds_count"].keys() == set(HOSTILE)


def test_a_daemon_before_its_first_turn_and_beside_a_damaged_database_is_scraped(tmp_path: Path) -> None:
    (tmp_path / "tune.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 8192)
    metrics = Metrics(0, tmp_path / "tune.db")
    try:
        before = samples(scrape(metrics)[0])
        metrics.tell(notice("paused"), used_today_s=0.0)
        after = samples(scrape(metrics)[0])
    finally:
        metrics.close()
    with pytest.raises(urllib.error.URLError):  # nobody answers for a daemon that is gone: GemmtunedDaemonGone
        scrape(metrics)

    assert before["gemmtuned_publications_total", ()] == 0 and ("gemmtuned_paused", ()) not in before
    assert after["gemmtuned_paused", ()] == 1


def test_metrics_are_served_on_the_loopback_interface_alone(metrics: Metrics) -> None:
    assert metrics.server.server_address[0] == "127.0.0.1"
    with pytest.raises(SettingError, match=f"metrics port {metrics.port}"):
        Metrics(metrics.port)


def names(metrics: Metrics) -> set[str]:
    """Every metric by the name it has in queries."""
    return {name for name, _ in samples(scrape(metrics)[0])} - {
        n for n, _ in samples(scrape(metrics)[0]) if n.endswith("_created")
    }


def family(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_every_metric_is_documented_and_nothing_else_is(metrics: Metrics) -> None:
    metrics.tell(notice(), used_today_s=0.0)
    metrics.solved([Solved("cpu", True, 1.0)])
    documented = set(re.findall(r"^\| `(gemmtuned_\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))

    assert documented == {family(name) for name in names(metrics)}


def test_the_labels_of_every_metric_are_documented_and_its_type_is(metrics: Metrics) -> None:
    metrics.tell(notice(), used_today_s=0.0)
    metrics.solved([Solved("cpu", True, 1.0)])
    table = re.findall(r"^\| `(gemmtuned_\w+)` \| (\w+) \|([^|]*)\|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    said = {
        name: (kind, {label for label in labels.replace(" ", "").split(",") if label}) for name, kind, labels in table
    }
    types = {
        one.name + ("_total" if one.type == "counter" else ""): one.type
        for one in text_string_to_metric_families(scrape(metrics)[0])
    }

    for name, labels in labels_of(metrics).items():
        assert said[name] == (types[name], labels - {"le"}), name


def labels_of(metrics: Metrics) -> dict[str, set[str]]:
    """Of every metric, but of the moments since when it counts."""
    found_: dict[str, set[str]] = {}
    for name, labels in samples(scrape(metrics)[0]):
        if not name.endswith("_created"):
            found_.setdefault(family(name), set()).update(label for label, _ in labels)
    return found_


@pytest.mark.parametrize("file", ["grafana-dashboard.json", "alerts.yaml"])
def test_what_is_summed_by_a_label_has_it(metrics: Metrics, file: str) -> None:
    metrics.tell(notice(), used_today_s=0.0)
    metrics.solved([Solved("cpu", True, 1.0)])
    there = labels_of(metrics)
    asked = re.findall(r"\bby \(([^)]*)\) \((?:\w+\()*(gemmtuned_\w+)", (DOCS / "monitoring" / file).read_text())

    assert len(asked) >= 3
    for labels, name in asked:
        assert {label.strip() for label in labels.split(",")} <= there[family(name)] | {"instance"}, name


def test_a_value_that_falls_when_a_program_ends_is_rated_as_no_counter(metrics: Metrics) -> None:
    """rate() and increase() take a fall for a start anew, and show traffic that nobody made."""
    types = {one.name: one.type for one in text_string_to_metric_families(scrape(metrics)[0])}
    gauges = {name for name, kind in types.items() if kind == "gauge"}
    for file in ("grafana-dashboard.json", "alerts.yaml"):
        rated = re.findall(r"\b(?:rate|increase|irate)\((\w+)", (DOCS / "monitoring" / file).read_text())
        assert not gauges & set(rated)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should() -> None:
    rules = DOCS.parent / "tests" / "data" / "alerts_test.yaml"
    done = subprocess.run(["promtool", "test", "rules", str(rules)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", ["grafana-dashboard.json", "alerts.yaml"])
def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist(metrics: Metrics, file: str) -> None:
    metrics.tell(notice(), used_today_s=0.0)
    metrics.solved([Solved("cpu", True, 1.0)])
    text = (DOCS / "monitoring" / file).read_text()
    used = set(re.findall(r"\bgemmtuned_\w+", text))

    assert used
    assert used <= names(metrics)


def test_the_dashboard_has_the_shape_that_grafana_imports() -> None:
    board = json.loads((DOCS / "monitoring" / "grafana-dashboard.json").read_text())

    assert board["schemaVersion"] >= 36 and board["title"] and board["uid"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) >= 6
    for panel in board["panels"]:
        assert panel["title"] and panel["type"] in ("timeseries", "stat", "table", "heatmap", "state-timeline")
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert all(target["expr"] for target in panel["targets"])
