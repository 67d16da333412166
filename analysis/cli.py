"""The front door: `conveyor COMMAND ...`.

Exit codes: 0 done, 1 failed while running, 2 wrong input, 130 interrupted (143: by SIGTERM, 129: by SIGHUP). Until a
command runs, only the standard library is imported, so that --help is instant and works where torch does not.
"""

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from analysis import commands
from analysis.interrupts import EXIT_CODE as INTERRUPTED
from analysis.interrupts import interrupt_once
from analysis.options import COMMANDS, take_overrides
from analysis.shadow import shadowed_packages

_DISK = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free some space") | {errno.EFBIG: "", errno.EIO: ""}
# What tells of a path that was wrong from the beginning.
_WRONG_PATH = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS,
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. `arguments.command` is the name of the function in analysis/commands.py."""
    parser = argparse.ArgumentParser(
        prog="conveyor",
        description="Train language models larger than the GPU: plan a run, train it, plot predicted against measured.",
        epilog="Exit codes: 0 done, 1 failed while running, 2 wrong input, 130 interrupted (SIGTERM 143, SIGHUP 129).",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.summary, allow_abbrev=False,
            description=f"{command.summary[:1].upper()}{command.summary[1:]}.",
        )  # fmt: skip
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
    _open_missing_streams()
    if shadowed := shadowed_packages():
        _complain("\n".join(shadowed))
        return 2
    from simulator.errors import ConveyorError

    for stream in (sys.stdout, sys.stderr):
        # A sample may hold characters that the terminal's encoding lacks: no reason to end a run. Files and pipes get
        # lines at once, as terminals do: a process that the kernel kills leaves them.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
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
        _complain("standard output was closed before all was written")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except MemoryError as error:
        what = f" ({error})" if str(error) else ""
        _complain(f"host memory: not enough for this process{what}; free some, or raise its limit (ulimit -v, cgroup)")
        return 1
    except OSError as error:
        return _refused_by_the_system(error)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        _let_go_of_closed_streams()


def _refused_by_the_system(error: OSError) -> int:
    """Say in a sentence which file could not be read or written; a fault without a file's name is not the user's."""
    if error.filename is None and error.errno not in _DISK:
        traceback.print_exception(error)
        return 1
    what = "standard output or a file" if error.filename is None else error.filename
    _complain(f"{what}: cannot be read or written ({error.strerror}){_DISK.get(error.errno or 0, '')}")
    return 2 if error.errno in _WRONG_PATH else 1


def _complain(message: str) -> None:
    with suppress(OSError):  # of a terminal that is gone: the exit code tells as much as can be told
        for line in message.splitlines():
            print(f"conveyor: error: {line}", file=sys.stderr)


def _open_missing_streams() -> None:
    """A program may be started without them (`>&-`). The next file would then take their place, and what libraries
    print, their place in that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for as long as the process runs


def _let_go_of_closed_streams() -> None:
    """Python flushes at exit, and would complain of what nobody takes with an exit code of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
