"""`shared-offload bench WHAT`: measurements to repeat on one's own host; listed here."""

from __future__ import annotations

import argparse

from shared_offload.bench import (
    accuracy,
    encoders,
    end_to_end,
    load,
    modes,
    register,
    step,
    stream,
    vae,
)

MEASUREMENTS = (step, accuracy, stream, modes, vae, encoders, end_to_end, load, register)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command with all measurements; each sets its own `run`."""
    parser = subparsers.add_parser("bench", help="measure this host")
    measurements = parser.add_subparsers(title="measurements", metavar="WHAT", required=True)
    for measurement in MEASUREMENTS:
        measurement.add_parser(measurements)
