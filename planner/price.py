"""Price: what a machine costs an hour, and so a token. Without a currency: it is that of whoever names the price."""

from dataclasses import dataclass

from simulator.errors import InputError
from simulator.hardware import HardwareProfile
from simulator.predict import StepFigures

HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Price:
    """A machine's price."""

    per_hour: float

    def per_token(self, figures: StepFigures) -> float:
        """What a token costs at a step's speed."""
        return self.per_hour / HOUR_SECONDS / figures.tokens_per_second

    def per_million_tokens(self, figures: StepFigures) -> float:
        return 1e6 * self.per_token(figures)

    def of(self, figures: StepFigures) -> str:
        """A line that says it."""
        return (
            f"cost: {self.per_million_tokens(figures):.4g} per million tokens ({self.per_token(figures):.4g} a token) "
            f"at {self.per_hour:g} per hour"
        )


def price_of(hardware: HardwareProfile, per_hour: float | None = None) -> Price | None:
    """The price that was named, or the profile's, or None. Raises InputError for one that is no price."""
    if per_hour is None:
        return Price(hardware.price_per_hour.value) if hardware.price_per_hour is not None else None
    if not 0 < per_hour < float("inf"):
        raise InputError(
            f"--price-per-hour: {per_hour:g} is not a price; name what an hour of the machine costs, as 2.5"
        )
    return Price(per_hour)
