"""Fit a drafter's confidence head anew, on rounds of prompts that the drafter was not trained on.

    dspark refit-confidence --drafter runs/my-drafter/drafter --prompts held_out.jsonl \\
        --output runs/my-drafter/refitted

On training texts more drafts are accepted than in use, so a head that was trained along with its backbone promises too
much. The head is linear: given verified rounds, the rest is a logistic regression of `[h_k; W1[prev]]` on whether position
`k` was accepted, over the positions whose predecessors were. Cross-validation chooses how far it may move from the trained
head. Only `confidence_head` changes. Calibrate afterwards, on other prompts (`dspark calibrate`).
"""

import sys
from collections.abc import Sequence

from training.common.commands import exit_status, parse_command_line
from training.confidence.refit import RefitArguments, refit


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run the command; returns its report."""
    return refit(parse_command_line(RefitArguments, argv, command="refit_confidence", description=__doc__))


if __name__ == "__main__":
    sys.exit(exit_status(main, when_interrupted="no drafter is written."))
