"""Measure a drafter on sets of prompts: acceptance, calibration, confidence thresholds, and speed.

    dspark evaluate --drafter runs/my-drafter/drafter --prompts eval.jsonl
    dspark evaluate --drafter runs/my-drafter/drafter --prompts eval.jsonl --output runs/evaluation \\
        --limit 20 --temperature 0.8 --no-speed

The prompts are answered in batches with every block verified at full length, whatever the drafter's schedule; then, one
at a time, by plain `generate` and by `generate` with the drafter, in turns. The output folder receives `report.json`,
`report.md`, the plots, and the recorded rounds and timings as `rounds.jsonl` and `speed.jsonl`.
"""

import sys
from collections.abc import Sequence

from training.common.commands import exit_status, parse_command_line
from training.evaluation.evaluation import EvaluateArguments, evaluate
from training.evaluation.report import EvalReport


def main(argv: Sequence[str] | None = None) -> EvalReport:
    """Run the command; returns the report that it wrote."""
    return evaluate(parse_command_line(EvaluateArguments, argv, command="evaluate", description=__doc__))


if __name__ == "__main__":
    sys.exit(exit_status(main, when_interrupted="no report is written."))
