"""Plan: a policy with its prediction, its bound, its rivals, and hashes of all that it was made from.

`inputs` and everything below it except `timings` are functions of what was given: the same inputs give the same plan,
byte for byte. A plan carries the model's spec, the machine's profile and the cost table, so it can be replayed and
trained on without looking anything up.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pydantic

from simulator.costs import OperationCosts
from simulator.errors import ConveyorError, InputError
from simulator.hardware import HardwareProfile
from simulator.model import ModelSpec
from simulator.policy import Policy, Workload, check_policy
from simulator.predict import Prediction, StepFigures, predict
from simulator.schema import Schema, identity_hash

PLAN_VERSION = 1


def _stored_version(path: Path | str) -> object:
    """What a JSON file says is its version, or None: plans of other versions have other keys, which would be blamed."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads the whole file says what is wrong with it
    return content.get("version") if isinstance(content, dict) else None


class Limits(Schema):
    """Bytes that a run may take in each tier."""

    device_memory_bytes: int = pydantic.Field(gt=0)
    host_memory_bytes: int = pydantic.Field(gt=0)
    nvme_memory_bytes: int = pydantic.Field(default=0, ge=0)

    def bytes_of(self, tier: str) -> int:
        """The limit of a tier by name: device, host or nvme."""
        return int(getattr(self, f"{tier}_memory_bytes"))


class ModelInput(Schema):
    """The model in a few figures; its spec is in `Plan.model`."""

    path: str = ""
    family: str
    num_parameters: int
    num_layers: int
    hidden_size: int


class HardwareInput(Schema):
    """The machine by name; its profile is in `Plan.hardware`."""

    name: str


class CostsInput(Schema):
    """The cost table in short; the table is in `Plan.costs`."""

    num_entries: int
    folded_runs: tuple[str, ...] = ()


class InputHashes(Schema):
    """Identity hashes: equal hashes, equal inputs."""

    model: str  # of the spec: where the model lies does not matter
    hardware: str  # device, capacities, versions
    hardware_rates: str  # all measured rates
    workload: str
    limits: str
    costs: str = ""  # empty: no operation was measured


class PlanInputs(Schema):
    """What a plan was made for."""

    model: ModelInput
    hardware: HardwareInput
    workload: Workload
    limits: Limits
    costs: CostsInput | None = None
    hashes: InputHashes


class Bound(Schema):
    """No policy among those considered steps faster than this; `gap` is 1 - bound / prediction."""

    step_seconds: float = pydantic.Field(gt=0)
    gap: float = pydantic.Field(ge=0, le=1)


class Baseline(Schema):
    """A rival's policy priced by the same replay, or why it does not fit."""

    policy: Policy | None = None
    prediction: StepFigures | None = None
    infeasible: str = ""


GREEDY = "greedy"


class SolverReport(Schema):
    """How the plan was found. `gap` is the relative gap that each solve was allowed."""

    name: str
    version: str = ""
    status: str
    gap: float
    counts: dict[str, int] = pydantic.Field(default_factory=dict)

    @property
    def caution(self) -> str:
        """Why there may be a better plan than this one; empty where every program was solved within the gap."""
        return self.status if self.name == GREEDY or self.counts.get("time limits") else ""


class Plan(Schema):
    """A policy for a workload on a machine, and what it will do."""

    version: int = PLAN_VERSION
    plan_hash: str = ""
    inputs: PlanInputs
    policy: Policy
    prediction: StepFigures
    bound: Bound
    baselines: dict[str, Baseline]
    solver: SolverReport
    busy_seconds: dict[str, float]  # how long each resource works in a step
    price_shares: dict[str, float]  # of those seconds: measured, interpolated or roofline
    model: ModelSpec
    hardware: HardwareProfile
    costs: OperationCosts | None = None
    timings: dict[str, float] = pydantic.Field(default_factory=dict)  # of the search, outside the hash

    def hashed(self) -> Self:
        """The plan with its hash."""
        return self.model_copy(update={"plan_hash": self._content_hash()})

    def _content_hash(self) -> str:
        return identity_hash(self.model_dump(mode="json", exclude={"plan_hash", "timings"}))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a plan that `save` wrote. Raises InputError for files that are no plan, or not as they were written."""
        if (version := _stored_version(path)) not in (None, PLAN_VERSION):
            raise InputError(f"{path}: has plan version {version!r}, this version reads {PLAN_VERSION}; plan again")
        plan = super().load(path)
        if plan.plan_hash != plan._content_hash():
            raise InputError(
                f"{path}: its content does not match its plan_hash {plan.plan_hash!r}: edited or damaged; plan again"
            )
        try:
            check_policy(plan.policy, plan.model, plan.inputs.workload)
        except ConveyorError as error:
            raise type(error)(f"{path}: {error}") from error
        return plan

    def replay(self, hardware: HardwareProfile | None = None) -> Prediction:
        """Replay the plan's policy, on its own machine or on another one."""
        costs = self.costs if hardware is None else None
        return predict(self.model, self.inputs.workload, self.policy, hardware or self.hardware, costs)


def plan_inputs(
    model: ModelSpec,
    workload: Workload,
    hardware: HardwareProfile,
    limits: Limits,
    costs: OperationCosts | None,
    *,
    model_path: str = "",
) -> PlanInputs:
    """The inputs' figures and hashes."""
    return PlanInputs(
        model=ModelInput(
            path=model_path,
            family=model.family,
            num_parameters=model.num_parameters,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
        ),
        hardware=HardwareInput(name=hardware.name),
        workload=workload,
        limits=limits,
        costs=None if costs is None else CostsInput(num_entries=len(costs.entries), folded_runs=costs.folded_runs),
        hashes=InputHashes(
            model=identity_hash(model),
            hardware=hardware.identity_hash,
            hardware_rates=identity_hash([[f.label, f.figure.value] for f in hardware.figures()]),
            workload=identity_hash(workload),
            limits=identity_hash(limits),
            costs="" if costs is None else identity_hash(costs),
        ),
    )


def require_same_inputs(plan: Plan, *, model: ModelSpec | None = None, workload: Workload | None = None) -> None:
    """Refuse a plan that was made for another model or workload. Raises InputError naming every field that differs.

    Whether a machine bears a plan is another question: `simulator.hardware_check` answers it.
    """
    differences: list[str] = []
    if model is not None:
        differences += _differences("model", plan.model, model)
    if workload is not None:
        differences += _differences("workload", plan.inputs.workload, workload)
    if differences:
        raise InputError(f"the plan was made for other inputs: {'; '.join(differences)}; plan again")


def _differences(title: str, planned: Schema, actual: Schema) -> Iterator[str]:
    ours: Mapping[str, Any] = planned.model_dump(mode="json")
    theirs: Mapping[str, Any] = actual.model_dump(mode="json")
    for key in dict.fromkeys((*ours, *theirs)):  # keys at their default may be left out
        value, other = ours.get(key), theirs.get(key)
        if value == other:
            continue
        if isinstance(value, list | dict):
            yield f"{title}.{key} differs"
        else:
            yield f"{title}.{key} is {other!r}, the plan has {value!r}"
