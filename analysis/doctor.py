"""What this machine has, what is missing, and what to do about it: `conveyor doctor`."""

import ctypes
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Literal, NamedTuple

from analysis.shadow import DISTRIBUTION, shadowed_packages
from simulator.native_output import silent_native_stdout
from simulator.system import free_disk_bytes, host_memory_available_bytes, host_memory_limit_bytes, package_versions
from simulator.units import GIB, MIB, format_bytes

Verdict = Literal["ok", "warning", "blocker"]

# Without these nothing trains; the others only take features away.
INDISPENSABLE = ("torch", "transformers", "safetensors", "numpy", "pydantic", "pyyaml", "rich")
LITTLE_DISK_BYTES = 10 * GIB
LITTLE_MEMORY_BYTES = GIB // 2  # torch and transformers cannot even be imported with less
PINNED_BYTES = 64 * MIB


class Check(NamedTuple):
    """One row: what was looked at, what was found, whether that is enough, and what to do if not."""

    subject: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


def check_machine() -> list[Check]:
    """All checks. None raises: what cannot be found out is a row that says so."""
    return [
        check_python(sys.version_info[:3]),
        *check_packages(required_packages()),
        check_import_names(),
        check_device(),
        check_host_memory(),
        check_pinned_memory(),
        check_disk(Path.cwd()),
        check_solver(),
        check_compiler(),
    ]


def print_checks(checks: list[Check], *, width: int | None = None) -> None:
    """A table on standard output, `width` characters wide (None: the terminal's), and a line that counts."""
    try:
        _print_table(checks, width=width)
    except ModuleNotFoundError:  # rich is one of the packages that may be missing
        for check in checks:
            print(": ".join(filter(None, (check.subject, check.found, check.verdict, check.advice))))
    num_blockers = sum(check.verdict == "blocker" for check in checks)
    num_warnings = sum(check.verdict == "warning" for check in checks)
    print(f"{num_blockers} blockers, {num_warnings} warnings")


def _print_table(checks: list[Check], *, width: int | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "found", "", "what to do"):
        table.add_column(title, overflow="fold")
    colours = {"ok": "green", "warning": "yellow", "blocker": "bold red"}
    for check in checks:
        verdict = f"[{colours[check.verdict]}]{check.verdict}[/]"
        table.add_row(check.subject, escape(check.found), verdict, escape(check.advice))
    Console(width=width).print(table)


def check_python(version: tuple[int, ...]) -> Check:
    found = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version < (3, 11):
        return Check("python", found, "blocker", "install Python 3.11 or newer")
    return Check("python", found)


def required_packages() -> dict[str, str]:
    """Lowest version of each package that Conveyor needs, from the installed metadata or from pyproject.toml."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
        requirements = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    pairs = (re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", requirement) for requirement in requirements)
    return {match.group(1).lower(): match.group(2) for match in pairs if match}


def check_packages(required: dict[str, str]) -> list[Check]:
    """A row for each required package: missing or too old is a blocker for the indispensable ones."""
    checks = []
    for name, lowest in required.items():
        severity: Verdict = "blocker" if name in INDISPENSABLE else "warning"
        advice = f"install {name} {lowest} or newer"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(name, "missing", severity, advice))
            continue
        too_old = _release(version) < _release(lowest)
        checks.append(Check(name, version, severity if too_old else "ok", advice if too_old else ""))
    return checks


def check_import_names() -> Check:
    if sentences := shadowed_packages():
        return Check("import names", "; ".join(sentences), "blocker", "use an environment of Conveyor's own")
    return Check("import names", f"all from {Path(__file__).resolve().parents[1]}")


def check_device() -> Check:
    """The GPU that torch sees, with its driver and memory. Without one Conveyor trains on the CPU."""
    try:
        import torch
    except Exception as error:  # a broken CUDA library fails with OSError, a mixed install with anything
        return Check("device", f"torch cannot be imported: {error}", "blocker", "install torch again")
    driver = _nvidia_driver()
    if not torch.cuda.is_available():
        if driver:
            advice = "install a torch build for CUDA that this driver supports"
            return Check("device", f"CPU; NVIDIA driver {driver} is loaded, torch sees no GPU", "warning", advice)
        return Check("device", f"CPU, {os.cpu_count()} cores ({platform.machine()}); no GPU")
    try:
        torch.ones(2, device="cuda").sum().item()
    except RuntimeError as error:  # a GPU that this build has no code for, or that another process holds alone
        advice = "install a torch build for this GPU and driver, or free the GPU"
        return Check("device", f"the GPU does not compute: {first_line(error)}", "blocker", advice)
    rows = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        rows.append(f"{torch.cuda.get_device_name(index)}, {format_bytes(free)} of {format_bytes(total)} free")
    return Check("device", f"{'; '.join(rows)}; driver {driver or 'unknown'}, CUDA {torch.version.cuda}")


def check_host_memory() -> Check:
    """What this process may take, by the container's limit too. A bare process with torch takes more than a GiB."""
    limit, available = host_memory_limit_bytes(), host_memory_available_bytes()
    found = f"{format_bytes(limit)} at most, {format_bytes(available)} available now"
    if available < LITTLE_MEMORY_BYTES:
        return Check("host memory", found, "blocker", "end other programs, or raise the container's limit")
    return Check("host memory", found)


