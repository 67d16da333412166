"""resume=auto where there is no checkpoint, or nothing but an export to do: begun again, finished, or refused."""

import json
import shutil

import pytest
from front_door import content, steps, training

from analysis.cli import main
from executor.run_directory import load_run


def test_a_run_killed_before_its_export_exports_when_it_is_resumed(given, tmp_path, complaint):
    output = tmp_path / "run"
    complaint(*training(given, output), code=0)
    model = content(output / "model")
    shutil.rmtree(output / "model")
    complete = (output / "run.json").read_bytes()
    complaint(*training(given, output, "resume=auto"), code=0)
    assert (output / "run.json").read_bytes() == complete
    shutil.rmtree(output / "model")
    (output / "run.json").unlink()
    complaint(*training(given, output, "resume=auto"), code=0)
    assert "no step was measured" in json.loads((output / "run.json").read_text())["message"]
    assert content(output / "model") == model
    assert steps(output) == [0, 1, 2, 3]
    assert "the run is complete" in complaint(*training(given, output, "resume=auto"))


@pytest.mark.parametrize("left", ["all of it", "only the model", "a checkpoint without its record", "random tokens"])
def test_resume_auto_without_a_checkpoint_begins_over_nothing_that_is_finished(given, tmp_path, complaint, left):
    output = tmp_path / "run"
    data = "synthetic" if left == "random tokens" else None
    complaint(*training(given, output, "save_every=2" if data is None else "log_every=2", data=data), code=0)
    checkpoints = output / "checkpoints"
    reason = "is a trained model, and there is no checkpoint in"
    if left == "a checkpoint without its record":
        for path in checkpoints.iterdir():
            (path / "checkpoint.json").unlink()
        shutil.rmtree(output / "model")
        (output / "run.json").unlink()
        reason = "step-00000002: the checkpoint has lost its record"
    elif left == "random tokens":
        reason = "run.json: the run is complete, and left no checkpoint"
    else:
        shutil.rmtree(checkpoints)
    if left == "only the model":
        for path in output.iterdir():
            if path.is_file():
                path.unlink()
    before = content(output)
    complained = complaint(*training(given, output, "max_steps=6", "resume=auto", data=data))
    assert reason in complained
    assert "set output to another directory" in complained
    assert content(output) == before


def test_resume_auto_before_the_first_checkpoint_begins_again_and_says_so(given, tmp_path, complaint, capsys):
    output = tmp_path / "run"
    complaint(*training(given, output), code=0)
    expected = content(output / "model")
    shutil.rmtree(output / "model")
    shutil.rmtree(output / "checkpoints")
    (output / "run.json").unlink()  # as a run that was killed in its third step
    lines = (output / "metrics.jsonl").read_text().splitlines(keepends=True)
    (output / "metrics.jsonl").write_text("".join(lines[:2]))
    assert main([str(argument) for argument in training(given, output, "resume=auto")]) == 0
    assert "no checkpoint in" in capsys.readouterr().out
    assert [row["step"] for row in load_run(output).metrics] == [0, 1, 2, 3]
    assert content(output / "model") == expected
