"""One AdamW formula: the same bits from numpy, C++ and torch operations, and torch.optim's numbers in fp64."""

import math

import pytest
import torch
from optimizer_cases import (
    BETAS,
    EPS,
    FORMATS,
    REAL,
    State,
    differing,
    make_case,
    make_scalars,
    make_state,
    numpy_step,
)
from torch import Tensor

import executor.adamw
from executor.adamw import adamw_device, adamw_host, clip_scalars, step_scalars
from executor.kernels.host_adamw import host_library
from simulator.errors import InputError

BACKENDS = ["compiled", "torch"]


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(executor.adamw, "host_library", lambda: None)
    elif host_library() is None:
        pytest.skip("no C++ compiler")
    return str(request.param)


def step(state: State, gradient: Tensor, scalars: Tensor, num_decay_elements: int, threads: int = 2) -> None:
    adamw_host(
        *(*state.planes, gradient, scalars),
        num_decay_elements=num_decay_elements,
        betas=BETAS,
        eps=EPS,
        threads=threads,
    )


@pytest.mark.parametrize("kind", ["usual", "any", "fading"])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_every_bit_is_the_formulas(backend: str, formats: tuple[torch.dtype, torch.dtype], kind: str) -> None:
    state, gradient = make_case(*formats, 100_003, kind)
    scalars = make_scalars(REAL[formats[0]])
    for _ in range(3):
        expected = numpy_step(state, gradient, scalars, 70_001)
        step(state, gradient, scalars, 70_001)
        assert differing(state, expected) == {}


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("num_decay_elements", [0, 1, 65_537, 300_000])
def test_threads_and_chunks_do_not_change_bits(backend: str, num_decay_elements: int) -> None:
    start, gradient = make_case(torch.bfloat16, torch.float32, 300_000, "usual")
    scalars = make_scalars(torch.float32)
    expected = numpy_step(start, gradient, scalars, num_decay_elements)
    threads_before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            state = start.to("cpu")
            step(state, gradient, scalars, num_decay_elements, threads)
            assert differing(state, expected) == {}
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("formats", FORMATS)
def test_a_skipped_step_changes_no_bit(backend: str, formats: tuple[torch.dtype, torch.dtype]) -> None:
    state, gradient = make_case(*formats, 50_000, "any")
    state.first_moment[::3] = math.nan
    gradient[5] = math.inf
    before = state.to("cpu")
    step(state, gradient, make_scalars(REAL[formats[0]], apply=0.0, clip=math.nan), 30_000)
    for plane, old in zip(state.planes, before.planes, strict=True):
        assert plane is None or torch.equal(plane.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_nan_weight_is_a_nan_in_the_plane_that_computes(backend: str) -> None:
    payloads = torch.tensor([0x7FFFFFFF, 0x7FFF8000, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32)
    master = payloads.view(torch.float32)
    state = make_state(torch.bfloat16, master, torch.zeros(5), torch.zeros(5))
    assert not state.weights.isnan().all()  # the payloads round away
    step(state, torch.zeros(5), make_scalars(torch.float32), 5)
    assert state.weights.isnan().all()
    assert (state.master.view(torch.int32) == 0x7FC00000).all()


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("formats", FORMATS)
def test_padding_stays_zero(backend: str, formats: tuple[torch.dtype, torch.dtype]) -> None:
    state, gradient = make_case(*formats, 4096, "usual")
    padding = slice(1000, 1024)
    for plane in (*state.planes, gradient):
        if plane is not None:
            plane[padding] = 0
    for _ in range(5):
        step(state, gradient, make_scalars(REAL[formats[0]]), 2048)
    for plane in state.planes:
        assert plane is None or not plane[padding].view(torch.uint8).any()


def test_denormals_are_kept_where_the_process_flushes_them() -> None:
    if host_library() is None:
        pytest.skip("no C++ compiler")
    count = 200_000
    gradient = torch.full((count,), 1e-18)
    state = make_state(torch.float32, torch.zeros(count), torch.zeros(count), torch.zeros(count))
    scalars = torch.tensor([1.0, 1.0, 1.0, 1e-3, 1.0])
    expected = numpy_step(state, gradient, scalars, 0)
    assert 0 < float(expected.second_moment.max()) < torch.finfo(torch.float32).tiny
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        step(state, gradient, scalars, 0)
    finally:
        torch.set_flush_denormal(False)
    assert differing(state, expected) == {}


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_moments_without_gradients_end_at_zero_and_no_weight_tells(backend: str) -> None:
    """Fading moments, then zero gradients: torch's stay denormal."""
    tiny = torch.finfo(torch.float32).tiny
    start, _ = make_case(torch.float32, torch.float32, 10_000, "fading")
    state, gradient, scalars = start.to("cpu"), torch.zeros(10_000), make_scalars(torch.float32)
    parameter = torch.nn.Parameter(start.weights.clone())
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], lr=3e-4, betas=BETAS, eps=EPS, weight_decay=0.1, foreach=False)
    optimizer.state[parameter] = {
        "step": torch.tensor(2.0), "exp_avg": start.first_moment.clone(), "exp_avg_sq": start.second_moment.clone()
    }  # fmt: skip
    for _ in range(4000):
        step(state, gradient, scalars, 10_000)
    for _ in range(4000):
        optimizer.step()
    theirs = optimizer.state[parameter]
    assert ((theirs["exp_avg"] != 0) & (theirs["exp_avg"].abs() < tiny)).any()
    assert not state.first_moment.any()
    assert not state.second_moment.any()
    assert torch.equal(state.weights, parameter.detach())


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_no_step_divides_by_a_second_moment_that_was_dropped(backend: str) -> None:
    """At an epsilon far below its root, a denormal second moment still bounds the step."""
    gradient = torch.full((1000,), 1e-18)
    state = make_state(torch.float32, torch.zeros(1000), torch.zeros(1000), torch.zeros(1000))
    scalars = torch.tensor([1.0, 1.0, 1.0, 1e-3 / (1 - BETAS[0]), (1 - BETAS[1]) ** 0.5])
    adamw_host(*state.planes, gradient, scalars, num_decay_elements=0, betas=BETAS, eps=1e-30, threads=2)
    assert torch.allclose(state.weights, torch.tensor(-1e-3), rtol=1e-3)


