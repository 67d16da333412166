"""Figures: that they show the data with its units, and repeat bit for bit."""

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text
from sample_runs import failed_record, figures, moved, record, span, timeline

from analysis import lanes
from analysis.breakdown import breakdown, lost_time
from analysis.losses import loss, loss_comparison
from analysis.style import BREAKDOWN, KINDS, LANE_GREY, Drawing, Look, lightness, looks
from analysis.throughput import throughput
from executor.run_directory import Run
from simulator.errors import InputError
from simulator.timeline import MemoryPoint, Timeline
from simulator.units import MIB

RUN = Run("run", record(), (), timeline(), moved(timeline(layer_seconds=0.11), 0.37))


def texts(drawing: Drawing) -> set[str]:
    return {re.sub(r"\s+", " ", text).strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", drawing.svg)}


def bars(axis: Axes) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """(lane, colour) -> (start, end) of its bars, without the idle background."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for collection in axis.collections:
        assert isinstance(collection, PolyCollection)
        colour = to_hex(collection.get_facecolor()[0]).upper()
        for path in collection.get_paths():
            (left, low), (right, high) = path.get_extents().get_points()
            if colour != LANE_GREY:
                found.setdefault((round((low + high) / 2), colour), []).append((left, right))
    return found


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def test_timelines_show_every_resource_for_as_long_as_it_ran():
    predicted, _ = lanes.timelines(RUN).figure.axes[:2]
    drawn = bars(predicted)
    resources = [label.get_text() for label in predicted.get_yticklabels()]
    assert resources == ["compute", "h2d", "d2h", "host"]
    milliseconds = 1000 if RUN.predicted.step_seconds < 1 else 1
    for lane, resource in enumerate(resources):
        seconds = sum(covered(pieces) for (at, _), pieces in drawn.items() if at == lane) / milliseconds
        assert seconds == pytest.approx(RUN.predicted.busy_seconds()[resource])
    edges = [edge for pieces in drawn.values() for piece in pieces for edge in piece]
    assert min(edges) >= 0
    assert max(edges) <= RUN.predicted.step_seconds * milliseconds * (1 + 1e-9)


def test_operation_over_the_edge_goes_on_at_the_other_side():
    update = bars(lanes.timelines(RUN).figure.axes[0])[(3, KINDS["update"].colour)]
    step = RUN.predicted.step_seconds
    assert sorted(update) == [pytest.approx((0.0, 0.1)), pytest.approx((step - 0.05, step))]


def test_operation_of_a_step_before_lies_where_it_runs_in_every_step():
    spans = (*timeline().spans, span("load_batch", "h2d", -1, -2.5, -2.4))  # loaded two periods ahead
    run = replace(RUN, predicted=replace(timeline(), spans=spans), measured=None)
    step = run.predicted.step_seconds
    assert bars(lanes.timelines(run).figure.axes[0])[(1, KINDS["load_batch"].colour)] == [
        pytest.approx((2 * step - 2.5, 2 * step - 2.4))
    ]


def test_clocks_of_the_two_timelines_do_not_matter():
    for draw in (lanes.timelines, lanes.memory):
        ahead = replace(RUN, measured=moved(RUN.measured, 123.0))
        for left, right in zip(draw(RUN).figure.axes, draw(ahead).figure.axes, strict=True):
            for one, other in zip(left.collections, right.collections, strict=True):
                for path, same in zip(one.get_paths(), other.get_paths(), strict=True):
                    assert path.vertices == pytest.approx(same.vertices, abs=1e-9)


def test_thousand_operations_stay_light_and_complete():
    many = timeline(300, layer_seconds=0.01)
    assert len(many.spans) > 1000
    drawing = lanes.timelines(replace(RUN, predicted=many, measured=many))
    forwards = bars(drawing.figure.axes[0])[(0, KINDS["forward"].colour)]
    assert len(forwards) < 300  # neighbours that touch are one bar
    assert covered(forwards) == pytest.approx(300 * 0.01)
    assert len(drawing.svg) < 300_000
    assert len(bars(drawing.figure.axes[0])[(1, KINDS["load_weights"].colour)]) == 300  # gaps that are seen stay


def test_timelines_carry_units_titles_legend_and_busy_shares():
    shown = texts(lanes.timelines(RUN))
    assert {
        "predicted: 1.30 s",
        "measured: the recorded step, 1.43 s",
        "time since the step began (s)",
        "busy",
    } <= shown
    assert {"forward", "loss", "backward", "load weights", "store gradient", "update"} <= shown
    assert "100 %" in shown  # compute never waits in the sample
    assert "15 %" in shown  # h2d: 4 x 0.5 of 13 layer times


def test_kinds_and_resources_that_are_new_are_drawn_too():
    spans = (*timeline().spans, span("all_gather", "collective", 1, 0.0, 0.2))
    drawing = lanes.timelines(replace(RUN, predicted=replace(timeline(), spans=spans)))
    assert {"collective", "all gather"} <= texts(drawing)


def test_memory_shows_both_curves_and_the_limit_that_is_near():
    drawing = lanes.memory(RUN)
    device, host = drawing.figure.axes
    (predicted,) = (line for line in device.get_lines() if line.get_label() == "predicted")
    assert max(predicted.get_ydata()) == pytest.approx(5.0)
    assert predicted.get_ydata()[0] == pytest.approx(3.0)
    assert max(predicted.get_xdata()) == pytest.approx(RUN.predicted.step_seconds)
    assert any(list(line.get_ydata()) == [8.0, 8.0] for line in device.get_lines())
    assert len(host.get_lines()) == 1  # 200 GiB far above 20: told, not drawn
    assert (device.get_ylabel(), host.get_ylabel()) == ("GiB", "GiB")
    shown = texts(drawing)
    assert {"Device memory, limit 8.0 GiB", "peak 6.0 GiB predicted, 6.0 GiB measured"} <= shown
    assert {"Host memory, limit 200.0 GiB", "time since the step began (s)", "predicted", "measured", "limit"} <= shown


def test_small_memory_is_shown_in_small_units():
    small = replace(timeline(), memory={"host": (MemoryPoint(0.0, 3 * MIB),)})
    assert lanes.memory(replace(RUN, predicted=small, measured=None)).figure.axes[0].get_ylabel() == "MiB"


def test_breakdown_bars_add_up_to_the_step():
    drawing = breakdown(RUN)
    axis = drawing.figure.axes[0]
    lengths: dict[float, float] = {}
    for patch in axis.patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        lengths[row] = lengths.get(row, 0.0) + patch.get_width()
    assert lengths == {0: pytest.approx(600 / 500), 1: pytest.approx(600 / 510)}
    shown = texts(drawing)
    assert {"predicted", "measured", "forward", "backward", "waiting for weights", "time of one step (s)"} <= shown
    assert {"0.400", "0.600", "1.20 s", "1.18 s"} <= shown


def test_few_runs_are_bars_with_the_error():
    runs = [
        RUN,
        Run("b", record("b", predicted=412.0, measured=400.0, ideal=figures(646.0))),
        Run("c", failed_record("c")),
    ]
    drawing = throughput(runs)
    assert sorted(patch.get_width() for patch in drawing.figure.axes[0].patches) == [400, 412, 500, 510, 646]
    shown = texts(drawing)
    assert {"500 (−2.0 %)", "510", "412 (+3.0 %)", "400", "646"} <= shown
    assert {"sample", "b", "predicted", "measured", "ideal: no optimizer", "TFLOPS (6 N T per second)"} <= shown


def test_run_that_failed_keeps_its_prediction_and_says_so():
    out = failed_record("14b", status="out_of_memory", predicted=300.0, predicted_from=record().predicted_from)
    assert {"300", "out of memory"} <= texts(throughput([Run("14b", out)]))


def test_many_runs_are_points_around_the_diagonal_numbered_as_given():
    pairs = [(100.0, 100.0), (202.0, 200.0), (330.0, 300.0), (398.0, 400.0)]
    runs = [Run(str(k), record(str(k), predicted=p, measured=m)) for k, (p, m) in enumerate(pairs)]
    runs.insert(1, Run("failed", failed_record()))
    drawing = throughput(runs)
    scatter, errors = drawing.figure.axes
    (points,) = (line for line in scatter.get_lines() if line.get_label() == "Sample GPU")
    assert set(zip(points.get_xdata(), points.get_ydata(), strict=True)) == {(m, p) for p, m in pairs}
    (diagonal,) = (line for line in scatter.get_lines() if line.get_label() == "predicted = measured")
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())
    band = scatter.collections[0].get_paths()[0].vertices
    assert {round(float(y / x), 2) for x, y in band if x > 0} == {0.97, 1.03}
    (shares,) = (line for line in errors.get_lines() if len(line.get_xdata()) == 4)
    assert list(shares.get_xdata()) == [1, 3, 4, 5]
    assert list(shares.get_ydata()) == pytest.approx([0.0, 1.0, 10.0, -0.5])
    shown = texts(drawing)
    assert {"within 3 %", "predicted TFLOPS", "measured TFLOPS (6 N T per second)", "error (%)"} <= shown
    assert [text.get_text() for text in scatter.texts] == ["4"]  # the one outside the band


def test_runs_of_very_different_speed_share_a_logarithmic_scatter():
    runs = [Run(str(k), record(str(k), predicted=1.01 * 10.0**k, measured=10.0**k)) for k in range(-2, 3)]
    assert throughput(runs).figure.axes[0].get_xscale() == "log"


def test_numbers_of_crowded_points_do_not_cover_each_other():
    runs = [Run(str(k), record(str(k), predicted=560.0 + k, measured=500.0 + k)) for k in range(12)]
    figure = throughput(runs).figure
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # without its arrow
    assert len(boxes) == 12
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_loss_shows_every_finite_step_and_marks_the_others():
    metrics = tuple({"step": k, "loss": None if k == 3 else 5.0 / k} for k in range(1, 7))
    drawing = loss(replace(RUN, metrics=metrics))
    line, lost = drawing.figure.axes[0].get_lines()
    assert list(line.get_xdata()) == [1, 2, 4, 5, 6]
    assert list(line.get_ydata()) == pytest.approx([5.0, 2.5, 1.25, 1.0, 5 / 6])
    assert list(lost.get_xdata()) == [3]
    assert {"step", "loss (nats per token)", "not finite: skipped"} <= texts(drawing)


def test_mean_of_a_straight_loss_is_the_loss_of_half_a_window_before():
    metrics = tuple({"step": k, "loss": 10.0 - 0.01 * k} for k in range(220))
    line, mean = loss(replace(RUN, metrics=metrics)).figure.axes[0].get_lines()
    assert list(mean.get_ydata())[10:] == pytest.approx(list(line.get_ydata())[5:-5])  # of 11 steps
    assert mean.get_ydata()[0] == line.get_ydata()[0]


def test_runs_with_equal_losses_are_one_curve_as_far_as_both_go():
    curve = [{"step": k, "loss": 5.0 - math.log(k + 1) + 0.1 * (k % 3)} for k in range(300)]
    runs = [replace(RUN, metrics=tuple(curve[:length])) for length in (300, 90)]
    long, short = loss_comparison(runs).figure.axes[0].get_lines()
    assert list(long.get_ydata())[:90] == list(short.get_ydata())
    assert "means of the last 4 steps" in loss_comparison(runs).caption


@pytest.mark.parametrize(
    ("draw", "run"),
    [
        (lanes.timelines, Run("x", record())),
        (lanes.memory, Run("x", record())),
        (lanes.memory, Run("x", record(), (), Timeline(1.0, timeline().spans, {}, {}))),
        (breakdown, Run("x", failed_record())),
        (loss, Run("x", record(), ({"step": 1, "loss": math.nan}, {"step": 2}))),
        (lambda run: throughput([run]), Run("x", failed_record())),
    ],
)
def test_nothing_to_draw_is_said_in_one_sentence(draw, run):
    with pytest.raises(InputError, match=r"^[^\n]+$"):
        draw(run)


def test_same_run_gives_the_same_bytes_whatever_the_user_has_set():
    first = [(drawing.svg, drawing.png) for drawing in (lanes.timelines(RUN), breakdown(RUN), throughput([RUN]))]
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.fonttype": "path", "savefig.dpi": 30}):
        second = [(drawing.svg, drawing.png) for drawing in (lanes.timelines(RUN), breakdown(RUN), throughput([RUN]))]
    assert first == second


def test_drawing_leaves_no_global_state_and_needs_no_torch():
    code = (
        "import sys; from analysis import report, results; from analysis.throughput import throughput\n"
        "from executor.run_directory import Run; from sample_runs import record\n"
        "throughput([Run('x', record())]).svg\n"
        "print([name for name in ('matplotlib.pyplot', 'torch', 'transformers') if name in sys.modules])"
    )
    folders = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}\n{code}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_lost_time_shows_waiting_alone_with_its_share_of_the_step():
    drawing = lost_time(RUN)
    widths = sorted(patch.get_width() for patch in drawing.figure.axes[0].patches)
    assert widths == [pytest.approx(1e3 * 100 / 510), pytest.approx(1e3 * 100 / 500)]  # milliseconds
    assert {"waiting for", "weights", "200 (16.7 %)", "time lost in one step (ms)", "measured"} <= texts(drawing)
    busy = figures(500.0, breakdown_seconds={"forward": 1.2})
    never_idle = replace(RUN, record=record().model_copy(update={"predicted": busy, "measured": busy}))
    with pytest.raises(InputError, match="lost no time"):
        lost_time(never_idle)


def test_losses_of_runs_share_an_axis_and_keep_their_numbers():
    falling = tuple({"step": k, "loss": 5.0 - 0.1 * k} for k in range(1, 11))
    runs = [replace(RUN, metrics=falling), Run("none", record("none")), replace(RUN, metrics=falling[:3])]
    drawing = loss_comparison(runs)
    lines = drawing.figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["1. sample", "3. sample"]
    assert list(lines[1].get_ydata()) == pytest.approx([4.9, 4.8, 4.7])
    assert "Run 3: loss from 4.900 at step 1 to 4.700 at step 3" in drawing.alt
    many = loss_comparison([replace(RUN, metrics=falling)] * 28).figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in many}) == 28
    with pytest.raises(InputError, match="no run has losses"):
        loss_comparison(runs[1:2])


LONG = "a model of a long name, trained on a case whose name is longer still-with-dashes-too"
METRICS = tuple({"step": k, "loss": None if k % 50 == 9 else 11.5 - 0.01 * k} for k in range(400))


def every_drawing() -> list[Drawing]:
    """Each figure at its fullest."""
    full = dict.fromkeys(BREAKDOWN, 0.1)
    crowded = record(LONG, ideal=figures(646.0), device_name=LONG).model_copy(
        update={"predicted": figures(500.0, breakdown_seconds=full), "measured": figures(510.0, breakdown_seconds=full)}
    )
    spans = [
        span(kind, resource, 1, 0.1 * place, 0.1 * place + 0.1)
        for place, (kind, resource) in enumerate([*((kind, "compute") for kind in KINDS), ("load_weights", "h2d")])
    ]
    spans += [span("store_gradient", "d2h", 1, 0.2, 0.3), span("nvme", "nvme_write", 1, 0.2, 0.3)]
    step = replace(timeline(), spans=tuple(spans))
    run = Run("full", crowded, METRICS, step, step)
    points = [Run(str(k), record(f"{k}. {LONG}", predicted=560.0 + k, measured=500.0 + k)) for k in range(12)]
    return [
        throughput([run]), throughput([run] * 3), throughput(points), lanes.timelines(run), lanes.memory(run),
        breakdown(run), lost_time(run), loss(run), loss_comparison([run] * 3),
    ]  # fmt: skip


NUM_DRAWINGS = 9


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    found = every_drawing()
    assert len(found) == NUM_DRAWINGS
    return found


@pytest.mark.parametrize("place", range(NUM_DRAWINGS))
def test_all_text_lies_inside_its_figure(drawings: list[Drawing], place: int):
    drawing = drawings[place]
    canvas = FigureCanvasAgg(drawing.figure)
    canvas.draw()
    drawn = drawing.figure.get_tightbbox(canvas.get_renderer())  # inches
    width, height = drawing.figure.get_size_inches()
    slack = 0.02
    assert drawn.x0 >= -slack
    assert drawn.y0 >= -slack
    assert drawn.x1 <= width + slack
    assert drawn.y1 <= height + slack


@pytest.mark.parametrize("place", range(NUM_DRAWINGS))
def test_every_figure_has_its_words_and_its_units(drawings: list[Drawing], place: int):
    drawing = drawings[place]
    assert drawing.title
    assert drawing.caption.endswith(".")
    assert drawing.alt.endswith(".")
    assert re.search(r"[0-9]", drawing.alt)
    labels = {axis.get_xlabel() for axis in drawing.figure.axes} | {axis.get_ylabel() for axis in drawing.figure.axes}
    assert any(re.search(r"\((s|ms|µs|%|TFLOPS.*|.*per.*)\)|TFLOPS|GiB", label) for label in labels)


COMPUTE_KINDS = ("forward", "recompute", "loss", "backward", "finish_gradient", "update")


@pytest.mark.parametrize(
    "group",
    [
        [KINDS[kind] for kind in COMPUTE_KINDS],
        [KINDS[kind] for kind in ("load_weights", "load_batch")],
        list(BREAKDOWN.values()),
    ],
    ids=["compute lane", "h2d lane", "breakdown"],
)
def test_fills_that_meet_can_be_told_apart_in_grey(group: list[Look]):
    def perceived(look: Look) -> float:
        luminance = lightness(look.colour)
        return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance  # CIE 1976 L*

    for one, other in combinations(group, 2):
        assert one.hatch != other.hatch or abs(perceived(one) - perceived(other)) > 12


def test_every_cause_of_the_breakdown_has_a_look_of_its_own():
    from simulator.timeline import BUSY, WAITING

    causes = {*BUSY.values(), *WAITING.values(), "waiting for other operations", "launch gaps"}
    assert causes <= set(BREAKDOWN)
    assert len(set(looks(causes, BREAKDOWN).values())) == len(causes)
