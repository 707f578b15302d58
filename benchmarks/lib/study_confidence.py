"""The confidence of a study's DSpark drafter: calibrated on prompts without answers, measured on the evaluation prompts.

Both steps are the project's commands, `dspark calibrate` and `dspark evaluate`, with their own resuming.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from training.common.files import read_jsonl, write_atomically
from training.confidence.calibration import CalibrateArguments, calibrate
from training.evaluation.evaluation import EvaluateArguments, evaluate
from training.evaluation.report import EvalReport


PLOTS = ("thresholds.png", "reliability.png")


def unseen_prompts(prompts: str, answers: list[str], count: int) -> list[dict[str, Any]]:
    """The first prompts without an answer, which no drafter of the study was trained on.

    Raises:
        ValueError: if every prompt has an answer.
    """
    answered = {record["prompt"] for path in answers for record in read_jsonl(path)}
    unseen = [record for place, record in enumerate(read_jsonl(prompts)) if place not in answered]
    if not unseen:
        raise ValueError(
            f"All prompts of `{prompts}` have answers; confidence is calibrated on prompts that have none."
        )
    return unseen[:count]


def measure_confidence(
    drafter: Path, work: Path, *, target: str, prompts: list[dict[str, Any]], max_new_tokens: int
) -> EvalReport:
    """Calibrate a copy of `drafter` on `prompts`, and evaluate that on the evaluation prompts in `work`."""
    file, copy = work / "calibration_prompts.jsonl", work / "calibrated"
    write_atomically(file, "".join(json.dumps(record) + "\n" for record in prompts))
    if not copy.is_dir():
        aside = work / ".calibrated"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(drafter, aside)
        aside.rename(copy)
    shared: dict[str, Any] = {"drafter": str(copy), "target": target, "max_new_tokens": max_new_tokens}
    calibrate(CalibrateArguments(prompts=str(file), output=str(work / "calibration"), **shared))
    return evaluate(
        EvaluateArguments(
            prompts=str(work / "eval_prompts.jsonl"), output=str(work / "evaluation"), no_speed=True, **shared
        )
    )


def copy_plots(work: Path, folder: Path) -> list[Path]:
    """The sweep over thresholds and the reliability diagram, named as plots of a study."""
    return [Path(shutil.copyfile(work / "evaluation" / name, folder / f"study_{name}")) for name in PLOTS]


__all__ = ["copy_plots", "measure_confidence", "unseen_prompts"]
