"""One function a command: arguments in, exit code out. Each imports what it needs when it is called."""

import argparse


def doctor(arguments: argparse.Namespace) -> int:
    """Print what this machine has. 1 if something indispensable is missing."""
    from analysis.doctor import check_machine, print_checks

    checks = check_machine()
    print_checks(checks)
    return 1 if any(check.verdict == "blocker" for check in checks) else 0
