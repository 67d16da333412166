"""Retries: how often CUDA's allocator had to give memory back before it found some."""

import torch


class Retries:
    """Counts the retries of one run on one device, and tells once that steps pay for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = self._in_process() or 0
        self._seen = 0
        self._advised = False

    def count(self) -> int | None:
        """Retries so far; None on a device without such an allocator."""
        found = self._in_process()
        return None if found is None else found - self._before

    def advice(self, *, warm: bool) -> str:
        """After a step: what to do about its retries, the first time that a `warm` one has any; else ''."""
        count = self.count() or 0
        new, self._seen = count - self._seen, count
        if not (warm and new) or self._advised:
            return ""
        self._advised = True
        return (
            f"device memory is tight: in one step the allocator gave memory back and took it again {new} times, and "
            "steps are slower for it; plan again with a lower --device-memory"
        )

    def _in_process(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))
