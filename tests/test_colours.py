"""Colours: that colour-blind readers can tell apart what one figure shows by colour alone.

Colour blindness is simulated as in Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of
Color Vision Deficiency" (2009), at full severity, in linear RGB. Distances are CIE 1976 in L*a*b* under D65, where 2.3
is just noticeable side by side.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy
import pytest

from analysis.style import (
    BREAKDOWN,
    IDEAL,
    KINDS,
    LANE_GREY,
    LINE_COLOURS,
    MEASURED,
    MEMORY_FILL,
    PREDICTED,
    VERMILLION,
    Look,
)

VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# sRGB's primaries and white (IEC 61966-2-1).
TO_XYZ = numpy.array(((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)))
APART = 15.0


def seen(colour: str, vision: str) -> numpy.ndarray:
    """L*a*b* of an sRGB colour as someone with this vision sees it."""
    values = numpy.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = numpy.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ numpy.clip(numpy.array(VISION[vision]) @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = numpy.where(xyz > (6 / 29) ** 3, numpy.cbrt(xyz), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    return numpy.array((116 * y - 16, 500 * (x - y), 200 * (y - z)))


def distance(one: str, other: str, vision: str) -> float:
    return float(numpy.linalg.norm(seen(one, vision) - seen(other, vision)))


def too_close(looks: Sequence[Look], vision: str) -> list[tuple[Look, Look]]:
    """Pairs that share their hatch and are not apart in colour."""
    pairs = combinations(dict.fromkeys(looks), 2)
    return [
        (one, other)
        for one, other in pairs
        if one.hatch == other.hatch and distance(one.colour, other.colour, vision) < APART
    ]


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(
    "looks",
    [
        [PREDICTED, MEASURED, IDEAL],
        list(BREAKDOWN.values()),
        [*KINDS.values(), Look(LANE_GREY)],
        [Look(MEMORY_FILL), Look(VERMILLION)],
    ],
    ids=["predicted and measured", "breakdown", "timelines", "memory"],
)
def test_fills_of_a_figure_can_be_told_apart(looks: list[Look], vision: str) -> None:
    assert too_close(looks, vision) == []


@pytest.mark.parametrize("vision", VISION)
def test_lines_that_share_a_style_can_be_told_apart(vision: str) -> None:
    # Four line styles come round among seven colours; a few runs at a time is what can be read at all.
    styled = [(colour, place % 4) for place, colour in enumerate(LINE_COLOURS)]
    alike = [(one, other) for (one, a), (other, b) in combinations(styled, 2) if a == b]
    assert alike
    assert all(distance(one, other, vision) >= APART for one, other in alike)


def test_the_simulation_is_one() -> None:
    # Greys look the same to everyone; red and green of like lightness do not, but to who lacks one kind of cone.
    for vision in VISION:
        assert distance("#808080", "#808080", vision) == 0
        assert numpy.allclose(seen("#808080", vision), seen("#808080", "normal"), atol=0.1)
    red, green = "#C05040", "#708A30"
    assert distance(red, green, "normal") > 60
    assert distance(red, green, "deuteranopia") < 10
    # And the test above finds a pair that is no good.
    pair = [Look(red), Look(green)]
    assert too_close(pair, "normal") == []
    assert too_close(pair, "deuteranopia") == [tuple(pair)]
    assert too_close([Look(red), Look(green, "////")], "deuteranopia") == []
