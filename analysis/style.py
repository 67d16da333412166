"""How figures look: size, fonts, colours that colour-blind readers can tell apart, and files that repeat bit for bit.

Colours are those of Okabe and Ito, "Color Universal Design" (2008). What a colour alone says, a hatch or a line style
says too: predicted is light, hatched or dashed, measured dark, plain or solid, also in a greyscale print.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, LIGHT_GREY, LANE_GREY = "#999999", "#D9D9D9", "#F2F2F2"
MEMORY_FILL = "#9CCBEA"  # sky, lighter
# Of lines and points, which differ in line style or marker too.
LINE_COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)

# One width serves a phone, where a point is then about a pixel, and a desktop column.
WIDTH_INCHES = 4.6
DOTS_PER_INCH = 240

_SETTINGS: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LIGHT_GREY,
    "grid.linewidth": 0.6,
    "legend.frameon": True,
    "legend.framealpha": 1.0,
    "legend.edgecolor": "#FFFFFF",
    "legend.fancybox": False,
    "legend.fontsize": 9,
    "legend.handlelength": 1.6,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.0,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text: searchable, and read aloud
    "svg.hashsalt": "conveyor",  # ids would be random
}


class Look(NamedTuple):
    """A fill: colour, and hatch where colours of like lightness meet. No dots: an SVG spells out every circle."""

    colour: str
    hatch: str = ""

    def patch(self, label: str) -> Patch:
        """A legend entry."""
        return Patch(facecolor=self.colour, hatch=self.hatch, edgecolor=edge_colour(self), linewidth=0.5, label=label)


PREDICTED, MEASURED, IDEAL = Look(SKY, "////"), Look(BLUE), Look(LIGHT_GREY)

# What the compute resource did or waited for (simulator.timeline.BUSY and WAITING): work coloured, waiting white.
BREAKDOWN: dict[str, Look] = {
    "forward": Look(SKY),
    "recompute": Look(ORANGE, "////"),
    "loss": Look(YELLOW),
    "backward": Look(BLUE),
    "gradients": Look(BLACK),
    "update": Look(VERMILLION, "\\\\\\\\"),
    "waiting for weights": Look("#FFFFFF", "////"),
    "waiting for updates": Look("#FFFFFF", "\\\\\\\\"),
    "waiting for gradients": Look("#FFFFFF", "xxxx"),
    "waiting for activations": Look("#FFFFFF", "...."),
    "waiting for data": Look("#FFFFFF", "----"),
    "waiting for other operations": Look("#FFFFFF", "++++"),
    "launch gaps": Look("#FFFFFF", "||||"),
}
KINDS: dict[str, Look] = {
    "forward": BREAKDOWN["forward"],
    "recompute": BREAKDOWN["recompute"],
    "loss": BREAKDOWN["loss"],
    "backward": BREAKDOWN["backward"],
    "finish_gradient": BREAKDOWN["gradients"],
    "clip": BREAKDOWN["gradients"],
    "report": BREAKDOWN["gradients"],
    "update": BREAKDOWN["update"],
    "load_weights": Look(GREEN),
    "store_gradient": Look(PURPLE, "////"),
    "load_state": Look(GREEN, "\\\\\\\\"),
    "store_state": Look(PURPLE, "\\\\\\\\"),
    "store_weights": Look(PURPLE),
    "store_activation": Look(PURPLE, "...."),
    "load_activation": Look(GREEN, "...."),
    "load_batch": Look("#B0B0B0", "xxxx"),
}
_SPARE = tuple(Look(colour, hatch) for hatch in ("xxxx", "----", "++++") for colour in (GREEN, PURPLE, GREY, ORANGE))


def looks(names: Iterable[str], known: dict[str, Look]) -> dict[str, Look]:
    """A look for each name, in the order of `known`; names that it lacks follow by alphabet with spare looks."""
    names = set(names)
    unknown = sorted(names - set(known))
    spare = {name: _SPARE[index % len(_SPARE)] for index, name in enumerate(unknown)}
    return {**{name: look for name, look in known.items() if name in names}, **spare}


def edge_colour(look: Look) -> str:
    """What a fill is outlined and hatched with."""
    return "#404040" if look.hatch or lightness(look.colour) > 0.9 else look.colour


def lightness(colour: str) -> float:
    """Relative luminance from 0, black, to 1, white (WCAG 2.1)."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_colour(look: Look) -> str:
    """Black or white, whichever stands out on a fill."""
    return "#FFFFFF" if lightness(look.colour) < 0.3 else BLACK


def settings() -> Any:
    """The context in which figures are drawn and written. A user's own matplotlibrc has no say in it."""
    return matplotlib.style.context(_SETTINGS, after_reset=True)


def new_figure(height_inches: float) -> Figure:
    """An empty figure of the one width. It belongs to nobody's global state and is drawn without a display."""
    return Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")


def legend_columns(labels: Sequence[str], most: int = 3) -> int:
    """Columns of a legend below a figure: as many as `labels` leave room for."""
    for columns in range(most, 1, -1):
        rows = math.ceil(len(labels) / columns)
        widths = [max(map(len, labels[first : first + rows])) for first in range(0, len(labels), rows)]
        if sum(5.4 * width + 32 for width in widths) < 72 * WIDTH_INCHES:  # 9 points, a handle, a space
            return columns
    return 1


@dataclass(frozen=True)
class Drawing:
    """A figure with the stem of its files, and its words; drawn once for each format.

    The title names it, the caption says how to read it, `alt` says what it shows to who cannot see it.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure

    @cached_property
    def svg(self) -> str:
        """The figure as an SVG element that can stand in an HTML page beside others."""
        buffer = io.StringIO()
        with settings():
            # No date, no generator: the same figure gives the same bytes.
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.figure.savefig(buffer, format="svg", metadata=nothing)
        return _element(buffer.getvalue(), self.name)

    @cached_property
    def png(self) -> bytes:
        buffer = io.BytesIO()
        with settings():
            self.figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
        return buffer.getvalue()

    def save(self, directory: Path) -> list[Path]:
        """Write NAME.png and NAME.svg; returns their paths."""
        paths = [directory / f"{self.name}.png", directory / f"{self.name}.svg"]
        paths[0].write_bytes(self.png)
        paths[1].write_text(self.svg, encoding="utf-8")
        return paths


def _element(text: str, prefix: str) -> str:
    """The <svg> element without prologue. Ids get a prefix, or go where nothing refers to them: figures share them."""
    text = text[text.index("<svg") :]
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda match: match.group() if match.group(1) in used else "", text)
    return re.sub(r"( id=\"|url\(#|href=\"#)", lambda match: f"{match.group()}{prefix}-", text)
