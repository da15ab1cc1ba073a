"""The store against a dictionary, its versions against kills, its faults by name."""

from __future__ import annotations

import os
import random
import resource
import signal
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.artifacts import UserError
from trainwright.tiers import KINDS, Fault, StoreOptions, TierFault, TierStore, aligned_empty, padded
from trainwright.tiers.manifest import read_manifest, write_manifest
from trainwright.tiers.places import check_room, file_system

SMALL = StoreOptions(chunk_bytes=4096, buffer_bytes=4 * 4096)


def folders(path: Path, num: int) -> list[Path]:
    found = [path / f"disk{index}" for index in range(num)]
    for each in found:
        each.mkdir()
    return found


def filled(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=25)
@given(
    num_folders=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=5),
    writes=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12),
)
def test_the_store_is_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, num_folders: int, sizes: list[int], writes: list[tuple[int, bool]]
) -> None:
    places = folders(tmp_path_factory.mktemp("store"), num_folders)
    held: dict[str, torch.Tensor] = {}
    committed: dict[str, torch.Tensor] = {}
    with TierStore.create(places, SMALL) as store:
        store.add({str(index): size for index, size in enumerate(sizes)})
        for seed, (index, commits) in enumerate(writes):
            key = str(index % len(sizes))
            data = filled(sizes[int(key)], seed)
            store.write(key, data)
            held[key] = data
            into = aligned_empty(sizes[int(key)])
            store.read(key, into).wait()
            assert torch.equal(into, data)
            if commits:
                store.commit(seed, {"seen": seed})
                committed = dict(held)
    if not committed:
        with pytest.raises(UserError, match=r"there is no tier\.json"):
            TierStore.open(places)
        return
    with TierStore.open(places) as store:
        assert store.notes == {"seen": store.step}
        for key, data in committed.items():
            into = torch.empty_like(data)
            store.read(key, into).wait()
            assert torch.equal(into, data)
        assert not any(store.items[key].slot >= 0 for key in store.items.keys() - committed.keys())


def test_slots_of_all_items_lie_apart(tmp_path: Path) -> None:
    with TierStore.create(folders(tmp_path, 3), SMALL) as store:
        store.add({str(size): size for size in (1, 4096, 4097, 50_000)})
        store.add({"later": 12_345})
        taken: set[tuple[int, int]] = set()
        for item in store.items.values():
            for slot in (0, 1):
                for piece in item.pieces(slot, 4096):
                    pages = {(piece.folder, page) for page in range(piece.offset, piece.offset + piece.num_bytes, 4096)}
                    assert not pages & taken
                    taken |= pages
        assert store.num_bytes == 2 * sum(padded(item.num_bytes) for item in store.items.values())


def test_bytes_are_counted_as_the_system_counts_them(tmp_path: Path) -> None:
    """Against the kernel's counts of what reaches the disk, thread by thread."""
    data, others = filled(3 * 2**20, 0), threads_now()
    with TierStore.create(folders(tmp_path, 2), StoreOptions(chunk_bytes=2**18, buffer_bytes=2**20)) as store:
        if not store.is_direct or not Path("/proc/self/io").exists():
            pytest.skip("transfers past the page cache are needed")
        store.add({"a": data.numel()})
        store.write("a", data).wait()  # the file system finds its blocks, and may write down where they are
        before = io_counts(others)
        store.write("a", data).wait()
        for _ in range(4):
            store.read("a", torch.empty_like(data)).wait()
        read, written = (now - then for now, then in zip(io_counts(others), before, strict=True))
        assert store.traffic.total("write").num_bytes / 2 == data.numel() == written
        assert store.traffic.total("read").num_bytes == 4 * data.numel() == read


def threads_now() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def io_counts(others: set[str]) -> tuple[int, int]:
    """Return the bytes that threads have read from disks and written but for `others`, which load code and write logs."""
    read = written = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name not in others:
            found = dict(line.split(": ") for line in (task / "io").read_text().splitlines())
            read, written = read + int(found["read_bytes"]), written + int(found["write_bytes"])
    return read, written


