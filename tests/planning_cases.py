"""Models, machines and prices small enough to plan by hand or by exhaustion."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

from planner.plan import Limits
from simulator.costs import MeasuredCost, OperationCosts, operation_key, shape_hash
from simulator.figure import Figure
from simulator.hardware import AttentionPoint, HardwareProfile, Link, LinkPoint, LinkRates, MatmulPoint
from simulator.machine import Device, Disk, Host
from simulator.model import BlockSpec, ModelSpec, TensorSpec
from simulator.policy import EAGER_SAVE_LEVELS, HEAD_CHUNK_TOKENS, SAVE_LEVELS, Policy, SaveLevel, Workload
from simulator.predict import predict
from simulator.program import Kind, Operation, Resource

MIB = 2**20
STATE_BYTES = 10


def figure(value: float) -> Figure:
    return Figure(value=value, source="measured: set by a test")


def toy_model(
    num_layers: int,
    *,
    layer_elements: int,
    edge_elements: int = 128,
    hidden_size: int = 128,
    num_kinds: int = 1,
    tied: bool = False,
) -> ModelSpec:
    """A decoder of blocks with one tensor each; sizes in elements, multiples of 128."""

    def block(kind: str, variant: str, elements: int) -> BlockSpec:
        tensor = TensorSpec(name="weight", shape=(elements // 128, 128), offset=0)
        return BlockSpec.model_validate({"kind": kind, "variant": variant, "tensors": (tensor,)})

    layers = [block("layer", f"variant_{kind}", layer_elements) for kind in range(num_kinds)]
    kinds = (block("embedding", "embedding", edge_elements), *layers, block("head", "untied", edge_elements))
    return ModelSpec(
        family="llama",
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=hidden_size,
        vocab_size=128,
        tied_embeddings=tied,
        kinds=kinds,
        kind_of_block=(0, *(1 + layer % num_kinds for layer in range(num_layers)), num_kinds + 1),
        num_parameters=num_layers * layer_elements + 2 * edge_elements,
    )


def seven_billion() -> ModelSpec:
    """Qwen2.5-7B's sizes: what the program and the replay see of it."""
    layer, edge = 233_057_792, 152_064 * 3_584
    spec = toy_model(28, layer_elements=layer, edge_elements=edge, hidden_size=3584)
    return spec.model_copy(
        update={"intermediate_size": 18944, "num_heads": 28, "num_kv_heads": 4, "head_dim": 128, "vocab_size": 152_064}
    )


def machine(
    *,
    device_bytes: int = 2**40,
    host_bytes: int = 2**40,
    link_bytes_per_second: float = 1e9,
    duplex: float = 1.0,
    dram_bytes_per_second: float = 1e12,
    inline: bool = False,
) -> HardwareProfile:
    """A machine whose memory is its own to the last byte, but for 1 MiB of the host's."""
    link, both = figure(link_bytes_per_second), figure(link_bytes_per_second * duplex)
    rates = LinkRates(h2d=both, d2h=both)
    return HardwareProfile(
        name="toy",
        device=Device(kind="cpu" if inline else "cuda", name="toy", memory_bytes=device_bytes),
        host=Host(cpu="toy", num_cores=1, memory_bytes=host_bytes),
        disk=Disk(free_bytes=0),
        execution="inline" if inline else "streams",
        shared_memory=inline,
        matmul=(MatmulPoint(precision="bf16", tokens=1, flops_per_second=figure(1e12)),),
        attention=(
            AttentionPoint(
                precision="bf16",
                sequence_length=1,
                backend="toy",
                forward_flops_per_second=figure(1e12),
                backward_flops_per_second=figure(1e12),
            ),
        ),
        hbm_bytes_per_second=figure(1e13),
        link=Link(
            points=(
                LinkPoint(direction="h2d", num_bytes=MIB, bytes_per_second=link),
                LinkPoint(direction="d2h", num_bytes=MIB, bytes_per_second=link),
            ),
            duplex=rates,
            duplex_host_busy=rates,
        ),
        host_dram_bytes_per_second=figure(dram_bytes_per_second),
        host_optimizer_bytes_per_second=figure(dram_bytes_per_second),
        launch_seconds=figure(1e-6),
        context_bytes=figure(0),
        host_base_bytes=figure(MIB),
    )


