"""Answers on their way from a run to the URL: while that cannot be reached they wait, and no search is lost for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from gemmtuned.configs.errors import TableError, TryLater
from gemmtuned.fleet.bench import Answer
from gemmtuned.fleet.demand import Wanted
from gemmtuned.fleet.pool_client import PoolClient
from gemmtuned.fleet.ran import Ran

END_S: Final = 60.0  # for the URL to come back, at the end
AGAIN_S: Final = 1.0
T = TypeVar("T")


class Outbox:
    """See the module. ran: where each answer is noted when it has arrived. flush_s: how often the client is flushed."""

    def __init__(self, client: PoolClient, ran: Ran, *, flush_s: float = 0.0) -> None:
        self._client, self._ran, self._flush_s = client, ran, flush_s
        self._waiting: deque[tuple[Wanted, Answer, str]] = deque()
        self._flush_at_s = time.monotonic() + flush_s
        self._unflushed = 0

    def add(self, unit: Wanted, answer: Answer, where: str) -> None:
        """An answer, and which node gave it."""
        self._waiting.append((unit, answer, where))

    def bring(self) -> None:
        """Bring all of them. Raises TryLater; those that have not arrived stay for the next time."""
        while self._waiting:
            unit, answer, where = self._waiting[0]
            answer = self._brought(unit, answer)
            self._waiting.popleft()
            self._ran.done.append((unit, answer, where))
            self._unflushed += answer.state == "solved"
        if time.monotonic() >= self._flush_at_s:
            self._flush()

    def end(self) -> None:
        """Bring the rest and give all claims back, within END_S; what has not arrived then is unpublished."""
        with suppress(TryLater):
            patiently(self._finish, END_S)
        self._ran.unpublished = len(self._waiting) + self._unflushed

    def _finish(self) -> None:
        self.bring()
        self._flush()
        self._client.drop_all()

    def _flush(self) -> None:
        self._client.flush()
        self._unflushed, self._flush_at_s = 0, time.monotonic() + self._flush_s

    def _brought(self, unit: Wanted, answer: Answer) -> Answer:
        if answer.state == "solved":
            try:
                self._client.publish(unit, answer)
                return answer
            except TableError as err:
                why = f"its result cannot be published: {err}"
                answer = Answer(answer.name, "failed", why, took_s=answer.took_s)
        self._client.drop([unit])
        return answer


def patiently(call: Callable[[], T], seconds: float) -> T:
    """What this gives, tried again for so long while the URL cannot be reached. Raises TryLater after that."""
    until_s = time.monotonic() + seconds
    while True:
        try:
            return call()
        except TryLater:
            if time.monotonic() > until_s:
                raise
        time.sleep(AGAIN_S)
