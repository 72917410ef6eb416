"""A daemon thread that runs calls one after another and can be given up on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["DaemonWorkers"]


class DaemonWorkers:
    """`count` daemon threads behind one queue.

    Not a `ThreadPoolExecutor`: that one is joined when Python exits, so a call that hangs would keep the process alive.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue `call`; its result or exception arrives in the future."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Let the threads end after what is queued; one that hangs is left behind."""
        for _ in self._threads:
            self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            # The next call may be hours away: hold on to no images until then.
            del item, future, call
