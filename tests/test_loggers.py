"""Loggers: the real packages, without prompt or network; and what happens where one is missing or fails."""

import importlib
import re
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from executor import loggers
from executor.loggers import open_loggers, require_loggers, wandb_mode
from executor.run_directory import load_lines
from executor.schedule import Schedule
from executor.step_log import StepLog
from executor.trainer import Evaluation, StepResult
from simulator.errors import InputError
from tests.small_models import small_model

SETTINGS = {"learning_rate": 1e-3, "data": "rows.jsonl"}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"the network was asked: {address}")
        connect(self, address)

    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail(f"asked {prompt}"))


@pytest.mark.filterwarnings("ignore")  # of the third parties' own
def test_tensorboard_reads_back_what_was_logged(tmp_path: Path, no_network: None) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (board,) = open_loggers(["tensorboard"], tmp_path, SETTINGS)
    for step, loss in enumerate([3.0, 2.5, 2.25]):
        board.log(step, {"loss": loss, "lr": 0.5**step})
    board.close()
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(0, 3.0), (1, 2.5), (2, 2.25)]
    assert [event.value for event in read.Scalars("lr")] == [1.0, 0.5, 0.25]


@pytest.mark.filterwarnings("ignore")
def test_wandb_without_a_key_writes_to_the_run_directory_and_asks_nobody(
    tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (run,) = open_loggers(["wandb"], tmp_path, SETTINGS)
    run.log(0, {"loss": 3.0})
    run.log(1, {"loss": 2.5})
    run.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (written,) = folder.glob("*.wandb")
    content = written.read_bytes()
    assert b"learning_rate" in content
    assert b"loss" in content


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, "disabled"),
        ({"NETRC": "netrc"}, "online"),
    ],
)
def test_wandb_is_online_only_with_a_key(tmp_path: Path, environment: dict[str, str], mode: str) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    if "NETRC" in environment:
        environment = {"NETRC": str(tmp_path / "netrc")}
    assert wandb_mode({"HOME": str(tmp_path), **environment}) == mode


class RecordedTrackio(types.ModuleType):
    """trackio's three functions as version 0.43 declares them, writing down how they are called."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.calls: list[tuple[str, Any]] = []
        self.__spec__ = importlib.machinery.ModuleSpec("trackio", None)

    def init(self, project: str, name: str | None = None, config: dict[str, Any] | None = None) -> None:
        self.calls.append(("init", (project, name, config)))

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", (metrics, step)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_trackio_is_called_as_it_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedTrackio()
    monkeypatch.setitem(sys.modules, "trackio", recorded)
    (logger,) = open_loggers(["trackio"], tmp_path / "first", SETTINGS)
    logger.log(4, {"loss": 1.5})
    logger.close()
    assert recorded.calls == [
        ("init", ("conveyor", "first", SETTINGS)),
        ("log", ({"loss": 1.5}, 4)),
        ("finish", None),
    ]


def test_a_package_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"loggers: wandb and trackio are not installed; pip install wandb trackio"):
        require_loggers(["wandb", "trackio"])
    require_loggers([])


def test_a_logger_that_cannot_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedTrackio()
    monkeypatch.setattr(recorded, "init", lambda **named: 1 / 0)
    monkeypatch.setitem(sys.modules, "trackio", recorded)
    with pytest.raises(InputError, match=r"loggers: trackio cannot start \(ZeroDivisionError"):
        open_loggers(["trackio"], tmp_path, SETTINGS)


class FailingLogger:
    def log(self, step: int, values: Any) -> None:
        raise OSError("no route to host")

    def close(self) -> None:
        """Nothing is open."""


def test_a_logger_that_fails_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    log = StepLog(
        tmp_path, small_model(1), Schedule(1.0, max_steps=4), tokens_per_step=8, steps_per_epoch=2, log_every=2,
        loggers=[FailingLogger()], say=said.append,
    )  # fmt: skip
    for step in range(4):
        result = StepResult(step, 2.0 - step, 1.0, 1.0, num_targets=7, num_tokens=6, reported=0.5 * step)
        log.step(
            result, steps_applied=step, seconds=0.5, data_wait_seconds=0.1, device_peak_bytes=None, host_peak_bytes=3,
            allocator_retries=None, lost_seconds={"waiting for data": 0.1 * step},
        )  # fmt: skip
    log.evaluation(3, Evaluation(1.25, 70), seconds=0.5, improved=True)
    assert [line.split()[0] for line in said] == ["FailingLogger", "step", "step", "step", "evaluation"]
    assert [line.split()[1] for line in said if line.startswith("step")] == ["1/4", "3/4", "4/4"]
    rows = load_lines(tmp_path / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [0.5, 1.0, 1.5, 2.0]
    assert {row["tokens_per_second"] for row in rows} == {12.0}
    assert [row["lost_seconds"]["waiting for data"] for row in rows] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    wanted = {
        "step", "epoch", "tokens", "loss", "lr", "grad_norm", "seconds", "tokens_per_second", "tflops",
        "device_peak_bytes", "host_peak_bytes", "allocator_retries", "data_wait_seconds", "lost_seconds",
    }  # fmt: skip
    assert wanted <= rows[0].keys()
    for row in rows:
        flops, number, tokens = re.fullmatch(r"(\d) N T, N = (\d+), T = (\d+)", row["tflops_formula"]).groups()
        assert row["tflops"] == pytest.approx(int(flops) * int(number) * int(tokens) / row["seconds"] / 1e12)
    assert load_lines(tmp_path / "evaluations.jsonl")[0]["eval_loss"] == 1.25


def test_no_logger_is_imported_unless_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers.importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    assert open_loggers([], tmp_path, SETTINGS) == []
