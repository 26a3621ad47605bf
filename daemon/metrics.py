"""What the daemon does as Prometheus metrics, on the loopback interface only: read-only, one page, no dependency.

The page is made by the daemon's loop at its notices, and served by a thread that only ever reads the newest one.
"""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from gemmtuned.configs.errors import SettingError
from gemmtuned.daemon.notice import Notice

HOST: Final = "127.0.0.1"
_STATES: Final = ("waiting", "ready", "tuning", "stuck")


def page(notice: Notice, *, rules_used_s: float) -> str:
    """The metrics in Prometheus' text format, version 0.0.4."""
    lines = [
        "# HELP gemmtuned_problems_solved_total Problems that got a verdict since the daemon started.",
        "# TYPE gemmtuned_problems_solved_total counter",
        f"gemmtuned_problems_solved_total {notice.solved}",
        "# HELP gemmtuned_generation Newest published generation.",
        "# TYPE gemmtuned_generation gauge",
        f"gemmtuned_generation {notice.generation}",
        "# HELP gemmtuned_started_seconds Unix time when the daemon started.",
        "# TYPE gemmtuned_started_seconds gauge",
        f"gemmtuned_started_seconds {notice.started_s:.3f}",
        "# HELP gemmtuned_turn_seconds Unix time of the newest notice: old when the daemon hangs.",
        "# TYPE gemmtuned_turn_seconds gauge",
        f"gemmtuned_turn_seconds {notice.updated_s:.3f}",
        "# HELP gemmtuned_paused 1 while the operator's rules forbid tuning.",
        "# TYPE gemmtuned_paused gauge",
        f"gemmtuned_paused {int(notice.state == 'paused')}",
        "# HELP gemmtuned_device_seconds_today Device time used today, all devices together.",
        "# TYPE gemmtuned_device_seconds_today gauge",
        f"gemmtuned_device_seconds_today {rules_used_s:.3f}",
        "# HELP gemmtuned_device_state 1 for the state the device is in.",
        "# TYPE gemmtuned_device_state gauge",
    ]
    for seat in notice.seats:
        where = f'device="{_plain(seat.name)}",id="{_plain(seat.id)}"'
        lines += [f'gemmtuned_device_state{{{where},state="{s}"}} {int(seat.state == s)}' for s in _STATES]
    lines += [
        "# HELP gemmtuned_device_used_by_others Share of the device that others use; absent when not known.",
        "# TYPE gemmtuned_device_used_by_others gauge",
    ]
    for seat in notice.seats:
        if seat.others is not None:
            where = f'device="{_plain(seat.name)}",id="{_plain(seat.id)}"'
            lines.append(f"gemmtuned_device_used_by_others{{{where}}} {seat.others:.4f}")
    return "\n".join(lines) + "\n"


class Metrics:
    """Serves the page at http://127.0.0.1:<port>/metrics until closed. Raises SettingError when the port is taken."""

    def __init__(self, port: int) -> None:
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(self))
        except OSError as err:
            raise SettingError(
                f"metrics port {port}: {err.strerror or err}. Choose another with --metrics-port"
            ) from err
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.text = ""
        self._thread = threading.Thread(target=self._server.serve_forever, name="gemmtuned-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)


def _handler(metrics: Metrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0  # a client that says nothing keeps a thread no longer

        def do_GET(self) -> None:
            found = self.path.split("?")[0] in ("/metrics", "/")
            body = metrics.text.encode() if found else b"see /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Not a word: a scrape every few seconds is no event."""

    return Handler


def _plain(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
