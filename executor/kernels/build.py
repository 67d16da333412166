"""Compile a C++ source with the system's compiler, once per source, compiler, flags and processor.

The library lands in the user's cache folder and is loaded through ctypes, which releases the interpreter lock for
every call.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

# No -ffast-math in any form: it reorders arithmetic, and linking with it makes the whole process flush denormals.
# -fopenmp-simd reads the vectorisation pragmas and needs no OpenMP runtime.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fopenmp-simd", "-fPIC", "-shared", "-pthread")
PROCESSOR_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
COMPILERS = ("c++", "g++", "clang++")


class BuildError(Exception):
    """No library: says why in one sentence."""


def load_library(source: Path, *, cache: Path | None = None) -> ctypes.CDLL:
    """The compiled `source`, from `cache` (default: the user's cache folder) or compiled now.

    Any number of processes may race: each compiles to a file of its own and renames it into place. Raises BuildError.
    """
    compiler = find_compiler()
    if cache is None:
        cache = _cache_folder()
    library = cache / f"{source.stem}-{_fingerprint(source, compiler)}.so"
    if library.exists():
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            pass  # damaged: compile again
    _compile(source, compiler, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the compiled {source.name} does not load ({error})") from error


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX if set, else the first of COMPILERS on the path. Raises BuildError."""
    chosen = os.environ.get("CXX", "").strip()
    for command in [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    looked_for = f"$CXX is {chosen!r}, which is not there" if chosen else f"looked for {', '.join(COMPILERS)}"
    raise BuildError(f"no C++ compiler ({looked_for})")


def _compile(source: Path, compiler: list[str], library: Path) -> None:
    message = ""
    for processor_flags in PROCESSOR_FLAGS:
        partial = None
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=library.parent, suffix=".partial")
            os.close(descriptor)
            command = [*compiler, *FLAGS, *processor_flags, str(source), "-o", partial]
            result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if result.returncode == 0:
                with open(partial, "rb") as compiled:
                    os.fsync(compiled.fileno())  # a library cut short by a crash would kill the process that loads it
                os.replace(partial, library)
                return
            message = (result.stderr or result.stdout).strip() or f"exit code {result.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{source.name} was not compiled ({error})") from error
        finally:
            if partial is not None:
                Path(partial).unlink(missing_ok=True)
    errors = [line for line in message.splitlines() if "error" in line.lower()]
    raise BuildError(f"{shlex.join(compiler)} does not compile {source.name} ({(errors or message.splitlines())[0]})")


def _fingerprint(source: Path, compiler: list[str]) -> str:
    """A hash of all that decides the machine code, so that a shared home folder serves different machines."""
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(compiler)} does not run ({error})") from error
    parts = [source.read_text(), *compiler, version.stdout, *FLAGS, repr(PROCESSOR_FLAGS), *_processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> list[str]:
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # Every core lists the same; the order of a set would differ between processes.
    listed = sorted({line for line in lines if line.split(":")[0].strip() in names})
    return [platform.machine(), platform.processor(), *platform.libc_ver(), *listed]


def _cache_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "conveyor" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    # A read-only home: compile for this process alone. A fixed name under /tmp could be someone else's trap.
    return Path(tempfile.mkdtemp(prefix="conveyor-kernels-"))
