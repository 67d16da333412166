"""On CUDA: the host's bits from Triton and from torch operations, without waiting for the host."""

import math
from collections.abc import Iterator

import pytest
import torch
from optimizer_cases import BETAS, EPS, FORMATS, REAL, State, differing, make_case, make_scalars
from test_planes import as_floats, as_patterns, sampled_patterns
from torch import Tensor

import executor.adamw
import executor.gradients
from executor.adamw import adamw_device, adamw_host, clip_scalars, step_scalars
from executor.gradients import accumulate, finish_gradient
from executor.planes import merge_planes, split_planes
from executor.weight_gradients import SUMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKENDS = ["triton", "torch"]
OPTIONS = {"betas": BETAS, "eps": EPS}


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(executor.adamw, "_triton_kernel", lambda: None)
        monkeypatch.setattr(executor.gradients, "_triton_kernel", lambda: None)
    else:
        pytest.importorskip("triton")
    return str(request.param)


@pytest.fixture
def no_host_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def device_step(state: State, gradient: Tensor, scalars: Tensor, num_decay_elements: int) -> None:
    adamw_device(*state.planes, gradient, scalars, num_decay_elements=num_decay_elements, **OPTIONS)


@pytest.mark.parametrize("kind", ["usual", "any", "fading"])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_device_and_host_agree_in_every_bit(backend: str, formats: tuple[torch.dtype, torch.dtype], kind: str) -> None:
    host, gradient = make_case(*formats, 3_000_003, kind)
    device, device_gradient = host.to("cuda"), gradient.cuda()
    scalars = make_scalars(REAL[formats[0]])
    for _ in range(3):
        adamw_host(*host.planes, gradient, scalars, num_decay_elements=2_000_001, threads=4, **OPTIONS)
        device_step(device, device_gradient, scalars.cuda(), 2_000_001)
        assert differing(device, host) == {}


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_skipped_step_changes_no_bit(backend: str, formats: tuple[torch.dtype, torch.dtype]) -> None:
    start, gradient = make_case(*formats, 100_000, "any")
    gradient[7] = math.nan
    state = start.to("cuda")
    device_step(state, gradient.cuda(), make_scalars(REAL[formats[0]], apply=0.0, clip=math.nan).cuda(), 50_000)
    for plane, old in zip(state.planes, start.planes, strict=True):
        assert plane is None or torch.equal(plane.cpu().view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_nan_weight_is_a_nan_in_the_plane_that_computes(backend: str) -> None:
    # The device's own NaN, 0x7FFFFFFF, would round to a high plane of -0.
    state, gradient = make_case(torch.bfloat16, torch.float32, 4096, "usual")
    state.first_moment[::5] = math.nan
    state = state.to("cuda")
    device_step(state, gradient.cuda(), make_scalars(torch.float32).cuda(), 4096)
    assert state.weights.isnan().nonzero().flatten().tolist() == list(range(0, 4096, 5))


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_whole_update_never_waits_for_the_host(backend: str, request: pytest.FixtureRequest) -> None:
    host, gradient = make_case(torch.bfloat16, torch.bfloat16, 1_000_000, "usual")
    table = step_scalars([1e-3, 2e-3], BETAS, 0.1)
    tensors = {}
    for device in ("cpu", "cuda"):
        tensors[device] = (
            host.to(device),
            gradient.float().to(device),
            torch.empty(1_000_000, dtype=torch.bfloat16, device=device),
            torch.zeros(2, dtype=torch.float64, device=device),
            table.to(device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.empty(5, device=device),
            torch.empty((), dtype=torch.float64, device=device),
        )

    def update(device: str) -> None:
        state, accumulator, out, squared_norms, rows, count, scalars, norm = tensors[device]
        accumulate(accumulator, [accumulator], [out.fill_(0.25)], first=False)
        for index in range(2):
            finish_gradient(accumulator, out, squared_norms[index], gradient_dtype=torch.bfloat16)
        clip_scalars(squared_norms, rows, count, 1.0, scalars=scalars, norm=norm)
        device_step(state, out, scalars, 500_000)

    update("cpu")
    update("cuda")  # compiles
    request.getfixturevalue("no_host_sync")
    update("cuda")
    torch.cuda.set_sync_debug_mode("default")
    update("cpu")
    ours, theirs = tensors["cuda"], tensors["cpu"]
    assert int(ours[5]) == 2
    assert torch.equal(ours[2].cpu(), theirs[2])
    # The sums of squares are added in another order on the host; the steps differ by a rounding of the clip factor.
    assert torch.allclose(ours[7].cpu(), theirs[7], rtol=1e-13, atol=0)
    assert torch.allclose(ours[6].cpu(), theirs[6], rtol=2e-7, atol=0)
    assert torch.allclose(ours[0].master.cpu(), theirs[0].master, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("num_elements", [1, 4096, 5000, 9_000_001])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_gradients_are_rounded_as_on_the_host(backend: str, gradient_dtype: torch.dtype, num_elements: int) -> None:
    accumulator = torch.randn(num_elements, generator=torch.Generator().manual_seed(0)) * 1e-3
    rounded = accumulator.to(gradient_dtype)
    device, out = accumulator.cuda(), torch.empty_like(rounded, device="cuda")
    norms = torch.zeros(3, dtype=torch.float64, device="cuda")
    finish_gradient(device, out, norms[0], gradient_dtype=gradient_dtype)
    finish_gradient(device, device, norms[1], gradient_dtype=gradient_dtype)
    finish_gradient(device, device, norms[2], gradient_dtype=gradient_dtype)  # rounding again changes nothing
    assert torch.equal(out.cpu(), rounded)
    assert torch.equal(device.cpu(), rounded.float())
    assert norms[0] == norms[1] == norms[2]
    assert float(norms[0]) == pytest.approx(float(rounded.double().square().sum()), rel=1e-13)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_gradient_that_was_written_once_has_the_norm_of_its_sum(backend: str) -> None:
    accumulator = (torch.randn(9_000_001, generator=torch.Generator().manual_seed(0)) * 1e-3).cuda()
    written = accumulator.bfloat16()
    before, norms = written.clone(), torch.zeros(2, dtype=torch.float64, device="cuda")
    finish_gradient(written, written, norms[0], gradient_dtype=torch.bfloat16)
    finish_gradient(accumulator, torch.empty_like(written), norms[1], gradient_dtype=torch.bfloat16)
    assert torch.equal(written, before)
    assert norms[0] == norms[1] != 0


def test_a_product_is_rounded_once_into_its_gradient() -> None:
    """Written in bf16 it is the fp32 product, rounded: no partial sum of it is rounded before."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).cuda().bfloat16() for shape in ((768, 4096), (4096, 512)))
    written = torch.full((768, 512), math.nan, dtype=torch.bfloat16, device="cuda")
    total = torch.full((768, 512), math.nan, device="cuda")
    for view in (written, total):
        with SUMS.bound([view], first=True) as added:
            SUMS.take(left, right, 0)
        assert added == {0}
    # The two may add their terms in another order: half a step of bf16 apart at most, and nearly all the same.
    assert torch.allclose(written.float(), total, rtol=2**-7, atol=1e-3)
    assert (written == total.bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.4e38])
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_one_non_finite_value_spoils_the_norm(backend: str, value: float) -> None:
    accumulator = torch.zeros(1_000_001, device="cuda")
    accumulator[-1] = value
    norm = torch.zeros((), dtype=torch.float64, device="cuda")
    finish_gradient(accumulator, accumulator, norm, gradient_dtype=torch.bfloat16)
    assert not math.isfinite(float(norm))


def test_planes_hold_every_sampled_pattern() -> None:
    patterns = sampled_patterns()
    values = as_floats(patterns).cuda()
    high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split_planes(values, high, low)
    expected = ((patterns + 0x8000) % 2**32) >> 16
    assert torch.equal(high.view(torch.int16).cpu().to(torch.int64) & 0xFFFF, expected)
    assert torch.equal(as_patterns(merge_planes(high, low).cpu()), patterns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [7, 2048, 50_257])
def test_cross_entropy_and_its_gradient_follow_double_precision(dtype: torch.dtype, columns: int) -> None:
    pytest.importorskip("triton")
    from executor.kernels.triton_cross_entropy import run_cross_entropy

    generator = torch.Generator("cuda").manual_seed(3)
    logits = (4 * torch.randn(96, columns, device="cuda", generator=generator)).to(dtype)
    targets = torch.randint(0, columns, (96,), device="cuda", generator=generator)
    targets[5] = -100
    logits[7, targets[7]] = 40.0  # all but certain: p - 1 has few digits left in p
    exact = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, targets, reduction="none", ignore_index=-100)
    losses.sum().backward()
    assert exact.grad is not None

    found, evaluated = torch.empty(2, 96, device="cuda")
    gradient = logits.clone()
    run_cross_entropy(logits, targets, evaluated, with_gradient=False)
    run_cross_entropy(gradient, targets, found, with_gradient=True)
    assert torch.equal(found, evaluated)
    assert found[5] == 0
    torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-6, atol=1e-5)
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 1e-4}[dtype]
    error = (gradient.double() - exact.grad).abs()
    assert (error <= tolerance * exact.grad.abs() + 1e-8).all()
