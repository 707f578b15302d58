r"""Train DSpark and the drafters that it is compared with on the same data, for the same steps, and measure them alike.

    python -m benchmarks.study --prompts prompts_train.jsonl --answers answers.jsonl --steps 1500
    python -m benchmarks.study --prompts prompts_train.jsonl --answers answers.jsonl --groups main --steps 300 --limit 5
    python -m benchmarks.study --prompts prompts_train.jsonl --answers answers.jsonl --groups main --steps 3000 \
        --drafters dspark dflash eagle --work runs/study_long --output study_long.json

Every drafter reads the same features, sees the same conversations, anchors and losses in the same order, and starts from
the same target layers; drafters differ only in the settings that their names stand for. The target answers the evaluation prompts greedily
once, and each drafter is replayed over those answers. A study that was stopped resumes. Groups: `main` (all kinds of
drafters), `depth` (1 to 5 layers) and `block` (blocks of 1 to 16 drafts).
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.lib.options import CommandParser, add_output_option, add_prompts_option, command, positive_int
from benchmarks.lib.report import require_matplotlib, write_json
from benchmarks.lib.study_confidence import copy_plots, measure_confidence, unseen_prompts
from benchmarks.lib.study_data import evaluation_sets, measure, num_answers, references
from benchmarks.lib.study_report import COMPARED, OURS, plot_study, study_tables
from benchmarks.lib.work import check_work
from training.common.environment import environment
from training.common.files import read_jsonl, write_atomically
from training.common.targets import EMBEDDED_TARGET, load_target
from training.data.conversations import Conversation
from training.run.architectures import ARCHITECTURES
from training.run.resuming import last_whole_checkpoint


RECIPE: dict[str, Any] = {  # that of the shipped drafter, tuned with `dspark`
    "target_dtype": "bfloat16", "num_draft_layers": 2, "block_size": 7, "target_layer_ids": [1, 10, 19, 28],
    "mask_token_id": 16, "markov_rank": 64, "draft_vocab_size": 12288, "max_length": 512, "num_eval_conversations": 0,
    "num_anchors": 64, "ce_weight": 0.1, "kd_weight": 0.1, "l1_weight": 0.8, "confidence_weight": 0.3,
    "l1_warmup_fraction": 0.6, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "warmup_steps": 50,
    "lr_scheduler_type": "cosine", "adam_beta2": 0.95, "weight_decay": 0.0, "max_grad_norm": 1.0, "bf16": True,
    "use_cpu": True, "logging_steps": 50, "save_steps": 100, "save_total_limit": 1, "report_to": "none",
}  # fmt: skip
WARM_START = {1: [29], 2: [28, 29], 3: [27, 28, 29], 5: [25, 26, 27, 28, 29]}
PLAIN_HEADS = {"markov_rank": 0, "confidence_head": False}
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dspark-rnn": {"markov_head_type": "rnn"},
    "dflash": PLAIN_HEADS,
    "dflash-old-layout": PLAIN_HEADS | {"sample_from_anchor": False},
    "eagle": PLAIN_HEADS | {"architecture": "eagle", "num_draft_layers": 1},
    "mtp-1": PLAIN_HEADS | {"architecture": "eagle", "num_draft_layers": 1, "block_size": 1},
}
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "main": KINDS,
    "depth": {f"{kind}-depth-{n}": KINDS[kind] | {"num_draft_layers": n} for n in (1, 3, 5) for kind in COMPARED},
    "block": {f"{kind}-block-{n}": KINDS[kind] | {"block_size": n} for n in (1, 4, 8, 12, 16) for kind in COMPARED},
}
DRAFTERS = tuple(name for members in GROUPS.values() for name in members)
DEFINITIONS = {
    "tau": "acceptance length: tokens per round, bonus tokens counted, pooled over greedy decoding of all answers of a set",
    "acceptance": "by position: of the rounds that accepted all drafts before it, the share that accepted it; all sets",
    "rounds": "per answer, by set; those of the plain target are its tokens",
    "curve": "training steps, and tau of whole blocks at random anchors over the steps since the entry before",
    "train_seconds": "wall time of the training's last start, other work on the machine included",
}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("study", __doc__)
    parser.add_argument("--target", default=EMBEDDED_TARGET, help="a folder, a Hub id, or the embedded target's name")
    parser.add_argument("--prompts", required=True, help="JSONL file of training prompts")
    parser.add_argument("--answers", required=True, nargs="+", help="files written by `dspark regenerate`")
    add_prompts_option(parser, ["--eval-prompts"])
    parser.add_argument("--limit", type=positive_int, metavar="N", help="evaluation prompts per set")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=128, help="length limit of the replayed answers"
    )
    parser.add_argument("--groups", nargs="+", choices=tuple(GROUPS), default=list(GROUPS), help="what to train")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, metavar="NAME", help=f"only these of {DRAFTERS}")
    parser.add_argument("--steps", type=positive_int, default=1500, help="steps of every training")
    parser.add_argument("--seed", type=int, default=0, help="seed of every training")
    parser.add_argument(
        "--calibration-prompts",
        type=positive_int,
        default=200,
        metavar="N",
        help="number of them; they have no answers",
    )
    parser.add_argument("--work", default="runs/study", help="folder for trainings, answers and features")
    parser.add_argument("--feature-cache", help="folder for features, computed once for all (default: in every step)")
    parser.add_argument("--feature-cache-gb", type=float, default=20.0, help="its size limit")
    add_output_option(parser, "study")
    parser.add_argument("--plots", help="folder for plots")
    return parser.parse_args(argv)


def training_flags(options: argparse.Namespace, fields: dict[str, Any], folder: Path) -> list[str]:
    """Arguments of `dspark train` for one drafter."""
    recipe = RECIPE | fields
    recipe["init_from_target_layers"] = WARM_START[recipe["num_draft_layers"]]
    recipe |= {
        "target": options.target, "prompts": options.prompts, "answers": options.answers, "seed": options.seed,
        "max_steps": options.steps, "output_dir": str(folder),
    }  # fmt: skip
    if options.feature_cache:
        recipe |= {"feature_cache": options.feature_cache, "feature_cache_gb": options.feature_cache_gb}
    if last_whole_checkpoint(folder) is not None:
        recipe["resume_from_checkpoint"] = "true"
    flags: list[str] = []
    for name, value in recipe.items():
        values = value if isinstance(value, list) else [value]
        flags += [
            f"--{name.replace('_', '-')}",
            *(str(item).lower() if isinstance(item, bool) else str(item) for item in values),
        ]
    return flags


def train(options: argparse.Namespace, fields: dict[str, Any], folder: Path) -> float:
    """Train one drafter, or the rest of it, in a process of its own; returns the seconds it took."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "training.train", *training_flags(options, fields, folder)]
    if subprocess.run(command, check=False).returncode:
        raise ValueError(f"The training of `{folder.name}` failed; its messages are above.")
    return time.perf_counter() - begun