@dataclass(frozen=True)
class LayerPrices:
    """Seconds and bytes of one micro-batch of one row in one layer."""

    forward: dict[SaveLevel, float]
    backward: dict[SaveLevel, float]
    kept: dict[SaveLevel, int]
    transient: dict[SaveLevel, int]


def price_table(
    model: ModelSpec,
    workload: Workload,
    policy: Policy,
    *,
    layers: dict[int, LayerPrices],
    update_host: float = 0.0,
    update_device: float = 0.0,
    edge: float = 0.0,
    beside_copies: float = 1.0,
    load: float | None = None,
    store: float | None = None,
) -> OperationCosts:
    """Explicit prices of every operation but copies, which the machine's link prices unless `load`/`store` do.

    These are of a layer's weights, 2 bytes a parameter; its state takes 10.

    `layers` is keyed by layer kind. `edge` is the price of the embedding's and the head's passes; gradients' rounding,
    norm and report are free. Updates and copies of the edges are free.
    """
    entries: dict[str, MeasuredCost] = {}

    def put(operation: Operation, seconds: float, *, transient: int = 0, kept: int = 0) -> None:
        entries[operation_key(operation, model, workload, policy)] = MeasuredCost(
            seconds=seconds, transient_bytes=transient, kept_bytes=kept, source="set by a test"
        )

    def operation(kind: Kind, block: int, level: str = "", resource: Resource = Resource.COMPUTE) -> Operation:
        return Operation("", kind, resource, block, 0, 0, level)

    for kind, prices in layers.items():
        block = model.kind_of_block.index(kind)
        for level in prices.forward:
            put(
                operation(Kind.FORWARD, block, level),
                prices.forward[level],
                transient=min(prices.transient.values()),
                kept=prices.kept[level],
            )
            put(operation(Kind.BACKWARD, block, level), prices.backward[level], transient=prices.transient[level])
        put(operation(Kind.UPDATE, block), update_device)
        put(operation(Kind.UPDATE, block, resource=Resource.HOST), update_host)
        if load is not None:
            put(operation(Kind.LOAD_WEIGHTS, block, resource=Resource.H2D), load)
            put(operation(Kind.LOAD_STATE, block, resource=Resource.H2D), STATE_BYTES / 2 * load)
        if store is not None:
            put(operation(Kind.STORE_GRADIENT, block, resource=Resource.D2H), store)
            put(operation(Kind.STORE_STATE, block, resource=Resource.D2H), STATE_BYTES / 2 * store)
    for block in (0, model.head):
        put(operation(Kind.UPDATE, block), 0.0)
        put(operation(Kind.UPDATE, block, resource=Resource.HOST), 0.0)
        put(operation(Kind.LOAD_WEIGHTS, block, resource=Resource.H2D), 0.0)
        put(operation(Kind.STORE_GRADIENT, block, resource=Resource.D2H), 0.0)
        put(operation(Kind.CLIP, block), 0.0)
    put(operation(Kind.FORWARD, 0), edge)
    put(operation(Kind.BACKWARD, 0), edge)
    put(operation(Kind.LOSS, model.head), edge)
    for block in range(model.num_blocks):
        put(operation(Kind.FINISH_GRADIENT, block), 0.0)
        put(operation(Kind.CLIP, block), 0.0)
    for kind in (Kind.CLIP, Kind.REPORT):
        put(operation(kind, -1), 0.0)
    put(operation(Kind.LOAD_BATCH, -1, resource=Resource.H2D), 0.0)
    return OperationCosts(
        hardware="toy",
        shape=shape_hash(model),
        precision=workload.precision,
        compiled=workload.compiled,
        entries=entries,
        compute_beside_copies=beside_copies,
    )


