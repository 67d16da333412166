"""Loggers: metrics to TensorBoard, Weights & Biases or trackio as well, for whoever names them; off by default.

Nothing is asked on the console and nothing leaves the machine unless the user's own settings say so: without a key,
Weights & Biases writes to the run directory (`wandb sync` uploads it), and trackio keeps its local database.
"""

import importlib
import importlib.util
import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from simulator.errors import InputError

LoggerName = Literal["tensorboard", "wandb", "trackio"]

PROJECT = "conveyor"  # what runs are grouped under, where WANDB_PROJECT does not say otherwise
WANDB_HOST = "api.wandb.ai"


class Logger(Protocol):
    """Takes the numbers of one step after another."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def require_loggers(names: Sequence[LoggerName]) -> None:
    """Raise InputError naming every logger whose package is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        packages = " and ".join(missing)
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"loggers: {packages} {verb} not installed; pip install {' '.join(missing)}, or leave it out of loggers"
        )


def open_loggers(names: Sequence[LoggerName], directory: Path, settings: Mapping[str, Any]) -> list[Logger]:
    """The loggers of a run in `directory`, whose last part names it; `settings` are what they keep of its config.

    Raises InputError where a package is missing or refuses.
    """
    require_loggers(names)
    found: list[Logger] = []
    for name in dict.fromkeys(names):
        try:
            found.append(_OPENERS[name](directory, dict(settings)))
        except Exception as error:  # whatever a third party raises, the user must know whose it is
            for logger in found:
                logger.close()
            raise InputError(f"loggers: {name} cannot start ({type(error).__name__}: {error})") from error
    return found


class TensorBoard:
    """Event files in the run directory's `tensorboard/`."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"))
        lines = "\n".join(f"    {key}: {value}" for key, value in settings.items())
        self._writer.add_text("config", lines)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb, kept in the run directory's `wandb/`; on the network only where the user has a key or says so."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._wandb = wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=directory.resolve().name, dir=str(directory),
            config=settings, mode=wandb_mode(os.environ), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its service writes behind: what is not on disk by now would come after our end


class Trackio:
    """A run in trackio's local database; on a Space only where TRACKIO_SPACE_ID names one."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(project=PROJECT, name=directory.resolve().name, config=settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


_OPENERS: dict[LoggerName, Callable[[Path, dict[str, Any]], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def wandb_mode(environment: Mapping[str, str]) -> str:
    """The user's WANDB_MODE; else online where there is a key, so that nothing is asked, and offline where none is."""
    if mode := environment.get("WANDB_MODE"):
        return mode
    return "online" if environment.get("WANDB_API_KEY") or _has_netrc_key(environment) else "offline"


def _has_netrc_key(environment: Mapping[str, str]) -> bool:
    path = Path(environment.get("NETRC") or Path(environment.get("HOME", "~")).expanduser() / ".netrc")
    try:
        return netrc.netrc(str(path)).authenticators(WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
