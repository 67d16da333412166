"""Conveyor's exceptions. A message says what is wrong, where, and what to do about it.

ConveyorError                 something failed while running: exit code 1
├── OutOfMemory               a tier ran out of memory while running
├── ProgramError              a step program broke a rule: a fault of ours, never of the user
└── InputError                the input is wrong: exit code 2
    ├── UnsupportedChoice     a choice that is known by name and not built yet
    └── InfeasiblePlan        no policy fits the machine; names the binding resource
"""


class ConveyorError(Exception):
    """Base of all errors that Conveyor raises on purpose."""

    exit_code = 1


class OutOfMemory(ConveyorError):
    """A memory tier ran out while running."""


class ProgramError(ConveyorError):
    """A step program breaks a rule that the checker proves for every program."""


class InputError(ConveyorError):
    """The user's input is wrong; nothing was started and nothing is lost."""

    exit_code = 2


class UnsupportedChoice(InputError):
    """A choice that the design names and this version does not build."""


class InfeasiblePlan(InputError):
    """No policy fits. `resource` binds and is short by `short_bytes`; each of the `changes` alone would make it fit."""

    def __init__(
        self, message: str, *, resource: str = "", short_bytes: int = 0, changes: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.resource = resource
        self.short_bytes = short_bytes
        self.changes = changes
