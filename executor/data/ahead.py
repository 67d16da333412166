"""Batches made ahead: while a step runs, a thread makes the batch of the next."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from executor.data.dataset import Batch, Dataset


def batches_ahead(dataset: Dataset, *, num_steps: int) -> Callable[[int], Batch]:
    """`dataset.batch` for steps in order, each made while the one before runs; none from step `num_steps` on.

    At the turn of a step the GPU has little left to do, and 256 rows of random tokens take 6 ms to make. What goes
    wrong with a batch is raised where that batch is asked for. Nobody waits for a batch that is not asked for.
    """
    made: dict[int, Future[Batch]] = {}

    def make(step: int) -> Future[Batch]:
        future: Future[Batch] = Future()

        def fill() -> None:
            try:
                future.set_result(dataset.batch(step))
            except BaseException as error:  # raised where the batch is asked for
                future.set_exception(error)

        threading.Thread(target=fill, name=f"conveyor-batch-{step}", daemon=True).start()
        return future

    def batch(step: int) -> Batch:
        found = (made.pop(step, None) or make(step)).result()
        if step + 1 < num_steps:
            made[step + 1] = make(step + 1)
        return found

    return batch
