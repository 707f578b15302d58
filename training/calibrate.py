"""Calibrate a drafter's confidence by sequential temperature scaling (STS).

    dspark calibrate --drafter runs/my-drafter/drafter --prompts held_out.jsonl --output runs/calibration
    dspark calibrate --drafter runs/my-drafter/drafter --prompts held_out.jsonl --output runs/calibration \\
        --temperature 0.8 --num-prompts 500 --dry-run

Answers prompts that the drafter was not trained on, with every block verified at full length; fits temperatures on one
share of the prompts and measures them on the rest. The drafter's config.json receives `confidence_temperatures`; the
output folder receives `rounds.jsonl` (the recorded rounds), `calibration.json` (the form that SGLang reads),
`report.json` and `reliability.png`.
"""

import sys
from collections.abc import Sequence

from training.common.commands import exit_status, parse_command_line
from training.confidence.calibration import CalibrateArguments, calibrate
from training.confidence.scaling import CalibrationReport


def main(argv: Sequence[str] | None = None) -> CalibrationReport:
    """Run the command; returns the figures of the held-out prompts."""
    return calibrate(parse_command_line(CalibrateArguments, argv, command="calibrate", description=__doc__))


if __name__ == "__main__":
    sys.exit(exit_status(main, when_interrupted="nothing is written."))
