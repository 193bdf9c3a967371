"""Metrics by a real parser: names, types, labels, bounds; and an exporter that clients cannot hold up."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from enforcer.checkpoint import save
from enforcer.core.errors import CannotWorkHereError, ConfigError
from enforcer.core.whatif import settled
from enforcer.describe import parse
from enforcer.exporter import Exporter, parse_address, read_document
from enforcer.figures import figures
from enforcer.metrics import StateCollector
from enforcer.tally import MOST_LABELS, OTHER, PIN_BUCKETS, Histogram, Tally

BOOT = "b007"


def document(tally: Tally | None = None, **figures: Any) -> dict[str, Any]:
    return {
        "version": "1.2.3",
        "started": 100.0,
        "figures": {"cpus": {"exclusive": 2, "shared": 6}, "containers": {"exclusive": 1}, "conflicts": 3, **figures},
        "tally": (tally or Tally()).to_document(),
    }


def scraped(found: dict[str, Any] | None, age: float | None = 1.5) -> dict[str, float]:
    """sample{labels} -> value, as Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: (found, age)))
    text = generate_latest(registry).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {f"{s.name}{dict(sorted(s.labels.items())) or ''}": s.value for s in samples}


def test_no_agent_is_said_and_nothing_else() -> None:
    assert scraped(None, None) == {"cpuset_enforcer_agent_state_found": 0}


def test_gauges_and_counters() -> None:
    tally = Tally()
    tally.add(tally.writes, "ok", 5)
    tally.add(tally.drift, "systemd")
    tally.overflows = 2
    seen = scraped(document(tally))
    assert seen["cpuset_enforcer_cpus{'state': 'exclusive'}"] == 2
    assert seen["cpuset_enforcer_writes_total{'result': 'ok'}"] == 5
    assert seen["cpuset_enforcer_drift_repairs_total{'writer': 'systemd'}"] == 1
    assert seen["cpuset_enforcer_overflows_total"] == 2
    assert seen["cpuset_enforcer_conflicts"] == 3
    assert seen["cpuset_enforcer_state_file_age_seconds"] == 1.5
    assert seen["cpuset_enforcer_build_info{'version': '1.2.3'}"] == 1


def test_pin_latency_is_a_cumulative_histogram() -> None:
    tally = Tally()
    for seconds in (0.0004, 0.0005, 0.003, 99.0):
        tally.pinned("event", seconds)
    seen = scraped(document(tally))
    name = "cpuset_enforcer_pin_latency_seconds_bucket"
    counts = [seen[f"{name}{{'le': '{bound}', 'trigger': 'event'}}"] for bound in (*map(str, PIN_BUCKETS), "+Inf")]
    assert counts == [2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 4]
    assert seen["cpuset_enforcer_pin_latency_seconds_sum{'trigger': 'event'}"] == pytest.approx(99.0039)


def test_labels_that_others_choose_are_bounded() -> None:
    counter: dict[str, int] = {}
    for number in range(1000):
        Tally.add(counter, f"writer-{number}")
    assert len(counter) == MOST_LABELS + 1
    assert counter[OTHER] == 1000 - MOST_LABELS


def test_hostile_label_does_not_break_the_page() -> None:
    tally = Tally()
    tally.add(tally.drift, 'a"b\\c\nd{}')
    assert scraped(document(tally))["cpuset_enforcer_drift_repairs_total{'writer': 'a\"b\\\\c\\nd{}'}"] == 1


def test_histogram_bounds_are_inclusive() -> None:
    one = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.1):
        one.observe(value)
    assert one.counts == [1, 2, 1]


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:9967", ("127.0.0.1", 9967)), ("[::1]:80", ("::1", 80)), (":9967", ("", 9967))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "9967", "localhost", "localhost:", "localhost:0", "h:70000", "h:-1", "h:٣"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted HOST:PORT"):
        parse_address(text)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    file = tmp_path / "state.json"
    assert save(file, document(), BOOT) is None
    server = Exporter(("127.0.0.1", 0), (file, tmp_path / "audit.json"), BOOT)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", file
    server.shutdown()
    server.server_close()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


def test_page_follows_the_file(served: tuple[str, Path]) -> None:
    url, file = served
    assert 'cpuset_enforcer_cpus{state="exclusive"} 2.0' in get(f"{url}/metrics")
    file.write_text("torn")
    assert "cpuset_enforcer_agent_state_found 0.0" in get(f"{url}/metrics")
    file.unlink()
    assert "cpuset_enforcer_agent_state_found 0.0" in get(f"{url}/metrics")


def test_other_pages_are_not_there(served: tuple[str, Path]) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{served[0]}/../../etc/passwd")


