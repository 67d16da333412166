"""MegaTrain's step program: proven by the checker, priced as by hand, its memory and traffic as torch's own."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from analysis.paper_models import PaperModel, load_models
from simulator.check import check
from simulator.hardware import load_hardware
from simulator.megatrain import InputHome, Variant, build_megatrain, issue_order
from simulator.megatrain_costs import (
    LAZYTRAIN_PHASES,
    MEGATRAIN_PHASES,
    MegaTrainPricing,
    allocated_bytes,
    host_bytes,
    persistent_device_bytes,
)
from simulator.model import ModelSpec
from simulator.program import Kind, Operation, Resource, StepProgram
from simulator.replay import replay
from simulator.timeline import Timeline

MODELS = load_models()
SEVEN = MODELS["qwen2.5-7b"]
HOMES: tuple[InputHome, ...] = ("host", "recompute", "device", "host", "device", "recompute", "recompute")
VARIANTS = {
    "published": Variant(),
    "one buffer": Variant(double_buffering=False),
    "one slab": Variant(gradient_slabs=1),
    "every input": Variant(checkpoint_interval=1),
    "no recompute of kept inputs": Variant(checkpoint_interval=3, recomputes_kept=False, frees_inputs=True),
    "homes": Variant(input_homes=HOMES, recomputes_kept=False, frees_inputs=True),
    "no clipping": Variant(phases=(Kind.UPDATE, Kind.LOAD_WEIGHTS)),
}


def small(num_layers: int = 7, *, tied: bool = False) -> ModelSpec:
    sizes = PaperModel(
        source="a toy", hidden_size=64, intermediate_size=128, num_layers=num_layers, num_heads=4, num_kv_heads=2,
        head_dim=16, vocab_size=256, tied_embeddings=tied, projection_bias=True,
    )  # fmt: skip
    return sizes.spec()


def replayed(model: ModelSpec, rows: int, length: int, machine: str, variant: Variant) -> Timeline:
    pricing = MegaTrainPricing(model, rows, length, load_hardware(machine))
    program = build_megatrain(model, rows * length, variant)
    return replay(program, pricing.price, pricing.size, pricing.sharing)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_variant_is_proven(name: str, tied: bool) -> None:
    check(build_megatrain(small(tied=tied), 128, VARIANTS[name]))


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5, 9])
def test_depths_that_do_not_divide_into_blocks_are_proven(num_layers: int) -> None:
    check(build_megatrain(small(num_layers), 128, Variant()))


def kinds(program: StepProgram, kind: Kind) -> list[Operation]:
    return [operation for operation in program.steady if operation.kind is kind]


def test_a_layer_goes_forward_three_times_and_its_weights_come_three_times() -> None:
    program = build_megatrain(small(), 128, Variant())
    assert [operation.block for operation in kinds(program, Kind.RECOMPUTE)] == [5, 6, 7, 1, 2, 3, 4]
    assert {operation.level for operation in kinds(program, Kind.BACKWARD) if operation.block} == {"input"}
    loads = [operation for operation in kinds(program, Kind.LOAD_WEIGHTS) if operation.resource is Resource.H2D]
    assert sorted(operation.block for operation in loads) == sorted([*range(1, 8)] * 3)


def test_the_phases_run_one_after_the_other_while_the_gpu_waits() -> None:
    model = SEVEN.scaled(num_layers=4).spec()
    timeline = replayed(model, 16, 1024, "h200", Variant())
    # A step counts from the end of the last one's work on the GPU: it begins with that one's phases.
    first = min(span.start for span in timeline.spans if span.resource == "compute")
    rates = (2.176e9, 4.231e9, 9.520e9, 8.462e9)  # 7.616 B parameters in 3.5, 1.8, 0.8 and 0.9 s
    phases = sum(model.num_parameters / rate for rate in rates)
    # Before them the embedding's gradient goes home and to its place, after them the first layer comes.
    embedding = 152064 * 3584
    by_hand = 2 * embedding / 55.4e9 + embedding / 9.520e9 + phases + 2 * 233_057_792 / 55.5e9
    assert first == pytest.approx(by_hand, rel=0.01)
    on_host = sorted((span for span in timeline.spans if span.resource == "host"), key=lambda span: span.start)
    order = list(dict.fromkeys(span.kind for span in on_host))
    assert order == ["finish_gradient", "clip", "update", "load_weights", "zero_gradient"]


def test_a_step_by_hand() -> None:
    """Qwen2.5-7B, 25 rows of 8,192 on a GH200, from the figures of the datasheet alone."""
    tokens, layers, length = 25 * 8192, 28, 8192
    matrices = 2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944
    products = 2 * matrices * tokens / (989.4e12 * 0.715)
    # Between 4,096 and 32,768 the share of the peak is a line over the logarithm: a third of the way.
    attention = 2 * 3584 * length**2 * 25
    forward = 989.4e12 * (0.337 + (0.354 - 0.337) / 3)
    backward = 989.4e12 * (0.207 + (0.256 - 0.207) / 3)
    hbm = 4e12 * 0.887
    rotated = (28 + 4) * 128
    once = products + attention / forward + tokens * (10 * 18944 + 84 * 3584 + 20 * rotated) / hbm
    back = 2 * products + 2 * attention / backward + tokens * (18 * 18944 + 220 * 3584 + 36 * rotated) / hbm
    head = 3 * 2 * 3584 * 152064 * tokens / (989.4e12 * 0.715)
    host = 7.0 / 2.5  # 3.5 + 1.8 + 0.8 + 0.9 s on the reference host, whose DRAM moves 200 GB/s nominal, not 500
    by_hand = layers * (3 * once + back) + head + host
    step = replayed(SEVEN.spec(), 25, length, "gh200-96gb", Variant()).step_seconds
    assert step == pytest.approx(by_hand, rel=0.02)  # left out: unflattening, logits, the embedding, the first load


def test_one_buffer_saves_two_layers_and_costs_what_was_hidden() -> None:
    model = SEVEN.scaled(num_layers=6).spec()
    two, one = (issue_order(model, 1024, Variant(double_buffering=both)) for both in (True, False))
    assert persistent_device_bytes(two) - persistent_device_bytes(one) == 2 * 2 * 233_057_792
    fast, slow = (replayed(model, 16, 1024, "h200", Variant(double_buffering=both)) for both in (True, False))
    copies = 3 * 6 * 2 * 233_057_792 / 55.5e9  # every load is on the way to a passage now
    assert 0.5 * copies < slow.step_seconds - fast.step_seconds < 1.2 * copies


def test_device_memory_does_not_grow_with_depth_but_for_kept_inputs() -> None:
    """By hand: embedding and head, two flat buffers and two templates of a layer; bf16."""
    for num_layers in (28, 180):
        order = issue_order(SEVEN.scaled(num_layers=num_layers).spec(), 1024, Variant())
        assert persistent_device_bytes(order) == 2 * (2 * 152064 * 3584 + 3584 + 4 * 233_057_792)


def test_host_memory_holds_weights_twice_gradients_and_moments() -> None:
    model = SEVEN.spec()
    slabs = 2 * (12 * 233_057_792 + 2 * 152064 * 3584 + 3584)
    layers = 28 * 233_057_792
    assert host_bytes(issue_order(model, 1024, Variant())) == 12 * model.num_parameters + 2 * layers + slabs


def test_a_replay_and_the_order_agree_on_the_peak() -> None:
    model = SEVEN.scaled(num_layers=8).spec()
    for variant in (Variant(), Variant(checkpoint_interval=1), Variant(frees_inputs=True, recomputes_kept=False)):
        timeline = replayed(model, 32, 1024, "h200", variant)
        order = allocated_bytes(
            issue_order(model, 32 * 1024, variant), MegaTrainPricing(model, 32, 1024, load_hardware("h200"))
        )
        assert 1.0 <= timeline.peak_bytes["device"] / order < 1.05


def test_inputs_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="7 layers need as many input homes"):
        issue_order(small(), 128, Variant(input_homes=HOMES[:-1]))
    with pytest.raises(ValueError, match="the first of them kept"):
        issue_order(small(), 128, Variant(input_homes=("recompute", *HOMES[1:])))


def test_every_rate_names_where_it_was_measured() -> None:
    for phase in (*MEGATRAIN_PHASES.values(), *LAZYTRAIN_PHASES.values()):
        assert phase.parameters_per_second.source.startswith("measured: 2026-11-29 on one NVIDIA H200 host")


class _Followed(TorchDispatchMode):
    """Bytes that operations read and write outside products and attention, and bytes that are alive."""

    PRODUCTS = ("mm", "addmm", "bmm", "attention")
    FREE = ("detach", "empty", "empty_like", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.traffic = self.level = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        if not (func.is_view or name in self.FREE or any(part in name for part in self.PRODUCTS)):
            self.traffic += sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        if not func.is_view:
            for tensor in outputs:
                self._lives(tensor.untyped_storage())
        return result

    def _lives(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive.add(key)
            self.level += num_bytes
            self.peak = max(self.peak, self.level)
            weakref.finalize(storage, self._gone, key, num_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        self.alive.discard(key)
        self.level -= num_bytes


def followed(sizes: PaperModel, rows: int, length: int) -> tuple[dict[str, int], dict[str, int]]:
    """Traffic and peak of the forward without a graph, and of forward and backward, of transformers' own layer."""
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    config = Qwen2Config(
        hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size, vocab_size=16,
        num_attention_heads=sizes.num_heads, num_key_value_heads=sizes.num_kv_heads,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    layer = Qwen2DecoderLayer(config, 0).to(torch.bfloat16)
    hidden = torch.randn(rows, length, sizes.hidden_size, dtype=torch.bfloat16)
    rotary = Qwen2RotaryEmbedding(config)(hidden, torch.arange(length)[None])
    gradient = torch.randn_like(hidden)

    def run() -> Any:
        return layer(hidden, attention_mask=None, position_embeddings=rotary)

    with _Followed() as forward, torch.no_grad():
        run()
    hidden.requires_grad_(True)
    with _Followed() as both:
        torch.autograd.grad(run(), (hidden, *layer.parameters()), gradient)
    traffic = {"forward": forward.traffic, "both": both.traffic}
    return traffic, {"forward": forward.peak, "both": both.peak}


@pytest.mark.parametrize(("hidden_size", "heads", "kv_heads", "mlp"), [(256, 8, 2, 1024), (512, 8, 8, 2048)])
def test_traffic_and_memory_of_a_layer_are_torchs_own(hidden_size: int, heads: int, kv_heads: int, mlp: int) -> None:
    sizes = PaperModel(
        source="a toy", hidden_size=hidden_size, intermediate_size=mlp, num_layers=1, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=hidden_size // heads, vocab_size=16, tied_embeddings=False,
        projection_bias=True,
    )  # fmt: skip
    length = 128
    (few, peak_few), (many, peak_many) = (followed(sizes, rows, length) for rows in (4, 8))
    # What does not grow with the rows (gradients of weights, rotary tables) cancels.
    pricing = {rows: MegaTrainPricing(sizes.spec(), rows, length, load_hardware("h200")) for rows in (4, 8)}

    def grown(measure: Callable[[MegaTrainPricing], float]) -> float:
        return measure(pricing[8]) - measure(pricing[4])

    hbm = load_hardware("h200").hbm_bytes_per_second.value
    forward = grown(lambda p: hbm * _memory_seconds(p, Kind.FORWARD))
    both = grown(lambda p: hbm * _memory_seconds(p, Kind.BACKWARD))
    assert many["forward"] - few["forward"] == pytest.approx(forward, rel=0.005)
    assert many["both"] - few["both"] == pytest.approx(both, rel=0.005)
    for key, kind in (("forward", Kind.FORWARD), ("both", Kind.BACKWARD)):
        operation = Operation("any", kind, Resource.COMPUTE, 1, level="input" if kind is Kind.BACKWARD else "")
        memory = grown(lambda p, operation=operation: p.transient_bytes(operation))  # type: ignore[misc]
        assert peak_many[key] - peak_few[key] == pytest.approx(memory, rel=0.05)


def _memory_seconds(pricing: MegaTrainPricing, kind: Kind) -> float:
    """A layer's price less its products and its attention."""
    from simulator import formulas

    operation = Operation("any", kind, Resource.COMPUTE, 1, level="input" if kind is Kind.BACKWARD else "")
    hardware, model = pricing.hardware, pricing.model
    products = formulas.layer_matmul_flops(model, 1, pricing.tokens)
    attention = formulas.layer_attention_flops(model, 1, pricing.rows, pricing.sequence_length)
    rate = hardware.matmul_flops_per_second("bf16", pricing.tokens)
    forward = hardware.attention_flops_per_second("bf16", pricing.sequence_length, "forward")
    backward = hardware.attention_flops_per_second("bf16", pricing.sequence_length, "backward")
    passes = 1 if kind is Kind.FORWARD else 3
    computing = passes * products / rate + attention / forward + (passes - 1) * attention / backward
    return pricing.price(operation).seconds - computing
