"""How far a long run is: on a terminal a line that goes again, elsewhere in the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from gnnaccel.lower import bounds


@contextlib.contextmanager
def shown(what: str) -> Iterator[Callable[[str], None]]:
    """Within the block the yielded function may be told where the run is; it shows that once the run is a long one.

    Parameters
    ----------
    what : str
        That takes so long.

    Notes
    -----
    A terminal is asked for behind stderr. The log is "gnnaccel", at INFO.
    """
    start = last = time.perf_counter()
    status = None

    def say(where: str) -> None:
        nonlocal status, last
        now = time.perf_counter()
        if now - start < bounds.PROGRESS_QUIET_S:
            return
        text = f"gnnaccel: {what}: {where}"
        if sys.stderr.isatty():
            from rich.console import Console  # here: most runs are short
            from rich.text import Text

            if status is None:
                status = Console(stderr=True).status("")
                status.start()
            status.update(Text(text))
        elif now - last >= bounds.PROGRESS_LOG_S:
            logging.getLogger("gnnaccel").info(text)
            last = now

    try:
        yield say
    finally:
        if status is not None:
            status.stop()