def test_buffers_are_bounded(tmp_path: Path) -> None:
    options = StoreOptions(chunk_bytes=4096, buffer_bytes=2 * 4096, num_threads=8)
    with TierStore.create(folders(tmp_path, 1), options) as store:
        store.add({"a": 100_001})
        data = filled(100_001, 1)
        store.write("a", data).wait()
        into = torch.empty(100_002, dtype=torch.uint8)[1:]  # not on a page: every chunk goes over a buffer
        store.read("a", into).wait()
        assert torch.equal(into, data)
        assert store._pool._made <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_named_and_the_last_step_loads(tmp_path: Path, kind: str) -> None:
    places = folders(tmp_path, 2)
    first, second = filled(20_000, 1), filled(20_000, 2)
    at = 7 if Fault(kind).direction == "write" else 2  # the first step writes five chunks
    options = StoreOptions(
        chunk_bytes=4096, buffer_bytes=16384, faults=[Fault(kind, at, delay_s=0.3)],
        max_transfer_s=0.2 if kind == "slow" else 60.0,
    )  # fmt: skip
    store = TierStore.create(places, options)
    store.add({"a": 20_000})
    store.write("a", first)
    store.commit(1)
    with pytest.raises(TierFault, match=f"fault: {kind}") as caught:
        use(store, second)
    assert caught.value.kind == kind
    assert str(places[0]) in str(caught.value) or str(places[1]) in str(caught.value)
    if Fault(kind).direction == "write":
        with pytest.raises(TierFault, match=kind):
            store.commit(2)
    store.close()
    with TierStore.open(places) as again:
        into = torch.empty_like(first)
        again.read("a", into).wait()
        assert again.step == 1
        assert torch.equal(into, first)


def use(store: TierStore, data: torch.Tensor) -> None:
    """Write, read and keep: whatever is planted happens."""
    store.write("a", data)
    store.read("a", torch.empty_like(data)).wait()
    store.commit(2)


def test_a_real_disk_that_loses_bytes_is_found_out(tmp_path: Path) -> None:
    (place,) = folders(tmp_path, 1)
    with TierStore.create([place], SMALL) as store:
        store.add({"a": 10_000})
        store.write("a", filled(10_000, 1))
        store.commit(0)
        path = next(place.glob("stripe-*"))
        with open(path, "r+b") as file:
            file.seek(store.items["a"].offsets[0][0] + 5000)
            file.write(b"????????")
        with pytest.raises(TierFault, match="fault: checksum"):
            store.read("a", torch.empty(10_000, dtype=torch.uint8)).wait()
        os.truncate(path, 4096)
        with pytest.raises(TierFault, match="fault: short read"):
            store.read("a", torch.empty(10_000, dtype=torch.uint8)).wait()
        path.unlink()
        with pytest.raises(TierFault, match="fault: gone"):
            store.commit(1)


