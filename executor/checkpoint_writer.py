"""Writing a checkpoint while training goes on.

A thread of its own reads the state where it lives, block by block, and copies nothing but the piece on its way to the
disk. Whoever is about to update a block waits until the thread has written it: the update of the step after the save,
which with exact clipping comes a whole forward and backward later. So a save costs no memory, and no time but what it
takes longer than that step.
"""

import threading
import time
from collections.abc import Callable, Iterable

Written = Callable[[int], None]  # called with a block's number when it is on disk


class CheckpointWriter:
    """Writes one checkpoint at a time beside training.

    A failure of the thread lets all waiting updates go and is raised, with the thread's traceback, by the next call
    of `start`, `finish` or `raise_failure`: the checkpoint was given up, and earlier ones are whole.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0  # by updates, since the writer was made
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._unwritten: set[int] = set()
        self._progress = threading.Condition()

    def start(self, write: Callable[[Written], object], *, blocks: Iterable[int]) -> None:
        """Call `write` in the thread. Until it has said that one of `blocks` is written, `before_update` holds it.

        The state must be complete: no update pending. A save that still runs is finished first.
        """
        self.finish()
        self._unwritten = set(blocks)
        self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, write: Callable[[Written], object]) -> None:
        try:
            write(self._is_written)
        except BaseException as error:  # handed to the training thread, which raises it
            self._failure = error
        finally:
            with self._progress:
                self._unwritten.clear()
                self._progress.notify_all()

    def _is_written(self, block: int) -> None:
        with self._progress:
            self._unwritten.discard(block)
            self._progress.notify_all()

    def before_update(self, block: int) -> None:
        """Return when `block` may change. Called by whichever thread launches or runs its update."""
        if block not in self._unwritten:
            return
        started = time.perf_counter()
        with self._progress:
            self._progress.wait_for(lambda: block not in self._unwritten)
            self.waited_seconds += time.perf_counter() - started

    def raise_failure(self) -> None:
        """Raise what ended the thread, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Wait until the checkpoint is whole on disk. Raises what ended the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failure()
