"""Python's collector of cycles, off where it finds nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Leave cycles uncollected inside. A search makes millions of small objects that die by their counts or live on.

    The collector would walk through what lives again and again: that took a third of a search.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
