r"""Train DSpark and the drafters that it is compared with on the same data, for the same steps, and measure them alike.

    python -m benchmarks.study --prompts prompts_train.jsonl --answers answers.jsonl --steps 1500
    python -m benchmarks.study --prompts prompts_train.jsonl --answers answers.jsonl --groups main --steps 300 --limit 5
    python -m benchmarks.study --prompts prompts_train.jsonl --answers answers.jsonl --groups main --steps 3000 \
        --drafters dspark dflash eagle --work runs/study_long --output study_long.json

Every drafter reads the same features, sees the same conversations, anchors and losses in the same order, and starts from
the same target layers; what a name stands for is all that differs. The target answers the evaluation prompts greedily
once, and each drafter is replayed over those answers. A study that was stopped goes on where it was. Groups: `main` (all
kinds of drafters), `depth` (1 to 5 layers) and `block` (blocks of 1 to 16 drafts).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from benchmarks.baselines.replay import replay, replay_prompt_lookup
from benchmarks.lib.environment import environment
from benchmarks.lib.packed import exit_status, require_matplotlib
from benchmarks.lib.pair import positive_int
from benchmarks.lib.report import write_json
from benchmarks.lib.study_report import COMPARED, OURS, plot_study, study_tables
from benchmarks.lib.work import check_work
from benchmarks.study_confidence import copy_plots, measure_confidence, unseen_prompts
from modeling_dspark import RunStatistics
from training.answers.arguments import RegenerateArguments
from training.answers.regeneration import regenerate
from training.common.commands import HelpFormatter
from training.common.files import read_jsonl, write_atomically
from training.common.targets import EMBEDDED_TARGET, load_target, load_tokenizer
from training.data.conversations import Conversation
from training.data.prompts import prompt_ids
from training.evaluation.runs import read_sets
from training.run.architectures import ARCHITECTURES
from training.run.resuming import last_whole_checkpoint


HERE = Path(__file__).parent
RECIPE: dict[str, Any] = {  # of the shipped drafter, whose trials were made with `dspark`
    "target_dtype": "bfloat16", "num_draft_layers": 2, "block_size": 7, "target_layer_ids": [1, 10, 19, 28],
    "mask_token_id": 16, "markov_rank": 64, "draft_vocab_size": 12288, "max_length": 512, "num_eval_conversations": 0,
    "num_anchors": 64, "ce_weight": 0.1, "soft_weight": 0.1, "l1_weight": 0.8, "confidence_weight": 0.3,
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
    "tau": "tokens a round, the target's own counted, pooled over rounds of greedy decoding of all answers of a set",
    "acceptance": "by position: of the rounds that kept all drafts before it, the share that kept it; all sets",
    "rounds": "of each answer, by set; those of the plain target are its tokens",
    "curve": "training steps, and tau of whole blocks at random anchors over the steps since the entry before",
    "train_seconds": "wall time of the training's last start, other work on the machine included",
}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.study", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--target", default=EMBEDDED_TARGET, help="a folder, a Hub id, or the embedded target's name")
    parser.add_argument("--prompts", required=True, help="JSONL file of training prompts")
    parser.add_argument("--answers", required=True, nargs="+", help="files written by `training.regenerate`")
    parser.add_argument("--eval-prompts", default=str(HERE / "prompts_eval.jsonl"), help="JSONL, grouped by `source`")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="evaluation prompts of each set")
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, help="of the answers that are replayed")
    parser.add_argument("--groups", nargs="+", choices=tuple(GROUPS), default=list(GROUPS), help="what to train")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, metavar="NAME", help=f"only these of {DRAFTERS}")
    parser.add_argument("--steps", type=positive_int, default=1500, help="of every training")
    parser.add_argument("--seed", type=int, default=0, help="of every training")
    parser.add_argument("--calibration-prompts", type=positive_int, default=200, metavar="N", help="without answers")
    parser.add_argument("--work", default="runs/study", help="folder of trainings, answers and features")
    parser.add_argument("--feature-cache", help="folder for features, computed once for all (default: in every step)")
    parser.add_argument("--feature-cache-gb", type=float, default=20.0, help="its largest size")
    parser.add_argument("--output", default=str(HERE / "results" / "study.json"), help="the JSON file to write")
    parser.add_argument("--plots", help="folder for plots")
    return parser.parse_args(argv)


def training_flags(options: argparse.Namespace, fields: dict[str, Any], folder: Path) -> list[str]:
    """Arguments of `training.train` for one drafter."""
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
        flags += [f"--{name}", *(str(item).lower() if isinstance(item, bool) else str(item) for item in values)]
    return flags


def train(options: argparse.Namespace, fields: dict[str, Any], folder: Path) -> float:
    """Train one drafter, or the rest of it, in a process of its own; seconds taken."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "training.train", *training_flags(options, fields, folder)]
    if subprocess.run(command, check=False).returncode:
        raise ValueError(f"The training of `{folder.name}` failed; its messages are above.")
    return time.perf_counter() - begun


def num_answers(prompts: str, answers: Sequence[str]) -> int:
    """Answers in all files.

    Raises:
        ValueError: if an answer is to a prompt that is not in `prompts`.
    """
    num_prompts = len(read_jsonl(prompts))
    records: list[tuple[str, Any]] = [(path, record) for path in answers for record in read_jsonl(path)]
    places = [(path, record.get("prompt") if isinstance(record, dict) else None) for path, record in records]
    for path, place in places:
        if not isinstance(place, int):
            raise ValueError(f"`{path}` holds something else than answers of `training.regenerate`.")
        if not 0 <= place < num_prompts:
            raise ValueError(
                f"`{path}` answers prompt {place}, but `{prompts}` has {num_prompts}: pass its own prompts."
            )
    return len(places)