def run_clipped_steps(
    state: State,
    gradients: list[Tensor],
    *,
    rates: list[float],
    num_decay: int,
    weight_decay: float,
    max_norm: float | None,
) -> list[float]:
    """Steps through the public functions; the norms."""
    real = state.first_moment.dtype
    table = step_scalars(rates, BETAS, weight_decay, dtype=real)
    count, norm = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.float64)
    scalars, norms = torch.empty(5, dtype=real), []
    for gradient in gradients:
        squared_norms = gradient.double().square().sum().view(1)
        clip_scalars(squared_norms, table, count, max_norm, scalars=scalars, norm=norm)
        adamw_device(*state.planes, gradient, scalars, num_decay_elements=num_decay, betas=BETAS, eps=EPS)
        norms.append(float(norm))
    return norms


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("max_norm", [None, 3.0])
def test_fp64_agrees_with_torch_optim(backend: str, max_norm: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(512, dtype=torch.float64, generator=generator)
    gradients = [torch.randn(512, dtype=torch.float64, generator=generator) * (0.02 * k) for k in range(1, 151)]
    rates = [1e-3 * min(1.0, (k + 1) / 20) for k in range(150)]
    matrix, norm_weight = torch.nn.Parameter(start[:384].clone()), torch.nn.Parameter(start[384:].clone())
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [norm_weight], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS, foreach=False)
    norms = []
    for rate, gradient in zip(rates, gradients, strict=True):
        matrix.grad, norm_weight.grad = gradient[:384].clone(), gradient[384:].clone()
        limit = math.inf if max_norm is None else max_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_([matrix, norm_weight], limit)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    assert max_norm is None or 50 < sum(norm > max_norm for norm in norms) < 150

    state = make_state(torch.float64, start, torch.zeros_like(start), torch.zeros_like(start))
    ours = run_clipped_steps(state, gradients, rates=rates, num_decay=384, weight_decay=0.1, max_norm=max_norm)
    expected = torch.cat([matrix.detach(), norm_weight.detach()])
    assert (state.weights - expected).abs().max() < 1e-12
    assert ours == pytest.approx(norms, rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_non_finite_step_is_as_if_it_had_not_been(backend: str) -> None:
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(1024, generator=generator) for _ in range(6)]
    broken = gradients[0].clone()
    broken[3] = math.nan
    spoilt = gradients[0].clone()
    spoilt[7] = -math.inf
    options = {"rates": [1e-3, 2e-3, 3e-3, 2e-3, 1e-3, 5e-4], "num_decay": 512, "weight_decay": 0.1, "max_norm": 1.0}
    with_them, without = (make_case(torch.bfloat16, torch.float32, 1024, "usual")[0] for _ in range(2))
    norms = run_clipped_steps(with_them, [*gradients[:2], broken, *gradients[2:4], spoilt, *gradients[4:]], **options)
    run_clipped_steps(without, gradients, **options)
    assert differing(with_them, without) == {}
    assert [math.isfinite(norm) for norm in norms] == [True, True, False, True, True, False, True, True]


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_the_split_master_keeps_what_fine_tuning_moves(backend: str) -> None:
    """100 steps at rate 1e-5 from N(0, 0.02): a bf16 master would hold most weights still."""
    generator = torch.Generator().manual_seed(3)
    count = 20_000
    start = torch.randn(count, generator=generator) * 0.02
    slope = torch.randn(count, generator=generator)
    gradients = [(slope + 0.5 * torch.randn(count, generator=generator)).bfloat16() for _ in range(100)]
    state = make_state(torch.bfloat16, start, torch.zeros(count), torch.zeros(count))
    run_clipped_steps(state, gradients, rates=[1e-5] * 100, num_decay=count, weight_decay=0.01, max_norm=None)

    exact = torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([exact], lr=1e-5, betas=BETAS, eps=EPS, weight_decay=0.01, foreach=False)
    for gradient in gradients:
        exact.grad = gradient.double()
        optimizer.step()
    moved = state.master.double() - start.double()
    expected = exact.detach() - start.double()
    assert (moved != 0).double().mean() >= 0.9
    assert moved.abs().mean() == pytest.approx(float(expected.abs().mean()), rel=0.01)
    assert (moved - expected).abs().max() < 0.01 * expected.abs().max()


