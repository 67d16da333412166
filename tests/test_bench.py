"""The benchmark's rows, stages and records; and plain PyTorch, which is itself compared with a plainer one."""

import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain_trainer import plain_train
from tiny_models import tiny_config as tiny_model_config

import simulator
from analysis.bench import Row, bench, load_matrix, table
from analysis.plain_torch import BETAS, EPSILON, PlainTorch
from executor.ideal import measure_ideal
from executor.planes import split_planes
from executor.record import RunRecord, load_results
from executor.run import Interrupted, Run
from simulator.costs import OperationCosts, comparable_levels
from simulator.errors import InputError, OutOfMemory
from simulator.hardware import load_hardware
from simulator.ideal import ideal_steps
from simulator.model import load_model_spec, model_spec
from simulator.policy import SAVE_LEVELS, Workload
from tests.tiny import tiny_batches, tiny_config

CATALOGUE = Path(simulator.__file__).parent / "catalogue"


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    path = tmp_path / "matrix.yaml"
    path.write_text(
        f"rows:\n  - {{case: tiny, model: {tmp_path}/config.json, sequence_length: 16, tokens_per_step: 128}}\n"
        f"  - {{case: short, model: {tmp_path}/config.json, num_layers: 2, sequence_length: 16, tokens_per_step: 64}}\n"
    )
    return path