def test_clients_that_never_read_or_ask_do_not_stop_a_scrape(served: tuple[str, Path]) -> None:
    url, _ = served
    port = int(url.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
    idle[0].send(b"GET /metrics HTTP/1.1\r\n\r\n")
    started = time.monotonic()
    assert "cpuset_enforcer_cpus" in get(f"{url}/metrics")
    assert time.monotonic() - started < 15
    for one in idle:
        one.close()


def test_clients_that_ask_a_byte_at_a_time_do_not_stop_a_scrape(served: tuple[str, Path]) -> None:
    url, _ = served
    port = int(url.rpartition(":")[2])
    done = threading.Event()

    def drip(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not done.wait(0.1):
                one.send(b"G")

    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(24)]
    threads = [threading.Thread(target=drip, args=(one,)) for one in slow]
    for one in threads:
        one.start()
    time.sleep(0.3)
    started = time.monotonic()
    try:
        for _ in range(3):
            assert "cpuset_enforcer_cpus" in get(f"{url}/metrics")
        assert time.monotonic() - started < 5
    finally:
        done.set()
        for thread in threads:
            thread.join()
        for one_socket in slow:
            one_socket.close()


def test_a_machine_without_threads_to_spare_answers_again_later(
    served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", refused)
        for _ in range(20):
            with pytest.raises((OSError, http.client.HTTPException)):
                get(f"{served[0]}/metrics")
    assert "cpuset_enforcer_cpus" in get(f"{served[0]}/metrics")


@pytest.mark.parametrize(
    "accept",
    ["application/openmetrics-text; version=x", "text/plain;version", ";;=,q=", "application/openmetrics-text", "*/*"],
)
def test_any_accept_header_is_answered(served: tuple[str, Path], accept: str) -> None:
    request = urllib.request.Request(f"{served[0]}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert "cpuset_enforcer_cpus" in answer.read().decode()


def test_openmetrics_is_well_formed(served: tuple[str, Path]) -> None:
    request = urllib.request.Request(f"{served[0]}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        families = list(openmetrics.text_string_to_metric_families(answer.read().decode()))
    assert {"cpuset_enforcer_cpus", "cpuset_enforcer_overflows"} <= {one.name for one in families}


def test_the_start_does_not_wait_for_the_dns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(name: str = "") -> str:
        raise AssertionError("the DNS was asked")

    monkeypatch.setattr(socket, "getfqdn", never)
    Exporter(("127.0.0.1", 0), (tmp_path / "x",), BOOT).server_close()


@pytest.mark.parametrize("host", ["a\0b", "a..b", "x" * 300, "999.1.1.1", "::2%nowhere"])
def test_a_host_that_is_none_is_told(host: str, tmp_path: Path) -> None:
    with pytest.raises(CannotWorkHereError, match="cannot listen"):
        Exporter((host, 9), (tmp_path / "x",), BOOT)


@pytest.mark.parametrize("what", ["torn", "of another boot", "edited", "a pipe", "a folder", "huge", "deep"])
def test_a_state_file_that_is_none_is_said(served: tuple[str, Path], what: str) -> None:
    url, file = served
    whole = file.read_bytes()
    file.unlink()
    if what == "a pipe":
        os.mkfifo(file)
    elif what == "a folder":
        file.mkdir()
    elif what == "huge":
        with file.open("wb") as sparse:
            sparse.truncate(1 << 40)
    elif what == "of another boot":
        save(file, document(), "0000")
    else:
        made = {"torn": whole[:-50], "edited": whole.replace(b"1.2.3", b"6.6.6"), "deep": b"[" * 100_000}
        file.write_bytes(made[what])
    page = get(f"{url}/metrics")
    assert "cpuset_enforcer_agent_state_found 0.0" in page
    assert "cpuset_enforcer_state_file_age_seconds" in page
    assert "cpuset_enforcer_cpus" not in page


def test_cardinality_does_not_grow_with_the_node() -> None:
    def series(pods: int) -> int:
        made = [{"name": f"p{n}", "containers": [{"name": "c", "cpus": 1}]} for n in range(pods)]
        node = parse({"topology": {"cores": 64}, "pods": made}, "test")
        done = settled(node.view, node.state, node.policy, 1.0)
        tally = Tally()
        for n in range(pods):
            tally.pinned("event", 0.001 * n)
            tally.add(tally.drift, f"writer-{n}")
        return len(scraped({**document(tally), "figures": figures(done.view, done.state, node.policy)}))

    assert series(1000) - series(100) == 0
    assert series(1000) < 120


@pytest.mark.parametrize(
    "wrong",
    [
        {"figures": []}, {"tally": 1}, {"tally": None}, {"tally": {"pin": {"x": {}}}},
        {"figures": {"cpus": {"shared": "many"}}}, {"figures": {"conflicts": {}}},
    ],
)
def test_a_document_of_another_shape_counts_as_none(wrong: dict[str, Any]) -> None:
    assert scraped({**document(), **wrong}) == {
        "cpuset_enforcer_agent_state_found": 0, "cpuset_enforcer_state_file_age_seconds": 1.5,
    }  # fmt: skip


def test_port_in_use_is_told(served: tuple[str, Path], tmp_path: Path) -> None:
    port = int(served[0].rpartition(":")[2])
    with pytest.raises(CannotWorkHereError, match="cannot listen"):
        Exporter(("127.0.0.1", port), (tmp_path / "x",), BOOT)


def test_newest_state_file_counts(tmp_path: Path) -> None:
    old, new = tmp_path / "audit.json", tmp_path / "state.json"
    for file, version in ((old, "old"), (new, "new")):
        assert save(file, {"version": version}, BOOT) is None
        time.sleep(0.02)
    found, age = read_document((old, new), BOOT)
    assert found == {"version": "new"}
    assert age is not None
    assert age < 10
