"""One `./dev` at a time where two would spoil each other's work."""

import contextlib
import fcntl
from collections.abc import Iterator

from devtools.project import CACHE


@contextlib.contextmanager
def exclusive(task: str) -> Iterator[None]:
    """Holds the lock of a task, and says so if another process has it and this one must wait.

    The kernel drops the lock when its holder dies, so there is nothing to clean up.

    Args:
        task: Names the lock file and completes the sentence "waiting for another ./dev to finish ...".
    """
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{task}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"dev: waiting for another ./dev to finish: {task}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