def test_a_row_is_planned_trained_and_recorded_beside_its_ideal(matrix: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = bench(
        load_matrix(matrix).rows, load_hardware("cpu-2-core"), tmp_path / "out", warm_seconds=0.0,
        results=tmp_path / "results.json", say=said.append,
    )  # fmt: skip
    records = load_results(tmp_path / "results.json")
    assert [record.case for record in records] == [
        "tiny-clipped", "tiny-unclipped", "short-clipped", "short-unclipped",
    ]  # fmt: skip
    for record in records:
        assert record.status == "ok"
        assert record.measured is not None
        assert record.ideal is not None
        assert record.ideal.tflops > 0
        assert record.steps_timed >= 5
        clipped = [factor < 1 for factor in record.clip_factors]
        assert all(clipped) if record.case.endswith("-clipped") else not any(clipped)
    assert records[2].inputs["model"]["num_layers"] == 2  # type: ignore[index, call-overload]
    assert all(result.plain_seconds is not None and result.plain_seconds > 0 for result in found)
    for case in ("tiny-clipped", "short-unclipped"):
        assert case in table(found)
    assert max(map(len, table(found).splitlines())) <= 100
    for slower, words in ((1e2, " +9900%"), (1e6, " +99999%")):  # a burst of load leaves every line in its width
        measured, predicted = records[0].measured, records[0].predicted
        assert measured is not None
        assert predicted is not None
        slow = measured.model_copy(update={"tflops": predicted.tflops / slower})
        late = replace(found[0], records=(records[0].model_copy(update={"measured": slow}),))
        assert max(map(len, table([late]).splitlines())) <= 100
        assert words in table([late])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rows: []", "rows"),
        ("rows: [{case: a/b, model: m, sequence_length: 1, tokens_per_step: 1}]", "case"),
        ("rows: [{case: a, model: m, sequence_length: 0, tokens_per_step: 1}]", "sequence_length"),
        ("rows: [{case: a, model: m, sequence_length: 1, tokens_per_step: 1, device_memory: much}]", "device_memory"),
        ("rows: [{case: a, model: m, sequence_length: 1, tokens_per_step: 1, device_memory: 0}]", "device_memory"),
        ("rows: [{case: a, model: m, sequence_length: 32, tokens_per_step: 65}]", "rows.0: tokens_per_step 65 is not"),
        (
            "rows: [{case: a, model: m, sequence_length: 32, tokens_per_step: 64, micro_batch_size: 5}]",
            "rows.0: micro_batch_size 5 does not divide the 2 rows",
        ),
        ("rows: [{case: a, model: m, sequence_length: 1, tokens_per_step: 1099511627776}]", "rows.0: tokens_per_step"),
        ("rows:" + 2 * "\n- {case: a, model: m, sequence_length: 1, tokens_per_step: 1}", "the case a; give each"),
        ("columns: []", "columns"),
    ],
)
def test_a_wrong_matrix_is_refused_with_its_key(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        load_matrix(path)


def test_a_gpu_that_is_not_here_is_told(matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="--hardware h200: has a GPU, and torch finds none here"):
        bench(load_matrix(matrix).rows, load_hardware("h200"), tmp_path / "out")


@pytest.mark.parametrize("name", ["h200", "fidelity"])
def test_the_committed_matrices_are_readable(name: str) -> None:
    root = Path(__file__).parents[1]
    rows = load_matrix(root / f"analysis/matrices/{name}.yaml").rows
    assert len({row.case for row in rows}) == len(rows)
    assert all((root / row.model).is_file() for row in rows)


def test_a_run_that_fails_is_recorded_and_the_next_one_starts(
    matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: Run) -> None:
        if run.directory.name == "tiny-clipped":
            raise OutOfMemory("device memory ran out")
        real(run)

    real = Run.prepare
    monkeypatch.setattr(Run, "prepare", full)
    said: list[str] = []
    found = bench(
        load_matrix(matrix).rows, load_hardware("cpu-2-core"), tmp_path / "out", clips=["clipped"], with_ideal=False,
        with_plain=False, warm_seconds=0.0, results=tmp_path / "results.json", say=said.append,
    )  # fmt: skip
    records = load_results(tmp_path / "results.json")
    assert [(record.case, record.status) for record in records] == [
        ("tiny-clipped", "out_of_memory"), ("short-clipped", "ok"),
    ]  # fmt: skip
    assert any("tiny-clipped" in line and "device memory ran out" in line for line in said)
    assert "out_of_memory: device memory ran out" in table(found)


def test_what_was_measured_before_an_interrupt_is_recorded(
    matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run: Run) -> None:
        if run.directory.name == "short-unclipped":
            raise Interrupted("stopped")
        real(run)

    real = Run.prepare
    monkeypatch.setattr(Run, "prepare", stopped)
    with pytest.raises(Interrupted):
        bench(
            load_matrix(matrix).rows[1:], load_hardware("cpu-2-core"), tmp_path / "out", with_plain=False,
            warm_seconds=0.0, results=tmp_path / "results.json", say=lambda words: None,
        )  # fmt: skip
    (record,) = load_results(tmp_path / "results.json")
    assert (record.case, record.status, record.ideal) == ("short-clipped", "ok", None)


@pytest.mark.parametrize(
    "there", ["an ablation's run", "a run that was killed", "a row of an ablation's name", "a file"]
)
def test_folders_that_runs_would_share_are_found_before_the_first_row(
    matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    monkeypatch.setattr("analysis.bench._planned", lambda *given, **named: pytest.fail("a plan was made before"))
    output, rows, told = tmp_path / "out", load_matrix(matrix).rows, "holds a run already; name another folder"
    if there == "an ablation's run":
        (output / "short-host-optimizer-clipped").mkdir(parents=True)
        (output / "short-host-optimizer-clipped" / "run.json").touch()
    elif there == "a run that was killed":
        (output / "short-clipped").mkdir(parents=True)
        (output / "short-clipped" / "metrics.jsonl").touch()
    elif there == "a file":
        output.touch()
        told = "out is a file; name a folder"
    else:
        rows = (*rows, rows[0].model_copy(update={"case": "tiny-host-optimizer"}))
        told = "both called tiny-host-optimizer-clipped; rename the row"
    with pytest.raises(InputError, match=told):
        bench(rows, load_hardware("cpu-2-core"), output, clips=("clipped",), ablations=("host-optimizer",))


def test_a_row_s_own_costs_price_its_plan(matrix: Path, tmp_path: Path) -> None:
    """Costs of another model's layers are refused, so it is these that are read."""
    costs = str(Path(__file__).parents[1] / "simulator/catalogue/costs/qwen2.5-7b-h200.json")
    row = load_matrix(matrix).rows[0].model_copy(update={"costs": costs})
    with pytest.raises(InputError, match="costs: measured for layers of another model"):
        bench([row], load_hardware("cpu-2-core"), tmp_path / "out", say=lambda line: None)
    missing = row.model_copy(update={"costs": str(tmp_path / "none.json")})
    with pytest.raises(InputError, match=r"none\.json"):
        bench([missing], load_hardware("cpu-2-core"), tmp_path / "out", say=lambda line: None)


@pytest.mark.parametrize("wrong", ["model", "costs", "host_memory", "results", "output"])
def test_what_is_wrong_with_a_later_row_is_said_before_the_first_runs(wrong: str, matrix: Path, tmp_path: Path) -> None:
    """Rows take minutes to hours each."""
    first, last = load_matrix(matrix).rows
    changes = {"model": "none", "costs": "none.json", "host_memory": 1}
    rows = [first, last.model_copy(update={wrong: changes[wrong]}) if wrong in changes else last]
    results = tmp_path / "results.json"
    if wrong == "results":
        results.write_text("{}")
    if wrong == "output":
        (tmp_path / "out" / "short-unclipped").mkdir(parents=True)
        (tmp_path / "out" / "short-unclipped" / "run.json").write_text("{}")
    said: list[str] = []
    reason = {"results": "results.json: is not a list", "output": "short-unclipped holds a run already"}
    with pytest.raises(InputError, match=reason.get(wrong, "^short: ")):
        bench(rows, load_hardware("cpu-2-core"), tmp_path / "out", results=results, say=said.append)
    assert not said
    assert not (tmp_path / "out" / "tiny-clipped").exists()


def test_a_limit_above_the_machine_s_memory_plans_with_what_it_has(matrix: Path, tmp_path: Path) -> None:
    hardware = load_hardware("cpu-2-core")
    row = load_matrix(matrix).rows[0].model_copy(update={"device_memory": 2**60, "host_memory": 2**60})
    (found,) = bench(
        [row], hardware, tmp_path / "out", clips=["clipped"], with_ideal=False, with_plain=False, warm_seconds=0.0,
        say=lambda line: None,
    )  # fmt: skip
    limits = found.plan.inputs.limits
    assert limits.device_memory_bytes == hardware.device.memory_bytes
    assert limits.host_memory_bytes == hardware.host.memory_bytes


def test_more_layers_than_the_model_has_are_refused(matrix: Path, tmp_path: Path) -> None:
    (row,) = (row for row in load_matrix(matrix).rows if row.num_layers)
    with pytest.raises(InputError, match="num_layers"):
        bench([row.model_copy(update={"num_layers": 40})], load_hardware("cpu-2-core"), tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])  # sizes of other names; layers of two kinds
def test_the_ideal_of_a_cut_model_is_measured_for_every_family(family: str) -> None:
    config = tiny_model_config(family)
    workload = Workload(sequence_length=16, tokens_per_step=64, precision="fp32")
    whole = model_spec(config).num_layers
    for num_layers in (whole, whole // 2):
        found = measure_ideal(
            config, workload, micro_batch_rows=2, save_level="keep", num_layers=num_layers, device=torch.device("cpu")
        )
        assert found.num_layers == num_layers
        assert found.step_seconds > 0


def test_the_sweep_of_the_ideal_holds_every_micro_batch_and_level_that_divide_the_step() -> None:
    model = model_spec(tiny_config())
    workload = Workload(sequence_length=1024, tokens_per_step=24 * 1024, compiled=True)
    steps = ideal_steps(model, workload, load_hardware("h200"))
    assert {step.micro_batch_rows for step in steps} == {4, 8, 24}  # 16 does not divide 24, and 32 are more
    assert len(steps) == 18
    seconds = [step.step_seconds for step in steps]
    assert seconds == sorted(seconds)


def test_the_ideal_is_not_sought_at_levels_that_were_not_measured_where_others_were() -> None:
    model = load_model_spec(CATALOGUE / "models/qwen2.5-7b.json")
    costs = OperationCosts.load(CATALOGUE / "costs/qwen2.5-7b-h200.json")

    def levels(sequence_length: int) -> set[str]:
        workload = Workload(
            sequence_length=sequence_length, tokens_per_step=3 * 32768, gradient_format="bf16", compiled=True
        )
        return {step.save_level for step in ideal_steps(model, workload, load_hardware("h200"), costs)}

    assert levels(32768) == {"keep", "budget_70", "input"}
    assert levels(1024) == costs.measured_levels(1024) == {"keep", "budget_70", "budget_50", "input"}
    assert levels(8192) == costs.measured_levels()  # one end only was measured there
    assert costs.measured_levels(8192) == {"keep", "budget_70", "budget_50"}
    fewer = {key: cost for key, cost in costs.entries.items() if ".input." not in key}
    workload = Workload(sequence_length=1024, tokens_per_step=32768, gradient_format="bf16", compiled=True)
    assert comparable_levels(workload, costs.model_copy(update={"entries": fewer})) == tuple(SAVE_LEVELS)


def test_plain_torch_follows_a_plainer_trainer() -> None:
    config, batches = tiny_config(), tiny_batches(3)
    torch.manual_seed(0)
    plain = PlainTorch(config, budget=1.0, max_grad_norm=0.5, device=torch.device("cpu"))
    weights = {name: parameter.detach().float() for name, parameter in plain.model.named_parameters()}

    def cast(master: torch.Tensor) -> torch.Tensor:
        high, low = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
        split_planes(master.detach(), high, low)
        return high

    expected = plain_train(
        config, weights, [(batch.tokens, batch.labels) for batch in batches], micro_batch_rows=2, learning_rate=1e-5,
        betas=BETAS, epsilon=EPSILON, weight_decay=0.0, max_grad_norm=0.5, dtype=torch.bfloat16, cast=cast,
    )  # fmt: skip
    losses = [float(plain.step(batch.tokens, batch.labels, micro_batch_rows=2)) for batch in batches]
    assert losses == pytest.approx(expected.losses, rel=2e-3)
    for index, (name, _) in enumerate(plain.model.named_parameters()):
        moved = plain.master(index) - weights[name].reshape(-1)
        wanted = expected.weights[name].reshape(-1) - weights[name].reshape(-1)
        # bf16 gradients summed in bf16: the direction of nearly every step is the same.
        assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.98, name


def test_an_ablation_is_a_run_of_the_best_plan_without_one_means(matrix: Path, tmp_path: Path) -> None:
    found = bench(
        load_matrix(matrix).rows[1:], load_hardware("cpu-2-core"), tmp_path / "out", warm_seconds=0.0,
        clips=("clipped",), with_ideal=False, with_plain=False, results=tmp_path / "results.json",
        ablations=("host-optimizer", "two-slabs"), say=lambda words: None,
    )  # fmt: skip
    without = found[0].ablations["host-optimizer"]
    assert isinstance(without, RunRecord)
    assert without.case == "short-host-optimizer-clipped"
    assert without.status == "ok"
    assert set(without.policy["optimizer_homes"]) == {"host"} != set(found[0].plan.policy.optimizer_homes)  # type: ignore[index]
    assert found[0].ablations["two-slabs"] == "the plan does without already"
    assert [record.case for record in load_results(tmp_path / "results.json")] == ["short-clipped", without.case]
    lines = table(found).splitlines()
    (ablated,) = (line for line in lines if line.startswith("  host updates only"))
    (whole,) = (line for line in lines if line.startswith("short-clipped"))
    for line, record in ((ablated, without), (whole, found[0].records[0])):
        assert record.predicted is not None
        assert record.measured is not None
        # Beside TFLOPS: below 0 where they were predicted too low. Whole per cents where a busy machine is slow.
        error = record.predicted.tflops / record.measured.tflops - 1
        assert any(words in line for words in (f"{error:+.1%}", f"{error:+.0%}", "+99999%"))


def test_the_page_on_benchmarks_has_every_key_of_a_row_and_a_matrix_that_loads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/benchmark.md").read_text(encoding="utf-8")
    table_rows = re.findall(r"^\| `(\w+)` \| (yes|no) \|", page, re.MULTILINE)
    assert table_rows == [(name, "yes" if f.is_required() else "no") for name, f in Row.model_fields.items()]
    (example,) = re.findall(r"\n((?:    .*\n)*    rows:\n(?:    .*\n)+)", page)
    path = tmp_path / "matrix.yaml"
    path.write_text(textwrap.dedent(example))
    assert [row.case for row in load_matrix(path).rows] == ["small", "capped"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rows: []", "rows: has too few entries, it needs 1"),
        ("rows: 3", "rows: is not a list"),
        ("rows: [3]", "rows.0: is not a table of keys"),
        ("rows: [{case: a, model: m, sequence_lenght: 4, tokens_per_step: 4}]", "did you mean 'sequence_length'?"),
        ("rows: [{case: a, model: m, tokens_per_step: 4}]", "rows.0.sequence_length: is missing"),
        (
            "rows: [{case: a, model: m, sequence_length: 4, tokens_per_step: 4, precision: fp32}]",
            "rows.0.precision: unknown key; there are case, model, num_layers,",
        ),
        (
            "rows: [{case: a, model: m, sequence_length: yes, tokens_per_step: 4}]",
            "rows.0.sequence_length: takes no truth value",
        ),
        ("rows: [{case: .., model: m, sequence_length: 4, tokens_per_step: 4}]", "rows.0.case:"),
    ],
)
def test_what_is_wrong_with_a_matrix_is_said_in_our_words(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_matrix(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)
