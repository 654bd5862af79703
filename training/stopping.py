"""A way to stop a run that loses nothing: signals wait for the next checkpoint."""

import logging
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


class StopRequests:
    """While it is entered, a first SIGINT or SIGTERM is noted, for the run to save and stop; a second one acts.

    Does nothing outside the main thread, where Python takes no signals.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def leave(self) -> None:
        """End the program as the noted signal would have: KeyboardInterrupt, or exit code 143."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = number
        self._restore()
        logger.warning("%s: saving after this step; once more to stop at once", signal.Signals(number).name)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