def evaluation_sets(options: argparse.Namespace) -> dict[str, list[Conversation]]:
    """Greedy answers of the target by source, made once."""
    work = Path(options.work)
    _, found, records = read_sets(options.eval_prompts, group_by="source", limit=options.limit)
    kept = [records[index] for index in sorted(index for indices in found.values() for index in indices)]
    prompts = work / "eval_prompts.jsonl"
    text = "".join(json.dumps(record) + "\n" for record in kept)
    if prompts.is_file() and prompts.read_text(encoding="utf-8") != text:
        raise ValueError(f"`{work}` holds a study of other evaluation prompts; choose another `--work`.")
    write_atomically(prompts, text)
    arguments = RegenerateArguments(
        prompts=str(prompts),
        output=str(work / "eval_answers.jsonl"),
        target=options.target,
        temperatures=[0.0],
        max_new_tokens=options.max_new_tokens,
        batch_size=16,
        max_turns=1,
    )
    tokenizer = load_tokenizer(options.target)
    sets: dict[str, list[Conversation]] = {}
    for answer in sorted(read_jsonl(regenerate(arguments)), key=lambda answer: answer["prompt"]):
        record = kept[answer["prompt"]]
        ids = prompt_ids(tokenizer, record)
        conversation = Conversation((*ids, *answer["answer_ids"]), len(ids), 0.0)
        sets.setdefault(record["source"], []).append(conversation)
    return sets


def measure(drafter: Any, target: Any, sets: dict[str, list[Conversation]]) -> dict[str, Any]:
    """Replay one drafter over all sets."""
    runs = {name: replay(drafter, target, conversations) for name, conversations in sets.items()}
    return {**summary(runs), "parameters": sum(parameter.numel() for parameter in drafter.parameters())}


def summary(runs: dict[str, RunStatistics]) -> dict[str, Any]:
    """What is kept of the rounds of all sets."""
    pooled = RunStatistics.pooled(next(iter(runs.values())).block_size, list(runs.values()))
    tau = {name: round(run.acceptance_length, 4) for name, run in (runs | {"all": pooled}).items()}
    shares = zip(pooled.acceptance_rate_by_position, pooled.tried_by_position, strict=True)
    return {
        "tau": tau,
        "acceptance": [round(share, 4) if tried else None for share, tried in shares],
        "tried": pooled.tried_by_position,
        "rounds": {name: [answer.rounds for answer in run.requests] for name, run in runs.items()},
    }


def references(sets: dict[str, list[Conversation]]) -> list[dict[str, Any]]:
    """Drafters that nothing is trained for: the plain target, which makes a token a round, and prompt lookup."""
    runs = {name: replay_prompt_lookup(answers, num_tokens=RECIPE["block_size"]) for name, answers in sets.items()}
    plain = {name: [sum(answer.new_tokens) for answer in run.requests] for name, run in runs.items()}
    tau = dict.fromkeys([*runs, "all"], 1.0)
    return [
        {"group": "references", "drafter": "plain target", "tau": tau, "rounds": plain},
        {"group": "references", "drafter": "prompt lookup", **summary(runs)},
    ]


def chosen(options: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """Group, name and fields of what is to be trained.

    Raises:
        ValueError: if none of `--drafters` is in `--groups`.
    """
    every = [(group, name, fields) for group in options.groups for name, fields in GROUPS[group].items()]
    found = [one for one in every if not options.drafters or one[1] in options.drafters]
    if not found:
        raise ValueError(f"None of --drafters {' '.join(options.drafters)} is in --groups {' '.join(options.groups)}.")
    return found


def study(options: argparse.Namespace, sets: dict[str, list[Conversation]]) -> list[dict[str, Any]]:
    """Train and measure what is not there yet; results in the order of the groups."""
    work = Path(options.work)
    results, target = references(sets), None
    for group, name, fields in tqdm(chosen(options), desc="Drafters"):
        folder = work / name
        settings = {"fields": RECIPE | fields, "steps": options.steps, "seed": options.seed, "limit": options.limit}
        record = folder / "result.json"
        found = json.loads(record.read_text()) if record.is_file() else None
        if found is None or found["settings"] != settings:
            seconds = train(options, fields, folder)
            target = target or load_target(options.target, "bfloat16")
            architecture = ARCHITECTURES[fields.get("architecture", "dspark")]
            drafter = architecture.from_pretrained(folder / "drafter", dtype=torch.bfloat16).eval()
            found = {"settings": settings, "train_seconds": round(seconds, 1), **measure(drafter, target, sets)}
            write_atomically(record, json.dumps(found, indent=1) + "\n")
        results.append({"group": group, "drafter": name, **found, "curve": learning_curve(folder)})
    return results


def learning_curve(folder: Path) -> list[list[float]]:
    """Steps of a training, and the greedy accepted length of a block over the steps since the last entry."""
    log = folder / "log.jsonl"
    entries = read_jsonl(log) if log.is_file() else []
    return [[entry["step"], entry["tau_greedy"]] for entry in entries if "tau_greedy" in entry]


def confidence(options: argparse.Namespace, unseen: list[dict[str, Any]]) -> dict[str, Any]:
    """The confidence of `dspark`: its report without what names folders."""
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


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
