"""The process that tells what training takes beside a model: one that hangs or fails ends the probe with a sentence."""

import pytest

from simulator.bench import process
from simulator.errors import ConveyorError


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_STEP", "import time; time.sleep(600)")
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.2)
    with pytest.raises(ConveyorError, match="took longer than"):
        process.bare_process_bytes("cpu")


def test_a_process_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_STEP", "raise SystemExit(1)")
    with pytest.raises(ConveyorError, match="a process that trains a small model failed"):
        process.bare_process_bytes("cpu")