def check_pinned_memory() -> Check:
    """The limit on locked memory (`ulimit -l`), and on a machine with a GPU whether memory can be pinned at all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{format_bytes(soft)} by `ulimit -l`"
    if refusal := _pinning_refusal():
        advice = "raise the limit on locked memory (ulimit -l, or the container's memlock)"
        return Check("pinned memory", f"{found}; {refusal}", "blocker", advice)
    return Check("pinned memory", found)


def _pinning_refusal() -> str:
    """Why a GPU's driver refuses to pin host memory, or an empty string. Streamed weights and gradients need it."""
    try:
        from executor.store import cuda_pinning

        pinning = cuda_pinning()
    except Exception:  # the rows of packages and device say what is wrong with torch
        return ""
    if pinning is None:
        return ""
    with mmap.mmap(-1, PINNED_BYTES) as region:
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        code = pinning.register(address, PINNED_BYTES)
        if not code:
            pinning.unregister(address)
    return f"the driver refuses to pin {format_bytes(PINNED_BYTES)}: {pinning.describe(code)}" if code else ""


def check_disk(folder: Path) -> Check:
    free = free_disk_bytes(folder)
    found = f"{format_bytes(free)} free at {folder}"
    if not os.access(folder, os.W_OK):
        return Check("disk", f"{found}, which cannot be written", "warning", "set output to a folder of your own")
    if free < LITTLE_DISK_BYTES:
        return Check("disk", found, "warning", "checkpoints take 12 bytes a parameter: choose a roomier output")
    return Check("disk", found)


def check_solver() -> Check:
    """HiGHS is loaded and solves max x, x <= 1.5, x whole."""
    advice = "install highspy; until then the greedy planner answers"
    try:
        import highspy

        with silent_native_stdout():
            solver = highspy.Highs()
            solver.setOptionValue("output_flag", False)
            x = solver.addVariable(lb=0, ub=1.5, type=highspy.HighsVarType.kInteger)
            solver.maximize(x)
            answer = solver.val(x)
    except Exception as error:  # whatever a native library can fail with is the finding
        return Check("solver", f"HiGHS does not load: {error}", "warning", advice)
    if answer != 1.0:
        return Check("solver", f"HiGHS answers max x <= 1.5, x whole, with {answer}", "warning", advice)
    return Check("solver", f"HiGHS {package_versions().get('highspy', '')} loads and solves")


def check_compiler() -> Check:
    """A C++ compiler that builds a shared library with OpenMP, as the host optimizer's kernel needs."""
    advice = "install g++; until then the host optimizer is torch's own and layers run eagerly"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))), None)
    if compiler is None:
        return Check("C++ compiler", "none", "warning", advice)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <cmath>\n#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n")
        command = [compiler, "-std=c++17", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(source) + ".so"]
        try:
            built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Check("C++ compiler", f"{compiler} does not run: {error}", "warning", advice)
    if built.returncode:
        reason = next((line for line in built.stderr.splitlines() if "error" in line), "no reason given")
        return Check("C++ compiler", f"{compiler} fails: {reason}", "warning", advice)
    return Check("C++ compiler", f"{compiler} builds with OpenMP")


def _nvidia_driver() -> str:
    """The loaded driver's version, or an empty string. The kernel module says it, whatever torch was built for."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else ""


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13): numbers up to the first part that is none, trailing zeros dropped."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
