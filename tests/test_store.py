import gc
import re
from pathlib import Path

import pytest
import torch
from tiny_model import tiny_spec

import executor.store
from executor.store import PLANES, BlockLayout, HostStore, Pinning, available_host_bytes, cuda_pinning, planned_bytes
from simulator.errors import OutOfMemory

HOST = BlockLayout(planes=PLANES, pinned=("weights", "gradient"))


class FakeDriver:
    """Records registrations; refuses the one after `capacity_bytes`."""

    def __init__(self, capacity_bytes: int = 2**60) -> None:
        self.capacity_bytes = capacity_bytes
        self.registered: dict[int, int] = {}
        self.unregistered: list[int] = []

    def pinning(self) -> Pinning:
        return Pinning(self._register, self._unregister, lambda code: f"fake error {code}")

    def _register(self, address: int, num_bytes: int) -> int:
        if sum(self.registered.values()) + num_bytes > self.capacity_bytes:
            return 2
        self.registered[address] = num_bytes
        return 0

    def _unregister(self, address: int) -> int:
        self.unregistered.append(address)
        del self.registered[address]
        return 0


def resident_bytes() -> int:
    (kib,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_a_block_is_one_aligned_region_of_disjoint_zeroed_planes(precision):
    model = tiny_spec()
    store = HostStore(model, [HOST] * model.num_blocks, precision=precision, gradient_format="bf16", pinning=None)
    for index in range(model.num_blocks):
        planes = [store.plane(index, plane) for plane in PLANES if store.has(index, plane)]
        assert len(planes) == (5 if precision == "bf16" else 4)
        spans = sorted((plane.data_ptr(), plane.data_ptr() + plane.nbytes) for plane in planes)
        assert spans[0][0] % 4096 == 0
        # One region without gaps, every plane on 256 bytes.
        assert all(begin % 256 == 0 for begin, _ in spans)
        assert [end for _, end in spans[:-1]] == [begin for begin, _ in spans[1:]]
        for number, plane in enumerate(planes, start=1):
            assert plane.numel() == model.block(index).num_elements
            assert not plane.any()
            plane.fill_(number)
        assert [plane[0].item() for plane in planes] == [1, 2, 3, 4, 5][: len(planes)]
        assert all((plane == plane[0]).all() for plane in planes)
    state = store.state(1)
    assert state.precision == precision
    assert (state.low is not None) == (precision == "bf16")


def test_planned_requested_and_resident_bytes_agree():
    model = tiny_spec(hidden_size=256, head_dim=64, intermediate_size=3000, vocab_size=20_000)
    layouts = [BlockLayout(()), *[HOST] * model.num_layers, HOST]
    choices = {"precision": "bf16", "gradient_format": "fp32"}
    planned = planned_bytes(model, layouts, **choices)
    requested = sum(model.block(i).num_elements * (2 + 4 + 2 + 4 + 4) for i in range(1, model.num_blocks))
    assert requested > 120e6
    gc.collect()
    before = resident_bytes()
    store = HostStore(model, layouts, pinning=None, **choices)
    resident = resident_bytes() - before
    assert planned.resident == store.bytes.resident == pytest.approx(requested, rel=0.01)
    assert resident == pytest.approx(planned.resident, rel=0.01)
    assert not store.has(0, "weights")

    kept = store.plane(1, "weights")
    store.close()
    still_viewed = planned_bytes(model, [layouts[0], HOST, *layouts[:1] * 2], **choices).resident
    assert resident_bytes() - before == pytest.approx(still_viewed, rel=0.05)
    kept.fill_(3)
    del kept
    assert resident_bytes() - before < 0.05 * planned.resident


def test_exactly_the_streaming_planes_are_pinned_and_unpinned():
    model, driver = tiny_spec(), FakeDriver()
    layouts = [BlockLayout(("weights", "low")), *[HOST] * model.num_layers, BlockLayout(PLANES, ("gradient",))]
    choices = {"precision": "bf16", "gradient_format": "fp32"}
    store = HostStore(model, layouts, pinning=driver.pinning(), **choices)
    expected = {store.plane(i, "weights").data_ptr(): model.block(i).num_elements * (2 + 4) for i in model.layers}
    expected[store.plane(model.head, "gradient").data_ptr()] = model.block(model.head).num_elements * 4
    assert driver.registered.keys() == expected.keys()
    for address, num_bytes in expected.items():
        assert num_bytes <= driver.registered[address] < num_bytes + 4096
    assert sum(driver.registered.values()) == store.bytes.pinned == planned_bytes(model, layouts, **choices).pinned
    store.close()
    store.close()
    assert not driver.registered
    assert len(driver.unregistered) == len(expected)


def test_a_dropped_store_unpins():
    model, driver = tiny_spec(), FakeDriver()
    store = HostStore(
        model, [HOST] * model.num_blocks, precision="fp32", gradient_format="fp32", pinning=driver.pinning()
    )
    assert driver.registered
    del store
    gc.collect()
    assert not driver.registered


def test_registration_is_cut_into_chunks_that_cover_the_region(monkeypatch):
    model, driver = tiny_spec(), FakeDriver()
    monkeypatch.setattr(executor.store, "MAX_REGISTERED_BYTES", 8192)
    store = HostStore(
        model, [HOST] * model.num_blocks, precision="fp32", gradient_format="fp32", pinning=driver.pinning()
    )
    assert max(driver.registered.values()) == 8192
    for index in range(model.num_blocks):
        position, end = store.plane(index, "weights").data_ptr(), store.plane(index, "gradient").data_ptr()
        end += store.plane(index, "gradient").nbytes
        while position < end:
            position += driver.registered[position]  # KeyError would be a gap
        assert position - end < 4096
    store.close()
    assert not driver.registered


def test_refused_pinning_names_the_memory_the_bytes_and_the_limit_and_leaves_nothing_pinned():
    model = tiny_spec()
    layouts = [HOST] * model.num_blocks
    total = planned_bytes(model, layouts, precision="fp32", gradient_format="fp32").pinned
    driver = FakeDriver(capacity_bytes=total - 1)
    with pytest.raises(
        OutOfMemory, match=r"pinned host memory: cudaHostRegister refused \d+ bytes .* limited to"
    ) as error:
        HostStore(model, layouts, precision="fp32", gradient_format="fp32", pinning=driver.pinning())
    assert "fake error 2" in str(error.value)
    assert not driver.registered
    assert driver.unregistered


def test_a_store_beyond_free_memory_is_refused_before_it_is_taken(monkeypatch):
    model = tiny_spec()
    layouts = [HOST] * model.num_blocks
    needed = planned_bytes(model, layouts, precision="bf16", gradient_format="bf16").resident
    monkeypatch.setattr(executor.store, "available_host_bytes", lambda: needed - 4096)
    with pytest.raises(OutOfMemory, match=rf"short by 4.0 KiB: the training state needs {needed} bytes"):
        HostStore(model, layouts, precision="bf16", gradient_format="bf16", pinning=None)


def test_free_memory_is_below_the_machine_s():
    total = int(re.findall(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    assert 0 < available_host_bytes() < total


@pytest.mark.gpu
def test_cuda_pins_what_streams_and_nothing_else():
    model = tiny_spec(hidden_size=256, head_dim=64)
    pinning = cuda_pinning()
    assert pinning is not None
    store = HostStore(model, [HOST] * model.num_blocks, precision="bf16", gradient_format="fp32", pinning=pinning)
    for index in range(model.num_blocks):
        assert store.plane(index, "weights").is_pinned()
        assert store.plane(index, "gradient").is_pinned()
    # A region of less than a page has all its planes in one; a layer's moments lie pages behind what streams.
    assert not store.plane(1, "second_moment")[-1:].is_pinned()
    weights = store.plane(1, "weights")
    weights.copy_(torch.randn(weights.numel()))
    assert torch.equal(weights.to("cuda", non_blocking=True).cpu(), weights)
    store.close()
    assert not weights.is_pinned()