def chosen(options: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """Group, name and fields of the drafters to train.

    Raises:
        ValueError: if none of `--drafters` is in `--groups`.
    """
    every = [(group, name, fields) for group in options.groups for name, fields in GROUPS[group].items()]
    members = [member for member in every if not options.drafters or member[1] in options.drafters]
    if not members:
        raise ValueError(f"None of --drafters {' '.join(options.drafters)} is in --groups {' '.join(options.groups)}.")
    return members


def study(options: argparse.Namespace, sets: dict[str, list[Conversation]]) -> list[dict[str, Any]]:
    """Train and measure the drafters that have no result yet; results in the order of the groups."""
    work = Path(options.work)
    results, target = references(sets, num_tokens=RECIPE["block_size"]), None
    for group, name, fields in tqdm(chosen(options), desc="Drafters"):
        folder = work / name
        settings = {"fields": RECIPE | fields, "steps": options.steps, "seed": options.seed, "limit": options.limit}
        record = folder / "result.json"
        result = json.loads(record.read_text()) if record.is_file() else None
        if result is None or result["settings"] != settings:
            seconds = train(options, fields, folder)
            target = target or load_target(options.target, "bfloat16")
            architecture = ARCHITECTURES[fields.get("architecture", "dspark")]
            drafter = architecture.from_pretrained(folder / "drafter", dtype=torch.bfloat16).eval()
            result = {"settings": settings, "train_seconds": round(seconds, 1), **measure(drafter, target, sets)}
            write_atomically(record, json.dumps(result, indent=1) + "\n")
        results.append({"group": group, "drafter": name, **result, "curve": learning_curve(folder)})
    return results


def learning_curve(folder: Path) -> list[list[float]]:
    """Steps of a training, and the greedy acceptance length of a block over the steps since the previous entry."""
    log = folder / "log.jsonl"
    entries = read_jsonl(log) if log.is_file() else []
    return [[entry["step"], entry["tau_greedy"]] for entry in entries if "tau_greedy" in entry]


def confidence(options: argparse.Namespace, unseen: list[dict[str, Any]]) -> dict[str, Any]:
    """The confidence of `dspark`: its report, without the names of folders."""
    work = Path(options.work)
    report = measure_confidence(
        work / OURS / "drafter", work, target=options.target, prompts=unseen, max_new_tokens=options.max_new_tokens
    )
    return {"calibration_prompts": len(unseen)} | asdict(report)


def run(options: argparse.Namespace) -> None:
    """Train, measure, print, write and plot."""
    if options.plots:
        require_matplotlib("--plots")
    with_ours = OURS in {name for _, name, _ in chosen(options)}
    facts = environment("bfloat16")
    Path(options.work).mkdir(parents=True, exist_ok=True)
    conversations = num_answers(options.prompts, options.answers)
    settings = {name: getattr(options, name) for name in ("target", "steps", "seed")}
    check_work(Path(options.work), settings, {"prompts": [options.prompts], "answers": options.answers})
    sets = evaluation_sets(options)
    unseen = unseen_prompts(options.prompts, options.answers, options.calibration_prompts)
    results = study(options, sets)
    content = {
        "environment": facts,
        "target": options.target,
        "conversations": conversations,
        "steps": options.steps,
        "seed": options.seed,
        "answers": {name: len(answers) for name, answers in sets.items()},
        "definitions": DEFINITIONS,
        "results": results,
    }
    if with_ours:
        content["confidence"] = confidence(options, unseen)
    print(f"\n{study_tables(content)}\nwritten to {write_json(options.output, content)}")
    if options.plots:
        folder = Path(options.plots)
        plots = plot_study(results, folder)
        if with_ours:
            plots += copy_plots(Path(options.work), folder)
        print(*(f"written to {path}" for path in plots), sep="\n")


main = command(parse_options, run)


if __name__ == "__main__":
    sys.exit(main())
