"""Facts about this machine and process: memory limits and peaks, disk space, versions. Nothing here needs torch."""

import ctypes
import importlib.metadata
import os
import platform
import shutil
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from simulator.units import KIB

VERSIONED_PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "pulp",
    "highspy",
    "numpy",
    "pandas",
    "matplotlib",
    "pydantic",
)


def host_memory_limit_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may ever use: the tightest cgroup limit, at most the physical memory.

    A container's limit counts, not /proc/meminfo's MemTotal, which shows the whole machine. Reads cgroup v1 and v2,
    every level from this process's own group up to the mount. `root` is where /proc and /sys are found.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_read_limit(folder) for folder in _memory_cgroups(root)]
    return min([physical, *(limit for limit in limits if limit is not None)])


def host_memory_available_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that can be allocated now without swapping or being killed.

    The least of MemAvailable and, for each cgroup level with a limit, limit - usage + page cache, which the kernel
    gives back before it kills.
    """
    rooms = [_kilobytes(root / "proc/meminfo", ("MemAvailable",))]
    for folder in _memory_cgroups(root):
        limit = _read_limit(folder)
        used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            rooms.append(max(0, limit - used + _file_cache_bytes(folder)))
    return min(rooms)


def process_tree_bytes(pid: int | None = None, root: Path = Path("/")) -> int:
    """Anonymous and shared bytes resident now in a process (default: this one) and all its descendants.

    These are the bytes that the kernel cannot drop: heap, and pinned memory, whether registered or allocated by the
    driver. Mapped files and the page cache are left out, as they are given back under pressure. Compile workers count.
    """
    return _resident_bytes(_process_tree(os.getpid() if pid is None else pid, root), root)


def return_freed_memory() -> None:
    """Give the system what this process has freed and its C library holds: after a probe more than 100 MiB.

    Does nothing where the library has no such call (other than glibc).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HostPeak:
    """The peak of `process_tree_bytes` while the context is open, sampled by a thread and whenever `sample` is called.

    A spike shorter than `interval_seconds` can be missed: call `sample` where the code knows that memory is highest.
    """

    def __init__(self, *, interval_seconds: float = 0.05) -> None:
        self.peak_bytes = 0
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-peak", daemon=True)

    def sample(self) -> int:
        """Take one sample. Returns its bytes."""
        return self._record(process_tree_bytes())

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def _watch(self) -> None:
        # Finding the descendants reads a file for every process of the machine, so it is done once a second.
        tree, refresh_at = [], 0.0
        while not self._stop.wait(self._interval_seconds):
            if time.monotonic() >= refresh_at:
                tree, refresh_at = _process_tree(os.getpid(), Path("/")), time.monotonic() + 1.0
            self._record(_resident_bytes(tree, Path("/")))

    def _record(self, num_bytes: int) -> int:
        with self._lock:
            self.peak_bytes = max(self.peak_bytes, num_bytes)
        return num_bytes


def free_disk_bytes(path: Path | str) -> int:
    """Bytes that an ordinary user can still write at `path`, which need not exist yet."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on, as installed. What is missing is left out."""
    versions = {"python": platform.python_version()}
    for name in VERSIONED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _memory_cgroups(root: Path) -> list[Path]:
    """This process's memory cgroup folders, own group first, up to the mount; v1 before v2 where both are mounted."""
    groups: dict[str, str] = {}  # "v1" or "v2" -> path of the own group below the hierarchy's root
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            groups["v1"] = group
        elif number == "0" and not controllers:
            groups["v2"] = group

    folders = []
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount_root, mount_point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        version = {"cgroup": "v1", "cgroup2": "v2"}.get(kind)
        if version not in groups or (version == "v1" and "memory" not in options.split(",")):
            continue
        mount = root / mount_point.lstrip("/")
        own = mount
        # Inside a container the group's path may name levels that its mount does not show; the mount is then own.
        group = groups[version]
        if group.startswith(mount_root) and ".." not in group:
            own = mount / group[len(mount_root) :].lstrip("/")
        folders += [level for level in (own, *own.parents) if level.is_relative_to(mount) and level.is_dir()]
    return folders


def _read_limit(folder: Path) -> int | None:
    """A cgroup's limit in bytes, or None where it has none. v1 writes a huge number for none, which min() drops."""
    limit = _read_int(folder / "memory.max")
    return limit if limit is not None else _read_int(folder / "memory.limit_in_bytes")


def _file_cache_bytes(folder: Path) -> int:
    statistics = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
    prefix = "total_" if "total_active_file" in statistics else ""
    return sum(int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _process_tree(pid: int, root: Path) -> list[int]:
    """`pid` and its descendants. Not every kernel lists children, so parents are read from all processes."""
    children: dict[int, list[int]] = {}
    for process in os.listdir(root / "proc"):
        if process.isdigit():
            # The name, in parentheses, may hold spaces and parentheses; state and parent follow it.
            fields = "".join(_lines(root / "proc" / process / "stat")).rpartition(")")[2].split()
            if len(fields) > 1:  # none where the process ended meanwhile
                children.setdefault(int(fields[1]), []).append(int(process))
    tree = [pid]
    for parent in tree:
        tree += children.get(parent, [])
    return tree


def _resident_bytes(processes: list[int], root: Path) -> int:
    return sum(_kilobytes(root / f"proc/{process}/status", ("RssAnon", "RssShmem")) for process in processes)


def _kilobytes(path: Path, names: tuple[str, ...]) -> int:
    """The sum in bytes of lines `Name:   123 kB`. 0 where the file is gone, as a process that ended."""
    wanted = [line.split() for line in _lines(path) if line.startswith(names)]
    return sum(int(words[1]) * KIB for words in wanted if words[0].removesuffix(":") in names)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _read_int(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None
