"""Spec and simulator: hardware, model, workload, policy, the step program and its replay."""
