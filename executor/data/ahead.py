"""Batches made ahead: while a step runs, a thread makes the batch of the next."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from executor.data.dataset import Batch, Dataset


@contextmanager
def batches_ahead(dataset: Dataset, *, num_steps: int) -> Iterator[Callable[[int], Batch]]:
    """`dataset.batch` for steps in order, each made while the one before runs; none from step `num_steps` on.

    At the turn of a step the GPU has little left to do, and 256 rows of random tokens take 6 ms to make. What goes
    wrong with a batch is raised where that batch is asked for.
    """
    made: dict[int, Future[Batch]] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="conveyor-batches") as thread:

        def batch(step: int) -> Batch:
            asked = made.pop(step, None) or thread.submit(dataset.batch, step)
            found = asked.result()
            if step + 1 < num_steps:
                made[step + 1] = thread.submit(dataset.batch, step + 1)
            return found

        yield batch