@dataclass(frozen=True)
class Case:
    """One planning problem: what `plan` and `predict` take."""

    model: ModelSpec
    workload: Workload
    hardware: HardwareProfile
    costs: OperationCosts


SEQUENCE_LENGTH = 2048


def random_case(random: Random, *, max_layers: int = 6, max_rows: int = 4) -> Case:
    """A problem whose compute, copies, updates and host DRAM are all of about the same size."""
    num_layers = random.randint(1, max_layers)
    model = toy_model(
        num_layers,
        layer_elements=128 * random.randint(2000, 8000),
        edge_elements=128 * random.randint(100, 8000),
        num_kinds=random.choice([1, 1, min(2, num_layers)]),
        tied=random.random() < 0.2,
    )
    rows = random.randint(1, max_rows)
    workload = Workload(
        sequence_length=SEQUENCE_LENGTH,
        tokens_per_step=SEQUENCE_LENGTH * rows,
        clipping=random.choice(["global", "global", "layerwise", "none"]),
        gradient_format=random.choice(["bf16", "fp32"]),
        compiled=random.random() < 0.5,
    )
    hardware = machine(
        link_bytes_per_second=1e9,
        duplex=random.choice([1.0, 0.9, 0.6]),
        dram_bytes_per_second=random.choice([1e12, 2.5e9, 1.5e9]),
        inline=random.random() < 0.1,
    )
    copy = model.block(1).num_elements * 2 / 1e9
    scale = copy * random.choice([0.2, 1.0, 4.0])
    levels: tuple[SaveLevel, ...] = tuple(SAVE_LEVELS) if workload.compiled else EAGER_SAVE_LEVELS
    layers = {}
    for kind in sorted({model.kind_of_block[layer] for layer in model.layers}):
        forward = scale * random.uniform(0.5, 1.5)
        step = random.uniform(0.0, 0.3)
        base = random.randint(1, 40) * MIB
        layers[kind] = LayerPrices(
            forward={a: forward * random.uniform(0.95, 1.0) for a in levels},
            backward={a: forward * (2 + step * index) for index, a in enumerate(levels)},
            kept={a: base * (len(levels) - 1 - index) for index, a in enumerate(levels)},
            transient={a: base * random.randint(0, 3) for a in levels},
        )
    policy = Policy(
        micro_batch_rows=1,
        groups=(rows,),
        weight_homes=("device",) * model.num_blocks,
        save_levels=("keep",) * num_layers,
        activation_homes=("device",) * num_layers,
        gradient_homes=("device",) * model.num_blocks,
        optimizer_homes=("device",) * model.num_blocks,
        clipping=workload.clipping,
        gradient_format=workload.gradient_format,
    )
    costs = price_table(
        model,
        workload,
        policy,
        layers=layers,
        update_host=copy * random.choice([0.0, 0.5, 2.0, 8.0]),
        update_device=copy * random.choice([0.0, 0.05]),
        edge=scale * random.choice([0.0, 0.3]),
        beside_copies=random.choice([1.0, 0.9]),
    )
    if random.random() < 0.5:
        # Edges with prices of their own: of the machine's link and optimizer.
        kept = {key: cost for key, cost in costs.entries.items() if ".embedding." not in key and ".head." not in key}
        costs = costs.model_copy(update={"entries": kept})
    return Case(model, workload, hardware, costs)


