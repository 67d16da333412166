"""One function a command: arguments in, exit code out. Each imports what it needs when it is called."""

import argparse


def doctor(arguments: argparse.Namespace) -> int:
    """Print what this machine has. 1 if something indispensable is missing."""
    from analysis.doctor import check_machine, print_checks

    checks = check_machine()
    print_checks(checks)
    return 1 if any(check.verdict == "blocker" for check in checks) else 0


def probe(arguments: argparse.Namespace) -> int:
    """Measure this machine and write its profile."""
    from simulator.hardware_table import describe
    from simulator.probe import probe as run_probe

    profile = run_probe(arguments.output)
    print(describe(profile))
    print(f"written to {arguments.output}")
    return 0


def measure(arguments: argparse.Namespace) -> int:
    """Time operations of a model on this machine and write their costs."""
    import torch

    from executor.measure import measure as run_measure
    from simulator.hardware import load_hardware
    from simulator.model import read_model_config
    from simulator.policy import Workload

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = Workload(
        sequence_length=arguments.sequence_length,
        tokens_per_step=arguments.sequence_length,
        precision=arguments.precision,
        gradient_format=arguments.gradient_format,
        compiled=device.type == "cuda" if arguments.compiled is None else arguments.compiled,
    )
    costs = run_measure(
        read_model_config(arguments.model), load_hardware(arguments.hardware), workload,
        micro_batch_rows=arguments.micro_batch_rows, device=device, report=print,
    )  # fmt: skip
    costs.save(arguments.output)
    print(f"{len(costs.entries)} operations written to {arguments.output}")
    return 0