def test_a_file_past_its_limit_is_full(tmp_path: Path) -> None:
    if not hasattr(os, "posix_fallocate"):
        pytest.skip("reserving is needed")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = TierStore.create(folders(tmp_path, 1), SMALL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(TierFault, match="fault: full"):
            store.add({"a": 2**22})
        store.add({"b": 4096})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        store.close()


def steps_until_killed(places: list[Path], at: int) -> None:
    """Write steps 1, 2 … of three items, each filled with its step's number; the `at`-th chunk is cut in half."""
    options = StoreOptions(chunk_bytes=8192, buffer_bytes=4 * 8192, faults=[Fault("kill", at)])
    store = TierStore.create(places, options)
    store.add({"a": 20_000, "b": 100, "c": 9000})
    for step in range(1, 8):
        for item in store.items.values():
            store.write(item.key, torch.full((item.num_bytes,), step, dtype=torch.uint8))
        store.commit(step)


def killed_at(path: Path, at: int) -> int:
    """Return the step that loads after a kill; -1 where none was committed."""
    path.mkdir()
    places = folders(path, 2)
    child = os.fork()
    if child == 0:
        try:
            steps_until_killed(places, at)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    try:
        store = TierStore.open(places)
    except UserError:
        return -1
    with store:
        for item in store.items.values():
            into = torch.empty(item.num_bytes, dtype=torch.uint8)
            store.read(item.key, into).wait()
            assert bool((into == store.step).all())
        return store.step


def check_kills(path: Path, num: int) -> None:
    """Six chunks a step: the kill at chunk n leaves step n // 6, whole."""
    draw = random.Random(0)
    for number in range(num):
        at = draw.randrange(6 * 7)
        found = killed_at(path / str(number), at)
        assert found == (at // 6 or -1), at


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads: the child uses none of them
def test_kills_leave_the_last_whole_step(tmp_path: Path) -> None:
    check_kills(tmp_path, 12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_hundred_kills_leave_the_last_whole_step(tmp_path: Path) -> None:
    check_kills(tmp_path, 200)


def test_a_manifest_that_was_not_finished_is_not_read(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"step": 1})
    (tmp_path / "tier.json.new").write_text('{"format": "trainwright tier 1", "su')
    assert read_manifest(tmp_path) == {"step": 1}
    (tmp_path / "tier.json").write_text('{"format": "trainwright tier 1", "sum": 1, "body": "{}"}')
    with pytest.raises(UserError, match="begin anew"):
        read_manifest(tmp_path)


def test_a_failed_commit_keeps_what_the_manifest_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = folders(tmp_path, 1)
    first = filled(5000, 1)
    with TierStore.create(places, SMALL) as store:
        store.add({"a": 5000})
        store.write("a", first)
        store.commit(1)
        store.write("a", filled(5000, 2))
        monkeypatch.setattr("trainwright.tiers.store.write_manifest", failing)
        with pytest.raises(TierFault, match="full"):
            store.commit(2)
        store.write("a", filled(5000, 3)).wait()
    with TierStore.open(places) as again:
        into = torch.empty_like(first)
        again.read("a", into).wait()
        assert torch.equal(into, first)


def failing(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_bad_folders_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("")
    one, two = folders(tmp_path, 2)
    for names, match in (
        ([], "at least one folder"),
        ([tmp_path / "absent"], "is not there"),
        ([tmp_path / "file"], "is a file"),
        ([one, tmp_path / "used"], r"holds mine\.txt"),
        ([one, one], "one twice"),
    ):
        with pytest.raises(UserError, match=match):
            TierStore.create(names)
    for options, match in (
        (StoreOptions(read_rate=0), "rate"), (StoreOptions(write_rate=-1.0), "rate"), (StoreOptions(chunk_bytes=5000), "4096"),
        (StoreOptions(buffer_bytes=100), "chunk"), (StoreOptions(num_threads=0), "thread"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=match):
            TierStore.create([one], options)
    with pytest.raises(UserError, match="bytes are needed on the disk"):
        check_room([one, two], [2**60, 2**60])
    assert not any(one.iterdir())
    with TierStore.create([one, two], SMALL) as store:
        with pytest.raises(UserError, match="are free"):
            store.add({"a": 2**60})
        assert store.num_bytes == 0
        store.add({"a": 8})
        for tensor in (torch.empty(3), torch.empty(2, 2)[:, 0], torch.empty(2, device="meta")):
            with pytest.raises(UserError, match="contiguous tensor of 8 bytes"):
                store.write("a", tensor)
        with pytest.raises(UserError, match="nothing of a was"):
            store.read("a", torch.empty(2))
        store.write("a", torch.ones(2))
        store.commit(0)
    with pytest.raises(UserError, match="the 2 folders"):
        TierStore.open([one])
    with pytest.raises(UserError, match=r"there is no tier\.json"):
        TierStore.open([two, one])


def test_memory_in_place_of_a_disk_is_told(tmp_path: Path) -> None:
    place = Path("/dev/shm")
    if file_system(place) != "tmpfs":
        pytest.skip("a tmpfs is needed")
    own = place / f"trainwright-test-{os.getpid()}"
    own.mkdir()
    try:
        with pytest.warns(UserWarning, match="stays in memory"):
            store = TierStore.create([own], SMALL)
        store.add({"a": 8})
        store.write("a", torch.ones(2)).wait()
        store.remove()
        assert not any(own.iterdir())
    finally:
        own.rmdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TierStore.create(folders(tmp_path, 1), SMALL).remove()


def test_declared_rates_are_kept(tmp_path: Path) -> None:
    """Held against the clock from below alone: a slower machine is slower still."""
    options = StoreOptions(chunk_bytes=4096, buffer_bytes=65536, read_rate=400_000.0, write_rate=800_000.0)
    with TierStore.create(folders(tmp_path, 1), options) as store:
        store.add({"a": 81_920})
        store.write("a", filled(81_920, 0)).wait()
        store.read("a", aligned_empty(81_920)).wait()
        for direction, rate in (("read", 400_000.0), ("write", 800_000.0)):
            events = store.traffic._events[direction]
            assert max(event[1] for event in events) - min(event[0] for event in events) >= 81_920 / rate * 0.99
