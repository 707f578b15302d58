"""Fine-tune a drafter for one domain by low-rank adapters, and measure its acceptance length there and elsewhere.

    python -m benchmarks.domain --prompts prompts_train.jsonl --answers answers.jsonl --domain code --steps 300

Training uses the conversations whose prompt has the domain as its `category`. The target answers the evaluation prompts
greedily once, and the drafter is replayed over those answers before and after. A run that was stopped resumes.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.machine import conditions
from benchmarks.lib.options import (
    DEFAULT_DRAFTER,
    CommandParser,
    add_output_option,
    add_prompts_option,
    add_run_options,
    command,
    positive_int,
    start,
)
from benchmarks.lib.pair import check_drafter, describe_drafter
from benchmarks.lib.report import markdown_table, write_json
from benchmarks.lib.study_data import evaluation_sets, measure, num_answers
from benchmarks.lib.work import check_work
from modeling_dspark import DSparkModel
from training.common.files import read_jsonl, write_atomically
from training.common.targets import EMBEDDED_TARGET, load_target
from training.run.resuming import last_whole_checkpoint


_TUNING = ("steps", "learning_rate", "lora_rank")
DEFINITIONS = {
    "tau": "acceptance length: tokens per round, bonus tokens counted, pooled over greedy decoding of all answers of a set",
    "train_minutes": "wall time of the fine-tuning, other work on the machine included",
}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("domain", __doc__)
    parser.add_argument("--target", default=EMBEDDED_TARGET, help="a folder, a Hub id, or the embedded target's name")
    parser.add_argument("--drafter", default=DEFAULT_DRAFTER, help="a folder or a Hub id")
    parser.add_argument("--prompts", required=True, help="JSONL file of training prompts with `category`")
    parser.add_argument("--answers", required=True, nargs="+", help="files written by `dspark regenerate`")
    parser.add_argument("--domain", default="code", help="category to fine-tune for")
    add_prompts_option(parser, ["--eval-prompts"])
    parser.add_argument("--limit", type=positive_int, metavar="N", help="evaluation prompts per set")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=128, help="length limit of the replayed answers"
    )
    parser.add_argument("--steps", type=positive_int, default=300, help="steps of the fine-tuning")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="its peak")
    parser.add_argument("--lora-rank", type=positive_int, default=16, help="rank of the adapters")
    parser.add_argument("--feature-cache", help="folder for features (default: computed in every step)")
    parser.add_argument("--work", default="runs/domain", help="folder for the training and the answers")
    add_output_option(parser, "domain")
    add_run_options(parser)
    return parser.parse_args(argv)


def domain_answers(options: argparse.Namespace) -> tuple[Path, int]:
    """A file with the answers to the prompts of the domain, and their number.

    Raises:
        ValueError: if no prompt is of that category, or an answer is to no prompt.
    """
    num_answers(options.prompts, options.answers)
    prompts: list[Any] = read_jsonl(options.prompts)
    categories = [record.get("category") if isinstance(record, dict) else None for record in prompts]
    if options.domain not in categories:
        raise ValueError(
            f"`--domain {options.domain}`: `{options.prompts}` has the categories {sorted({str(c) for c in categories})}."
        )
    answers = [record for path in options.answers for record in read_jsonl(path)]
    chosen = [record for record in answers if categories[record["prompt"]] == options.domain]
    settings = {name: getattr(options, name) for name in ("target", "drafter", "domain", *_TUNING)}
    check_work(Path(options.work), settings, {"prompts": [options.prompts], "answers": options.answers})
    path = Path(options.work) / "answers.jsonl"
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in chosen))
    return path, len(chosen)


def fine_tune(options: argparse.Namespace, answers: Path) -> float:
    """Run the training or the rest of it; returns the minutes it took."""
    folder = Path(options.work) / "tuned"
    flags = [
        *("--target", options.target, "--drafter", options.drafter, "--peft", "lora"),
        *("--lora-rank", str(options.lora_rank), "--lora-alpha", str(2 * options.lora_rank)),
        *("--prompts", options.prompts, "--answers", str(answers), "--output-dir", str(folder)),
        *("--max-steps", str(options.steps), "--learning-rate", str(options.learning_rate), "--warmup-steps", "20"),
        *("--lr-scheduler-type", "cosine", "--per-device-train-batch-size", "2", "--num-anchors", "64"),
        *("--ce-weight", "0.1", "--kd-weight", "0.1", "--l1-weight", "0.8", "--confidence-weight", "0.3"),
        *("--num-eval-conversations", "0", "--bf16", "true", "--use-cpu", str(not torch.cuda.is_available()).lower()),
        *("--save-steps", "50", "--save-total-limit", "1", "--logging-steps", "25", "--report-to", "none"),
    ]
    if options.feature_cache:
        flags += ["--feature-cache", options.feature_cache]
    if last_whole_checkpoint(folder) is not None:
        flags += ["--resume-from-checkpoint", "true"]
    begun = time.perf_counter()
    if subprocess.run([sys.executable, "-m", "training.train", *flags], check=False).returncode:
        raise ValueError("The training failed; its messages are above.")
    return (time.perf_counter() - begun) / 60


def replayed(folder: str, target: Any, sets: Any) -> dict[str, Any]:
    drafter = DSparkModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return measure(drafter, target, sets)


def tau_rows(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Acceptance length by set, before and after, as Markdown."""
    rows = [
        [name, f"{tau:.3f}", f"{after['tau'][name]:.3f}", f"{after['tau'][name] / tau - 1:+.1%}"]
        for name, tau in before["tau"].items()
    ]
    return markdown_table(["set", "before", "after", "change"], rows)


def run(options: argparse.Namespace) -> None:
    """Fine-tune, measure, print and write."""
    check_drafter(options.drafter)
    machine = start(options)
    facts = machine.environment("bfloat16")
    Path(options.work).mkdir(parents=True, exist_ok=True)
    answers, count = domain_answers(options)
    sets = evaluation_sets(options)
    minutes = fine_tune(options, answers)
    target = load_target(options.target, "bfloat16")
    before = replayed(options.drafter, target, sets)
    after = replayed(str(Path(options.work) / "tuned" / "drafter"), target, sets)
    print(tau_rows(before, after))
    content = {
        "environment": facts,
        "target": options.target,
        "drafter": describe_drafter(DSparkModel.from_pretrained(options.drafter), options.drafter),
        "domain": options.domain,
        "conversations": count,
        "steps": options.steps,
        "train_minutes": round(minutes, 1),
        "load": machine.load(),
        "definitions": DEFINITIONS,
        "before": before,
        "after": after,
    }
    print(f"\n{conditions(content, batch='batches of 2 in training', repeats='one training')}")
    print(f"written to {write_json(options.output, content)}")


main = command(parse_options, run)


if __name__ == "__main__":
    sys.exit(main())
