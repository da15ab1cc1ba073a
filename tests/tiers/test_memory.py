"""The host's memory as a store of named bytes: what is read is what was written last, and the device's count has none of it."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from trainwright.artifacts import UserError
from trainwright.profiler.kernels.allocator import measure
from trainwright.tiers import MemoryStore, StoreOptions, memory
from trainwright.tiers.copies import StreamCopies


def test_what_is_read_is_what_was_written_last() -> None:
    """Transfers of one item keep their order, however slow; chunks may be smaller than items."""
    options = StoreOptions(chunk_bytes=4096, buffer_bytes=4096, num_threads=3, write_rate=2e6)
    store = MemoryStore(options=options)
    store.add({"a": 40_000, "b": 12})
    begun = time.perf_counter()
    versions = [torch.full((10_000,), float(number)) for number in range(3)]
    into = [torch.empty(10_000) for _ in versions]
    copies = []
    for version, target in zip(versions, into, strict=True):
        copies += [store.write("a", version), store.read("a", target)]
    for copy in copies:
        copy.wait()
    assert all(torch.equal(version, target) for version, target in zip(versions, into, strict=True))
    assert time.perf_counter() - begun >= 3 * 40_000 / 2e6 * 0.9
    assert store.traffic.total("write").num_bytes == store.traffic.total("read").num_bytes == 120_000
    store.close()


def test_the_host_reads_and_writes_in_place() -> None:
    store, into = MemoryStore(), torch.empty(2, 3)
    store.add({"a": 24})
    store.write("a", torch.arange(6.0).view(2, 3))
    held = store.value("a", torch.float32, (2, 3))
    assert held.tolist() == [[0, 1, 2], [3, 4, 5]]
    held.mul_(2)
    store.read("a", into).wait()
    assert into.tolist() == [[0, 2, 4], [6, 8, 10]]
    store.drop(["a"])
    assert store.num_bytes == 0
    store.close()


def test_its_bytes_are_not_the_devices() -> None:
    def fill() -> None:
        store = MemoryStore()
        store.add({"a": 10_000_000})
        store.value("a", torch.uint8, [10_000_000]).fill_(1)
        store.close()

    assert measure(fill, 1).peak_delta_bytes < 1000


def test_bad_uses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store.add({"a": 12})
    with pytest.raises(UserError, match="nothing of a was"):
        store.read("a", torch.empty(3))
    with pytest.raises(UserError, match="12 bytes is needed for a; got 16"):
        store.write("a", torch.empty(4))
    with pytest.raises(UserError, match="contiguous"):
        store.write("a", torch.empty(3, 2)[:, 0])
    with pytest.raises(UserError, match="b is none"):
        store.read("b", torch.empty(3))
    with pytest.raises(UserError, match="a is there"):
        store.add({"a": 12})
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"2000 bytes are needed in the host's memory.*1000 are free"):
        store.add({"b": 2000})
    assert "b" not in store
    store.close()


def test_what_waits_for_a_copy_waits_while_another_thread_does() -> None:
    """A read that follows a write starts after it, although somebody is waiting for the write already."""
    store = MemoryStore(options=StoreOptions(chunk_bytes=4096, buffer_bytes=4096, write_rate=1e5))
    store.add({"a": 20_480})
    into, ones = torch.zeros(5120), torch.ones(5120)
    write = store.write("a", ones)
    waiting = threading.Thread(target=write.wait)
    waiting.start()
    time.sleep(0.02)
    store.read("a", into).wait()
    waiting.join()
    assert torch.equal(into, ones)
    store.close()


@pytest.mark.parametrize("closes", [True, False])
def test_memory_is_unlocked_before_it_is_released(monkeypatch: pytest.MonkeyPatch, closes: bool) -> None:
    """CUDA would else take what the system maps there next for locked: copies of it fail ("resource already mapped")."""
    locked: dict[int, weakref.ref[torch.Tensor]] = {}

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
            return 0

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            memory = locked.pop(address)()
            assert memory is not None, "it is still there"
            assert memory.data_ptr() == address
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    copies = StreamCopies(torch.device("cuda", 0))
    for num_bytes in (100, 5000):
        buffer = copies.buffer(num_bytes)
        locked[buffer.data_ptr()] = weakref.ref(buffer)
        del buffer
    assert len(locked) == 2
    if closes:
        copies.close()
        assert not locked
    del copies
    gc.collect()
    assert not locked
