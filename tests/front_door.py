"""Command lines through the front door, for tests of what users do wrong; conftest.py has the two fixtures."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.cli import main

WORKLOAD = ["--hardware", "cpu-2-core", "--sequence-length", "16", "--tokens-per-step", "64", "--precision", "fp32"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, plan.json and data.txt, for tests that only read them."""
    from tiny_model import save_pretrained, tiny_config  # transformers: not for every test that collects

    folder = tmp_path_factory.mktemp("given")
    save_pretrained(tiny_config(), folder / "model")
    (folder / "data.txt").write_text("It was a bright cold day in April. " * 100)
    assert main(["plan", "--model", str(folder / "model"), *WORKLOAD, "--output", str(folder / "plan.json")]) == 0
    return folder


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must end with exit code `code`, and returns what it complains of."""

    def run(*argv: object, code: int = 2) -> str:
        capsys.readouterr()
        try:
            found = main([str(argument) for argument in argv])
        except SystemExit as ended:  # argparse
            found = ended.code
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert found == code, err
        return err

    return run


def training(given: Path, output: Path, *settings: object, data: object = None, plan: object = None) -> list[object]:
    data, plan = data or given / "data.txt", plan or given / "plan.json"
    return ["train", "--plan", plan, "--data", data, "--output", output, "max_steps=4", "learning_rate=1e-2", *settings]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
