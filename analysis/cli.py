"""The front door: `conveyor COMMAND ...`.

Exit codes: 0 done, 1 failed while running, 2 wrong input, 130 interrupted. Until a command runs, only the standard
library is imported, so that --help is instant and works where torch does not.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from analysis import commands
from analysis.interrupts import EXIT_CODE as INTERRUPTED
from analysis.interrupts import interrupt_once
from analysis.options import COMMANDS, take_overrides
from analysis.shadow import shadowed_packages


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. `arguments.command` is the name of the function in analysis/commands.py."""
    parser = argparse.ArgumentParser(
        prog="conveyor",
        description="Train language models larger than the GPU: plan a run, train it, plot predicted against measured.",
        epilog="Exit codes: 0 done, 1 failed while running, 2 wrong input, 130 interrupted.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.summary, description=f"{command.summary.capitalize()}.", allow_abbrev=False
        )
        command.add_options(subparser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of a command line. Exits with 2 and a sentence where it is wrong."""
    parser = build_parser()
    arguments, left = parser.parse_known_args(argv)
    if arguments.command == "train":
        left = take_overrides(arguments, left)
    if left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    if shadowed := shadowed_packages():
        _complain("\n".join(shadowed))
        return 2
    from simulator.errors import ConveyorError

    # Read when torch is imported. Threads that spin at a barrier make a busy machine ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Reserved bytes then follow allocated ones: a plan may fill the device.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        with interrupt_once():
            arguments = parse(sys.argv[1:] if argv is None else argv)
            exit_code: int = getattr(commands, arguments.command)(arguments)
            sys.stdout.flush()  # here, where a closed pipe is understood, and not at exit
            return exit_code
    except ConveyorError as error:
        _complain(str(error))
        return error.exit_code
    except BrokenPipeError:  # whoever read the output has enough, as in `conveyor plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        _complain("standard output was closed before all was written")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return 1


def _complain(message: str) -> None:
    for line in message.splitlines():
        print(f"conveyor: error: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
