"""The front door: what each command accepts, what it refuses, how it ends."""

import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import simulator.policy
from analysis import commands
from analysis.cli import main, parse
from analysis.options import COMMANDS, SAVE_LEVELS
from simulator.errors import ConveyorError, InfeasiblePlan, InputError

ROOT = Path(__file__).parents[1]
NAMES = [command.name for command in COMMANDS]
PLAN = "plan --model m --hardware h --sequence-length 8 --tokens-per-step 64"


@pytest.fixture
def every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse what every command takes, whatever it does."""
    for name in NAMES:
        monkeypatch.setattr(commands, name, lambda arguments: 0, raising=False)


def test_help_imports_nothing_but_the_standard_library() -> None:
    program = f"""
import sys
before = set(sys.modules)
from analysis import cli, commands
for name in {NAMES}:
    setattr(commands, name, None)
for argv in ([], *([name] for name in {NAMES})):
    try:
        cli.main([*argv, "--help"])
    except SystemExit as ended:
        assert ended.code == 0
ours = {{"analysis", "simulator"}}
new = {{module.partition(".")[0] for module in set(sys.modules) - before}} - ours
print("imported:", *sorted(new - set(sys.stdlib_module_names)))
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1].rstrip() == "imported:"
    assert all(f"usage: conveyor {name}" in run.stdout for name in NAMES)


@pytest.mark.usefixtures("every_command")
def test_options_of_plan() -> None:
    line = (
        "plan --model qwen --hardware h200 --sequence-length 1024 --tokens-per-step 98304 --device-memory 24GiB "
        "--host-memory 96GB --nvme-memory 0 --state-format auto --gradient-format bf16 --clipping layerwise "
        "--precision fp32 --eager --costs costs.json --calibrate runs/a runs/b --micro-batch-size 4 "
        "--freeze model.layers.0.* *.bias --packed --output plan.json --json --explain --what-if device-memory=8GiB "
        "--what-if tokens-per-step=8..64 --figures sweeps --largest --longest-sequence --price-per-hour 2.5"
    )
    assert vars(parse(line.split())) == {
        "command": "plan",
        "model": "qwen",
        "hardware": "h200",
        "sequence_length": 1024,
        "tokens_per_step": 98304,
        "device_memory": 24 * 2**30,
        "host_memory": 96 * 10**9,
        "nvme_memory": 0,
        "state_format": "auto",
        "gradient_format": "bf16",
        "clipping": "layerwise",
        "precision": "fp32",
        "compiled": False,
        "costs": "costs.json",
        "calibrate": ["runs/a", "runs/b"],
        "micro_batch_size": 4,
        "freeze": ["model.layers.0.*", "*.bias"],
        "packed": True,
        "output": "plan.json",
        "json": True,
        "explain": True,
        "what_if": ["device-memory=8GiB", "tokens-per-step=8..64"],
        "figures": "sweeps",
        "largest": True,
        "longest_sequence": True,
        "price_per_hour": 2.5,
    }
    least = parse(PLAN.split())
    assert (least.explain, least.what_if, least.figures) == (False, [], None)
    assert (least.largest, least.longest_sequence, least.price_per_hour) == (False, False, None)
    assert (least.device_memory, least.host_memory, least.nvme_memory) == (None, None, 0)
    assert (least.state_format, least.gradient_format, least.clipping) == ("fp32", "fp32", "global")
    assert (least.precision, least.compiled, least.calibrate, least.json) == ("bf16", None, [], False)


@pytest.mark.usefixtures("every_command")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("probe --output h.json", {"output": "h.json"}),
        (
            "measure --model m --hardware h --sequence-length 8 --micro-batch-size 1 2 4 --compiled --output c.json",
            {"micro_batch_size": [1, 2, 4], "compiled": True, "precision": "bf16", "output": "c.json"},
        ),
        (
            "simulate plan.json --hardware h200 --trace t.json",
            {"plan": "plan.json", "hardware": "h200", "trace": "t.json"},
        ),
        ("simulate plan.json", {"hardware": None, "trace": None}),
        ("train run.yaml seed=3 lr=4", {"config": "run.yaml", "overrides": ["seed=3", "lr=4"], "dry_run": False}),
        ("train run.yaml --steps 5 seed=3", {"config": "run.yaml", "overrides": ["seed=3"], "steps": 5}),
        (
            "train --plan p.json --data synthetic --output out seed=3 --dry-run x.y=1",
            {"config": None, "plan": "p.json", "data": "synthetic", "output": "out", "overrides": ["seed=3", "x.y=1"]},
        ),
        ("train runs/a=b/run.yaml", {"config": "runs/a=b/run.yaml", "overrides": []}),
        (
            "bench matrix.yaml --hardware h --case a --case b --results r.json --clip clipped --no-plain",
            {"matrix": "matrix.yaml", "case": ["a", "b"], "results": "r.json", "clip": "clipped", "no_plain": True},
        ),
        ("plot runs/a runs/b --output figures", {"runs": ["runs/a", "runs/b"], "output": "figures"}),
        ("plot --fidelity runs/a list.json", {"runs": ["runs/a", "list.json"], "fidelity": True}),
        ("doctor", {"command": "doctor"}),
    ],
)
def test_options_of_the_others(line: str, expected: dict[str, object]) -> None:
    arguments = vars(parse(line.split()))
    assert {key: arguments[key] for key in expected} == expected


