"""Benchmarks of the raw machine, which the probe puts together to a profile. Everything here needs torch."""
