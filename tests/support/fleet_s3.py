"""An S3 server for a fleet under test: moto's, in a process of its own, and what can be wrong with one.

`python fleet_s3.py FOLDER` serves until it is ended; it writes its port to FOLDER/port.  While FOLDER/slow holds
a number, each request waits for so many seconds first; while FOLDER/lose_claims is there, every second write of a claim
is answered as done and dropped.  FOLDER/requests holds how many there were.  A Wire lies between one host and it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any


def serve(folder: Path) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    number, claim = count(1), count(1)

    def spoilt(environ: dict[str, Any], start: Any) -> Any:
        (folder / "requests").write_text(str(next(number)))
        if (folder / "slow").exists():
            time.sleep(float((folder / "slow").read_text() or 0))
        is_claim = environ["REQUEST_METHOD"] == "PUT" and "/claims/" in environ["PATH_INFO"]
        if is_claim and (folder / "lose_claims").exists() and next(claim) % 2:
            start("200 OK", [("ETag", '"0123456789abcdef0123456789abcdef"'), ("Content-Length", "0")])
            return [b""]
        return app(environ, start)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, spoilt, threaded=True)
    new = folder / "port.new"
    new.write_text(str(server.port))
    new.replace(folder / "port")
    server.serve_forever()


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """For `with`: the variables by which programs find the server; it has a bucket `fleet`."""
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=log, stderr=log)
    try:
        began = time.monotonic()
        while not (folder / "port").exists():
            assert process.poll() is None and time.monotonic() - began < 60, (folder / "log").read_text()
            time.sleep(0.05)
        endpoint = f"http://127.0.0.1:{(folder / 'port').read_text()}"
        signed = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        bucket = urllib.request.Request(f"{endpoint}/fleet", method="PUT", headers={"Authorization": signed})
        urllib.request.urlopen(bucket, timeout=30).close()
        yield {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
    finally:
        process.kill()
        process.wait()


class Wire:
    """A port that leads to another one. While it is cut, what comes is taken and nothing ever answers."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._cut = threading.Event()
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def heal(self) -> None:
        """What was taken meanwhile is closed, as a router forgets."""
        self._cut.clear()
        for one in list(self._open):
            self._close(one)

    def _accept(self) -> None:
        while True:
            here, _ = self._server.accept()
            self._open.add(here)
            if self._cut.is_set():
                continue
            there = socket.create_connection(("127.0.0.1", self._to))
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        try:
            while data := here.recv(1 << 16):
                if self._cut.is_set():
                    return  # and it stays open, without an answer
                there.sendall(data)
        except OSError:
            pass
        self._close(here)
        self._close(there)

    def _close(self, one: socket.socket) -> None:
        self._open.discard(one)
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        one.close()


if __name__ == "__main__":
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test")
    serve(Path(sys.argv[1]))
