"""Progress on a terminal: a bar below the lines. In files and pipes there are lines only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

Say = Callable[[str], None]


class Progress(NamedTuple):
    """`say` prints a line; `show` says how many steps are done, and what is worth seeing of the last one."""

    say: Say
    show: Callable[[int, str], None]


@contextmanager
def step_progress(say: Say, *, num_steps: int, steps_done: int) -> Iterator[Progress]:
    """A bar while the context is open, where `say` prints to a terminal; else `say` as it is, and no bar."""
    if say is not print or not sys.stdout.isatty():
        yield Progress(say, lambda step, text: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    bar = Bar(*columns, console=Console(), transient=True)
    task = bar.add_task("training", total=num_steps, completed=steps_done)

    def print_above(line: str) -> None:
        bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(step: int, text: str) -> None:
        bar.update(task, completed=step, description=text)

    bar.start()
    try:
        yield Progress(print_above, show)
    finally:
        with suppress(OSError):  # of a terminal that is gone: what ended the run is what must be told
            bar.stop()