def test_step_scalars_are_the_papers() -> None:
    table = step_scalars([1e-3, 2e-3], (0.9, 0.99), 0.1, dtype=torch.float64)
    assert table[0].tolist() == pytest.approx([1 - 1e-4, 1e-3 / 0.1, 0.1], rel=1e-14)
    assert table[1].tolist() == pytest.approx([1 - 2e-4, 2e-3 / 0.19, math.sqrt(0.0199)], rel=1e-14)
    assert torch.equal(step_scalars([1e-3, 2e-3], (0.9, 0.99), 0.1), table.float())


@pytest.mark.parametrize(("max_norm", "clip"), [(None, 1.0), (100.0, 1.0), (2.5, 2.5 / (5.0 + 1e-6))])
def test_clip_factor_is_torchs(max_norm: float | None, clip: float) -> None:
    table = step_scalars([1e-3, 2e-3], BETAS, 0.1, dtype=torch.float64)
    count, norm, scalars = torch.tensor(1), torch.empty(()), torch.empty(5, dtype=torch.float64)
    clip_scalars(torch.tensor([9.0, 16.0]), table, count, max_norm, scalars=scalars, norm=norm)
    assert scalars.tolist() == pytest.approx([1.0, clip, *table[1].tolist()], rel=1e-15)
    assert float(norm) == 5.0
    assert int(count) == 2


def test_squared_norms_are_added_in_block_order() -> None:
    generator = torch.Generator().manual_seed(4)
    squared_norms = 10.0 ** (torch.rand(80, dtype=torch.float64, generator=generator) * 20 - 10)
    total = 0.0
    for value in squared_norms.tolist():
        total += value
    assert total != sum(sorted(squared_norms.tolist()))  # the order matters here
    norm, scalars = torch.empty((), dtype=torch.float64), torch.empty(5)
    clip_scalars(squared_norms, step_scalars([1.0], BETAS, 0), torch.tensor(0), None, scalars=scalars, norm=norm)
    assert float(norm) == pytest.approx(math.sqrt(total), rel=3e-16)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_norm_does_not_count(value: float) -> None:
    count, norm, scalars = torch.tensor(1), torch.empty(()), torch.empty(5)
    table = step_scalars([1e-3, 2e-3], BETAS, 0.1)
    clip_scalars(torch.tensor([1.0, value], dtype=torch.float64), table, count, 1.0, scalars=scalars, norm=norm)
    assert scalars[:2].tolist() == [0.0, 0.0]
    assert int(count) == 1
    assert not math.isfinite(float(norm))


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 1.0), 1e-8), ((-0.1, 0.9), 1e-8), (BETAS, 0.0), (BETAS, 1e-60)])
def test_impossible_settings_are_refused(betas: tuple[float, float], eps: float) -> None:
    state, gradient = make_case(torch.float32, torch.float32, 8, "usual")
    with pytest.raises(InputError, match="betas" if betas != BETAS else "eps"):
        adamw_host(
            *(*state.planes, gradient, make_scalars(torch.float32)),
            num_decay_elements=0,
            betas=betas,
            eps=eps,
            threads=1,
        )


@pytest.mark.parametrize(
    ("field", "tensor"),
    [
        ("weights", torch.zeros(8, dtype=torch.float16)),
        ("low", None),
        ("low", torch.zeros(7, dtype=torch.int16)),
        ("first_moment", torch.zeros(8).double()),
        ("second_moment", torch.zeros(16)[::2]),
        ("second_moment", torch.zeros(8, device="meta")),
        ("gradient", torch.zeros(9)),
        ("scalars", torch.zeros(5).double()),
        ("scalars", torch.zeros(4)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(field: str, tensor: Tensor | None) -> None:
    state, gradient = make_case(torch.bfloat16, torch.float32, 8, "usual")
    given = dict(zip(("weights", "low", "first_moment", "second_moment"), state.planes, strict=True))
    given |= {"gradient": gradient, "scalars": make_scalars(torch.float32), field: tensor}
    with pytest.raises(ValueError, match=r"AdamW: .*"):
        adamw_host(**given, num_decay_elements=8, betas=BETAS, eps=EPS, threads=1)
