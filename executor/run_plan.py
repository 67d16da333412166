"""The plan of a run that names none: that of the run it goes on with, else a new one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from executor.config import SYNTHETIC_DATA, TrainConfig, load_config
from executor.data.hub import PREFIX
from executor.data.source import named_path
from executor.folder import require_nameable
from executor.launch import require_possible, settled
from executor.run_directory import CONFIG, PLAN
from planner.plan import Limits, Plan
from planner.search import plan as search
from simulator.costs import OperationCosts
from simulator.errors import InputError
from simulator.hardware import HardwareProfile, load_hardware
from simulator.hardware_check import CAPACITY_TOLERANCE
from simulator.model import ModelSpec, read_model_config
from simulator.probe import current_device, current_host
from simulator.probe_apart import probe_apart
from simulator.units import format_bytes

# What finds that a name leads nowhere; what else is wrong with data is found when they are read.
_READ_BY: dict[str, Callable[[str], object]] = {
    "plan": Plan.load,
    "model": read_model_config,
    "data": partial(named_path, what="data"),
    "eval_data": partial(named_path, what="eval_data"),
    "hardware": load_hardware,
    "costs": OperationCosts.load,
}
PROFILE = "hardware.json"  # of this machine, in the run directory
# What a plan depends on beside the step, which the plan itself tells.
_PLANNED_FOR = ("hardware", "costs", "device_memory", "host_memory", "nvme_memory")


def earlier_plan(config: TrainConfig, model: ModelSpec, *, say: Callable[[str], None] = print) -> Plan | None:
    """The plan in the directory of a run that goes on; None where there is none, or it is no plan for `config`.

    It is one unless the model, the machine or a setting that plans depend on has changed. `say` hears which it is.
    """
    path = Path(config.output) / PLAN
    if config.resume == "never" or config.plan is not None or not path.is_file():
        return None
    try:
        plan = Plan.load(path)
        _require_same_settings(config, load_config(path.with_name(CONFIG)))
        _require_same_machine(config, plan.hardware)
        if config.costs and OperationCosts.load(config.costs) != plan.costs:
            raise InputError(f"costs: {config.costs} holds others than it was made with")
        require_possible(plan, model)
        settled(config, plan)
    except InputError as error:
        say(f"{path}: this plan of the run so far is not taken ({error})")
        return None
    say(f"going on with the plan of the run so far, {path}")
    return plan


def require_named_files(config: TrainConfig) -> None:
    """Raise InputError for all names of a config that lead nowhere, a line each, before long work on any of them."""
    mistakes = []
    for key, read in _READ_BY.items():
        name = getattr(config, key)
        if name is None or name == SYNTHETIC_DATA or name.startswith(PREFIX):
            continue
        if config.plan is not None and key in ("hardware", "costs"):
            continue  # of no effect, which `settled` says
        try:
            require_nameable(name, what=key)
            read(name)
        except InputError as error:
            mistakes.append(error)
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise InputError("\n".join(map(str, mistakes)))


def new_plan(
    config: TrainConfig, model: ModelSpec, folder: Path | None = None, *, say: Callable[[str], None] = print
) -> Plan:
    """Plan a run for the hardware that it names, or for this machine, whose profile is then left in `folder`.

    `folder` is the run directory unless it is given. Raises InputError for wrong files, InfeasiblePlan where nothing
    fits.
    """
    if config.hardware:
        hardware = load_hardware(config.hardware)
    else:
        say(
            "no hardware profile is named: probing this machine, which takes half a minute to two; what "
            "`conveyor probe` writes can be named as `hardware`"
        )
        folder = folder or Path(config.output)
        folder.mkdir(parents=True, exist_ok=True)
        hardware = probe_apart(folder / PROFILE)
    limits = Limits(
        device_memory_bytes=allowed_bytes("device_memory", config.device_memory, hardware.device.memory_bytes),
        host_memory_bytes=allowed_bytes("host_memory", config.host_memory, hardware.usable_host_bytes),
        nvme_memory_bytes=config.nvme_memory,
    )
    costs = OperationCosts.load(config.costs) if config.costs else None
    compiled = hardware.device.kind == "cuda" if config.compiled == "auto" else config.compiled
    return search(model, config.workload(compiled=compiled), hardware, limits, costs, model_path=str(config.model))


def allowed_bytes(name: str, asked: int | None, capacity_bytes: int) -> int:
    """Bytes that a plan may use: what was asked for by `name`, and never more than the machine has."""
    if asked == 0:
        raise InputError(f"{name}: 0 bytes hold nothing; leave it out for all that the hardware has")
    return min(asked or capacity_bytes, capacity_bytes)


def _require_same_settings(config: TrainConfig, earlier: TrainConfig) -> None:
    changed = [
        f"{key} is {_shown(now)}, was {_shown(before)}"
        for key in _PLANNED_FOR
        if (now := getattr(config, key)) != (before := getattr(earlier, key))
    ]
    if changed:
        raise InputError("; ".join(changed))


def _shown(value: str | int | None) -> str:
    """A setting as its user writes it; numbers are sizes."""
    if value is None:
        return "not set"
    return format_bytes(value) if isinstance(value, int) else value


def _require_same_machine(config: TrainConfig, planned: HardwareProfile) -> None:
    if config.hardware:
        if load_hardware(config.hardware) != planned:
            raise InputError(f"hardware: {config.hardware} holds another profile than it was made with")
        return
    device, host = current_device(), current_host()
    same = (device.kind, device.name, host.num_cores) == (
        planned.device.kind,
        planned.device.name,
        planned.host.num_cores,
    )
    for now, before in ((device, planned.device), (host, planned.host)):
        same = same and abs(now.memory_bytes / before.memory_bytes - 1) <= CAPACITY_TOLERANCE
    if not same:
        raise InputError("it was made for another machine, or for another share of its memory")