@pytest.mark.usefixtures("every_command")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "required: COMMAND"),
        ("paln", "invalid choice: 'paln'"),
        ("plan --model m", "required: --hardware, --sequence-length, --tokens-per-step"),
        (f"{PLAN} --device-memory 24apples", "argument --device-memory: '24apples' is not a size"),
        (f"{PLAN} --host-memory -1GiB", "argument --host-memory"),
        (f"{PLAN} --state-format fp8", "invalid choice: 'fp8'"),
        (f"{PLAN} --compiled --eager", "not allowed with argument --compiled"),
        (f"{PLAN} --output missing/plan.json", "'missing/plan.json': there is no folder 'missing'"),
        (f"{PLAN} --output /", "'/' is a folder"),
        ("probe --output missing/hardware.json", "there is no folder 'missing'"),
        ("simulate plan.json --trace missing/trace.json", "there is no folder 'missing'"),
        (f"{PLAN} --out plan.json", "unrecognized arguments: --out plan.json"),
        (f"{PLAN} --micro-batch-size 0", "'0' is not a whole number of at least 1"),
        (f"{PLAN} --micro-batch-size {'9' * 5000}", "is no number of anything"),
        ("measure --model m --hardware h --sequence-length 1.5", "'1.5' is not a whole number of at least 1"),
        ("train run.yaml --dry-run other.yaml", "unrecognized arguments: other.yaml"),
        ("plot", "required: RUN_DIR"),
        (f"{PLAN} --price-per-hour $2", "'$2' is not a number, as 2.5"),
        (f"{PLAN} --output nowhere/", "'nowhere/' is a folder; name a file in it"),
        ("bench m.yaml --hardware h --warm-seconds nan", "'nan' is not a number of seconds between 0 and a day"),
        ("bench m.yaml --hardware h --warm-seconds -1", "'-1' is not a number of seconds between 0 and a day"),
        ("doctor seed=3", "unrecognized arguments: seed=3"),
    ],
)
def test_a_wrong_command_line_exits_with_2(line: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "exit_code", "lines"),
    [
        (InputError("run.yaml: no"), 2, ["conveyor: error: run.yaml: no"]),
        (InputError("one\ntwo"), 2, ["conveyor: error: one", "conveyor: error: two"]),
        (InfeasiblePlan("short", resource="host", short_bytes=1), 2, ["conveyor: error: short"]),
        (ConveyorError("broke"), 1, ["conveyor: error: broke"]),
        (KeyboardInterrupt(), 130, ["conveyor: error: interrupted"]),
    ],
)
def test_errors_on_purpose_are_sentences(
    error: BaseException,
    exit_code: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: Namespace) -> int:
        raise error

    monkeypatch.setattr(commands, "doctor", fail)
    assert main(["doctor"]) == exit_code
    assert capsys.readouterr().err.splitlines() == lines


def test_an_error_nobody_expected_shows_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "doctor", lambda arguments: 1 // 0)
    assert main(["doctor"]) == 1
    assert "test_cli.py" in (err := capsys.readouterr().err)
    assert err.endswith("ZeroDivisionError: integer division or modulo by zero\n")


def test_the_commands_own_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(commands, "doctor", lambda arguments: 1)
    assert main(["doctor"]) == 1
    assert signal.getsignal(signal.SIGINT) is before, "the front door leaves signals as it found them"


@contextmanager
def front_door(body: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose `doctor` is `body`, once it printed `ready`. Killed at the end if it still runs."""
    program = f"""
import hashlib, sys, time
from analysis import cli, commands
def doctor(arguments):
{body}
commands.doctor = doctor
sys.exit(cli.main(["doctor"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_first_interrupt_lets_the_command_save() -> None:
    body = """
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("saved", flush=True)
        raise
"""
    with front_door(body) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "saved\n", "conveyor: error: interrupted\n")


@pytest.mark.parametrize("num_lines", [1, 100_000], ids=["at its end", "while it prints"])
def test_a_command_whose_reader_has_gone_ends_with_a_sentence(num_lines: int, tmp_path: Path) -> None:
    body = f"""
    from pathlib import Path
    print("ready", flush=True)
    while not Path({str(tmp_path / "gone")!r}).exists():
        time.sleep(0.01)
    for _ in range({num_lines}):
        print("more")
    return 0
"""
    with front_door(body) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        (tmp_path / "gone").touch()
        assert process.wait(timeout=30) == 1
        assert process.stderr.read() == "conveyor: error: standard output was closed before all was written\n"


def test_the_second_interrupt_ends_at_once_even_a_native_call() -> None:
    body = """
    def work():
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # many minutes in C, where Python sees no signal

    try:
        print("ready", flush=True)
        work()
    except KeyboardInterrupt:  # the interrupt came before the call: save, which takes as long
        work()
"""
    with front_door(body) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None, "after one interrupt the command goes on"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


def test_the_levels_to_measure_are_those_there_are() -> None:
    assert tuple(simulator.policy.SAVE_LEVELS) == SAVE_LEVELS
