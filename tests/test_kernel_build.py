"""The host kernel is compiled once, survives races and damage, and is missed with one clear warning."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from optimizer_cases import BETAS, EPS, differing, make_case, make_scalars, numpy_step

from executor.adamw import adamw_host
from executor.kernels import build, host_adamw
from executor.kernels.build import BuildError, load_library

SOURCE_TEXT = 'extern "C" int answer() { return 42; }\n'
ROOT = Path(__file__).parents[1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    try:
        build.find_compiler()
    except BuildError:
        pytest.skip("no C++ compiler")
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE_TEXT)
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_source_is_compiled_once(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert load_library(source, cache=cache).answer() == 42
    (library,) = cache.iterdir()
    written = library.stat().st_mtime_ns, library.stat().st_ino
    assert load_library(source, cache=cache).answer() == 42
    assert [(path.stat().st_mtime_ns, path.stat().st_ino) for path in cache.iterdir()] == [written]


def test_another_source_or_flag_is_another_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    load_library(source, cache=cache)
    source.write_text(SOURCE_TEXT.replace("42", "43"))
    assert load_library(source, cache=cache).answer() == 43
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    load_library(source, cache=cache)
    assert len(files(cache)) == 3


def test_a_damaged_library_is_compiled_again(source: Path, tmp_path: Path) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    load_library(source, cache=whole)
    damaged.mkdir()
    (name,) = files(whole)
    (damaged / name).write_bytes(b"")  # what a crash can leave of a file that was never flushed
    assert load_library(source, cache=damaged).answer() == 42
    assert files(damaged) == [name]


def test_processes_that_race_all_get_a_whole_library(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    script = (
        "import sys; from pathlib import Path; from executor.kernels.build import load_library; "
        "print(load_library(Path(sys.argv[1]), cache=Path(sys.argv[2])).answer())"
    )
    command = [sys.executable, "-c", script, str(source), str(cache)]
    racers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [racer.communicate()[0].strip() for racer in racers] == ["42"] * 3
    assert len(files(cache)) == 1


def test_a_source_that_does_not_compile_names_the_first_error(source: Path, tmp_path: Path) -> None:
    source.write_text('extern "C" int answer() { return fortytwo; }\n')
    cache = tmp_path / "cache"
    with pytest.raises(BuildError, match=r"does not compile answer\.cpp .*fortytwo"):
        load_library(source, cache=cache)
    assert files(cache) == []


def test_a_missing_or_broken_compiler_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        load_library(source, cache=tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match=r"false does not compile answer\.cpp \(exit code 1\)"):
        load_library(source, cache=tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        load_library(source, cache=tmp_path)


def test_a_cache_folder_that_cannot_be_made_is_no_obstacle(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("a file where the cache folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    assert load_library(source).answer() == 42


def test_without_a_compiler_one_warning_and_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(host_adamw, "_loaded", [])
    state, gradient = make_case(torch.bfloat16, torch.bfloat16, 1000, "usual")
    scalars = make_scalars(torch.float32)
    options = {"num_decay_elements": 500, "betas": BETAS, "eps": EPS, "threads": 2}
    expected = numpy_step(state, gradient, scalars, 500)
    with pytest.warns(RuntimeWarning, match="no-such-compiler.*; install a C\\+\\+ compiler"):
        adamw_host(*state.planes, gradient, scalars, **options)
    assert differing(state, expected) == {}
    expected = numpy_step(state, gradient, scalars, 500)
    adamw_host(*state.planes, gradient, scalars, **options)  # a second warning would be an error
    assert differing(state, expected) == {}


def test_the_compiled_kernel_leaves_the_process_alone() -> None:
    library = host_adamw.host_library()
    if library is None:
        pytest.skip("no C++ compiler")
    # ctypes releases the interpreter lock for a CDLL and keeps it for its subclass PyDLL.
    assert type(library) is ctypes.CDLL
    assert "-ffast-math" not in build.FLAGS
    # A library linked with -ffast-math would have set the processor to flush this to zero.
    assert np.float32(1e-45) * np.float32(1.0) > 0