def random_policy(random: Random, case: Case, *, depth_first: bool = False) -> Policy:
    """Any policy that the builder takes, sensible or not. `depth_first`: some or all layers may be depth-first."""
    model, workload = case.model, case.workload
    rows = random.choice([d for d in range(1, workload.rows_per_step + 1) if workload.rows_per_step % d == 0])
    num_micro_batches = workload.rows_per_step // rows
    cuts = [0, *sorted(random.sample(range(1, num_micro_batches), random.randint(0, num_micro_batches - 1)))]
    groups = tuple(b - a for a, b in pairwise([*cuts, num_micro_batches]))
    interval = random.choice([1, 1, 1, 2, 3])
    choices = EAGER_SAVE_LEVELS if not workload.compiled else tuple(SAVE_LEVELS)
    share = random.choice([0.0, 0.5, 1.0])
    homes = [("host" if random.random() < share else "device") for _ in range(model.num_blocks)]
    if model.tied_embeddings:
        homes[-1] = homes[0]
    streams = random.choice([0.0, 0.5, 1.0])
    weights = ["host" if home == "host" and random.random() < streams else "device" for home in homes]
    weights[0] = weights[-1] = "device"
    gradients = list(homes)
    by_link = random.choice([0.0, 0.0, 0.4, 1.0])
    for layer in model.layers:
        if weights[layer] == "device" and random.random() < by_link:
            homes[layer], gradients[layer] = "streamed", "device"
    levels = ["input" if interval > 1 else random.choice(choices) for _ in range(model.num_layers)]
    waits = random.choice([0.0, 0.0, 0.5, 1.0])
    top = random.choice([0, random.randint(1, model.num_layers), model.num_layers]) if depth_first else 0
    return Policy.model_validate(
        {
            "micro_batch_rows": rows,
            "groups": groups,
            "depth_first_layers": top if interval == 1 else 0,
            "weight_homes": weights,
            "prefetch_depth": random.choice([1, 1, 2, 3]),
            "save_levels": levels,
            "checkpoint_interval": interval,
            "activation_homes": [
                "host" if level == "input" and random.random() < waits else "device" for level in levels
            ],
            "gradient_homes": gradients,
            "optimizer_homes": homes,
            "state_slots": random.choice([2, 2, 3]),
            "state_pace": random.choice([1, 1.5, 2, 4]),
            "head_chunk_tokens": min(HEAD_CHUNK_TOKENS, rows * workload.sequence_length),
            "clipping": workload.clipping,
            "gradient_format": workload.gradient_format,
            "leaving_passes": random.choice([1, 1, 3]),
        }
    )


def eager_case(seed: int, num_layers: int, *, rows: int = 1, max_kinds: int = 1) -> Case:
    """A random problem with two save levels."""
    for attempt in range(1000):
        case = random_case(Random(1000 * seed + attempt), max_layers=num_layers, max_rows=rows)
        kinds = set(case.model.kind_of_block[1:-1])
        if case.model.num_layers == num_layers and case.workload.rows_per_step == rows and len(kinds) <= max_kinds:
            workload = case.workload.model_copy(update={"compiled": False})
            return Case(case.model, workload, case.hardware, case.costs.model_copy(update={"compiled": False}))
    raise AssertionError("no such case")


def joint_case(seed: int, num_layers: int) -> Case:
    """A random problem of one micro-batch with all save levels of compiled layers, of one kind."""
    for attempt in range(1000):
        case = random_case(Random(f"joint.{seed}.{attempt}"), max_layers=num_layers, max_rows=1)
        kinds = set(case.model.kind_of_block[1:-1])
        if case.model.num_layers == num_layers and case.workload.compiled and len(kinds) == 1:
            return case
    raise AssertionError("no such case")


def tight_limits(random: Random, case: Case) -> Limits:
    """Limits between the least and the most that random policies take: most of the time they bind."""
    figures = [
        predict(case.model, case.workload, random_policy(random, case), case.hardware, case.costs).figures
        for _ in range(12)
    ]
    device = sorted(f.device_peak_bytes for f in figures)[random.randint(2, 9)]
    host = sorted(f.host_peak_bytes for f in figures)[random.choice([6, 11, 11])]
    return Limits(device_memory_bytes=device, host_memory_bytes=host)
