"""A probe in a process of its own, for a program that goes on: what a probe leaves behind would count as the run's."""

import os
import subprocess
import sys
from pathlib import Path

import simulator
from simulator.errors import ConveyorError, InputError
from simulator.hardware import HardwareProfile, load_hardware

PATIENCE_SECONDS = 1800.0  # it takes two minutes; a driver at fault must not hold up a run for ever

_PROBE = """
import sys
from simulator.errors import ConveyorError
from simulator.probe import probe
try:
    probe(sys.argv[1], quick=sys.argv[2] == "quick")
except ConveyorError as error:
    print(error, file=sys.stderr)
    sys.exit(10 + error.exit_code)
"""


def probe_apart(output: Path, *, quick: bool = False) -> HardwareProfile:
    """`simulator.probe.probe`, and this process stays as small as it was: a probe leaves 100 MiB and a GPU's libraries.

    Raises what the probe raises, and ConveyorError where its process dies or is not done after `PATIENCE_SECONDS`.
    """
    try:
        done = _run_probe(output, quick=quick)
    except subprocess.TimeoutExpired as error:
        raise ConveyorError(
            f"probe: not done after {PATIENCE_SECONDS:.0f} s; name a profile as `hardware`, or see `conveyor doctor`"
        ) from error
    if done.returncode == 0:
        return load_hardware(output)
    said = done.stderr.strip().splitlines()
    reason = said[-1] if said else f"its process ended with {done.returncode}"
    raise (InputError if done.returncode == 10 + InputError.exit_code else ConveyorError)(f"probe: {reason}")


def _run_probe(output: Path, *, quick: bool) -> subprocess.CompletedProcess[str]:
    found_in = [str(Path(simulator.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        # -P: a folder `simulator` where the user stands is not ours.
        [sys.executable, "-P", "-c", _PROBE, str(output.absolute()), "quick" if quick else "whole"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found_in))},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
