"""Claims: which worker runs which row. The lock is the operating system's, so a claim ends with its processes."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claim(path: Path) -> Iterator[int | None]:
    """Takes the lock file `path` for the time of the context.

    Yields:
        The lock's file descriptor, or None where another process or thread holds the claim. A child that inherits
        the descriptor (`pass_fds`) keeps the claim for as long as it lives; a dead process keeps nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)
