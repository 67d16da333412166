"""On CUDA: what a stream waits for always comes, however much is launched behind the wait."""

import faulthandler
import time

import pytest
import torch

from executor.runner import StreamRunner
from simulator.program import Kind, Operation, Program, Resource, Wait

pytestmark = pytest.mark.gpu

# Additions of one operation, two launches each; with all operations several times what CUDA queues.
ADDITIONS, OPERATIONS = 40, 100


def test_the_queue_of_launches_never_fills_behind_a_wait_for_the_worker():
    # A full queue blocks torch's launcher of compiled kernels with the interpreter lock held, and an update needs
    # that lock when it comes back from the kernel.
    device = torch.device("cuda", 0)
    values = torch.zeros(1024, device=device)
    add = torch.compile(lambda x: x + 1.0)
    add(values)

    def forward(operation: Operation) -> None:
        for _ in range(ADDITIONS):
            values.copy_(add(values))

    def update(operation: Operation) -> None:
        for _ in range(20):  # takes the lock again and again
            time.sleep(0.05)

    waits = (Wait("update", 0),)
    operations = [Operation("update", Kind.UPDATE, Resource.HOST)]
    operations += [
        Operation(f"forward.{number}", Kind.FORWARD, Resource.COMPUTE, waits=() if number else waits)
        for number in range(OPERATIONS)
    ]
    runner = StreamRunner({Kind.FORWARD: forward, Kind.UPDATE: update}, device, device_bytes=lambda: 0)
    torch.cuda.synchronize()
    # A thread that hangs with the lock held stops Python's own timeouts too; this one ends the process.
    faulthandler.dump_traceback_later(120.0, exit=True)
    try:
        runner.run(Program("first", tuple(operations), {}))
    finally:
        faulthandler.cancel_dump_traceback_later()
    runner.synchronize()
    assert values[0].item() == ADDITIONS * OPERATIONS
    runner.close()
