"""Train a DSpark drafter for a target.

    dspark train --config training/configs/smollm2-135m.yaml
    dspark train --config training/configs/smollm2-135m.yaml --learning-rate 3e-4 --max-steps 100
    dspark train --config training/configs/smollm2-135m.yaml --resume-from-checkpoint true
    dspark train --config training/configs/qwen3-8b.yaml --dry-run

Every key of the YAML file is a flag and the other way round; flags win; unknown keys are refused. The trained drafter is
saved in `output_dir/drafter`, a folder that `AutoModel.from_pretrained` loads.
"""

import sys
from collections.abc import Sequence

from modeling_dspark import DSparkModel
from training.common.commands import exit_status
from training.run.dry_run import DryRun
from training.run.options import parse_arguments
from training.run.training import run


def main(argv: Sequence[str] | None = None) -> DSparkModel | DryRun:
    """Run the command; returns the trained drafter, or the sizes of a dry run."""
    return run(*parse_arguments(list(sys.argv[1:] if argv is None else argv), __doc__))


if __name__ == "__main__":
    sys.exit(
        exit_status(
            main,
            when_interrupted="`--resume-from-checkpoint true` continues from the last checkpoint in `output_dir`, if any.",
        )
    )
