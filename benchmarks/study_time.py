"""Time of a round with each drafter of a study, and the speed that follows from its acceptance length.

    python -m benchmarks.study_time --work runs/study --threads 1
    python -m benchmarks.study_time --work runs/study runs/study_long --threads 1

A drafter that runs once per draft token has more of its drafts accepted, and takes longer to make them. Here every drafter
drafts after the same context, and the target verifies as many tokens; all take turns in changing order. The expected
number of accepted drafts out of `n` follows from the study's acceptance rate by position, so each drafter is measured at every
`n` and at its best. Drafters of further folders, which were trained for longer, are measured by the same times. All heads
run in PyTorch, so that no drafter has a kernel that another lacks.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from benchmarks.baselines.autoregressive import EagleDrafter
from benchmarks.lib.machine import conditions
from benchmarks.lib.options import CommandParser, add_output_option, add_run_options, command, positive_int, start
from benchmarks.lib.report import markdown_table, write_json
from modeling_dspark import DSparkModel
from modeling_dspark.compat_transformers import cache_keyword
from modeling_dspark.draft_propose import propose
from modeling_dspark.model_cache import DSparkCache
from training.common.targets import EMBEDDED_TARGET, load_target
from training.run.architectures import ARCHITECTURES


DRAFTERS = ("dspark", "dspark-depth-5", "dspark-rnn", "dflash", "eagle", "mtp-1")
NEW_TOKENS = 2  # of the context that are new to the drafter in a round
DEFINITIONS = {
    "verify_ms": "median milliseconds of a target forward over that many tokens, after the context",
    "draft_ms": "median milliseconds of drafting that many tokens, with two new tokens of context",
    "tau": "tokens per round at that many drafts: 1 plus the products of the study's acceptance rate by position",
    "speedup": "tau / (draft + verify) over 1 / (verify of one token), at that many drafts",
}


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = CommandParser("study_time", __doc__)
    parser.add_argument("--target", default=EMBEDDED_TARGET, help="a folder, a Hub id, or the embedded target's name")
    parser.add_argument(
        "--work", nargs="+", default=["runs/study"], help="folders of `benchmarks.study`, all in the first"
    )
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), metavar="NAME", help="folders in --work")
    parser.add_argument("--context", type=positive_int, default=256, metavar="N", help="tokens before a round")
    parser.add_argument("--repeats", type=positive_int, default=40, help="turns of every drafter and length")
    add_run_options(parser)
    add_output_option(parser, "study_time")
    return parser.parse_args(argv)


def trained(work: Path, name: str) -> dict[str, Any]:
    """A study's result for one drafter.

    Raises:
        ValueError: if the study has no such drafter, or has not measured it.
    """
    record = work / name / "result.json"
    if not record.is_file():
        raise ValueError(
            f"`--drafters`: `{work}` holds no measured drafter `{name}`; train it with `benchmarks.study`."
        )
    result: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return result


def load(work: Path, name: str) -> DSparkModel:
    """A drafter of a study, in bf16."""
    architecture = ARCHITECTURES[trained(work, name)["settings"]["fields"].get("architecture", "dspark")]
    drafter: DSparkModel = architecture.from_pretrained(work / name / "drafter", dtype=torch.bfloat16)
    return drafter.eval()


def verification(target: PreTrainedModel, context: int) -> Callable[[int], object]:
    """A function that runs the target over `n` tokens after a context, always the same one."""
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    ids = torch.randint(target.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        target(ids, **{cache_keyword(): cache}, logits_to_keep=1)

    @torch.no_grad()
    def verify(num_tokens: int) -> None:
        target(ids[:, :num_tokens], **{cache_keyword(): cache})
        cache.crop(-num_tokens)

    return verify


def drafting(drafter: DSparkModel, target: PreTrainedModel, context: int) -> Callable[[int], object]:
    """A function that drafts `n` tokens after a context, two tokens of which are new."""
    binding, layers = drafter.bind(target, fused_head="torch"), drafter.config.target_layer_ids
    generator = torch.Generator().manual_seed(0)
    size = len(layers or ()) * drafter.config.hidden_size
    features = torch.randn(1, context, size, generator=generator).to(drafter.dtype)
    tokens = torch.randint(drafter.config.vocab_size, (1, context), generator=generator)
    cache = DSparkCache(1)

    def draft(num_tokens: int, new: int = NEW_TOKENS) -> None:
        cache.lengths[0] = context - new  # the rounds before it, which wrote here
        if isinstance(drafter, EagleDrafter):
            drafter.draft(binding, cache, tokens[:, -new:], features[:, -new:], num_tokens)
        else:
            propose(
                binding,
                features[:, -new:],
                anchor_tokens=tokens[:, -1],
                cache=cache,
                num_tokens=num_tokens,
            )

    draft(1, context)
    return draft


def measure(
    target: PreTrainedModel, drafters: dict[str, DSparkModel], *, context: int, repeats: int
) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
    """Median seconds of verifying each number of tokens, and of drafting it with each drafter."""
    verify = verification(target, context)
    largest = max(drafter.config.block_size for drafter in drafters.values())
    turns: dict[tuple[str, int], Callable[[int], object]] = {("", n): verify for n in range(1, largest + 2)}
    for name, drafter in drafters.items():
        draft = drafting(drafter, target, context)
        turns |= {(name, n): draft for n in range(1, drafter.config.block_size + 1)}
    seconds: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    order, shuffle = list(turns), random.Random(0)
    for _ in tqdm(range(repeats), desc="Turns"):
        shuffle.shuffle(order)
        for turn in order:
            begun = time.perf_counter()
            turns[turn](turn[1])
            seconds[turn].append(time.perf_counter() - begun)
    medians = {turn: statistics.median(values) for turn, values in seconds.items()}
    by_name = {name: {n: value for (owner, n), value in medians.items() if owner == name} for name in ("", *drafters)}
    return by_name.pop(""), by_name


def speeds_of(acceptance: Sequence[float | None], draft: dict[int, float], verify: dict[int, float]) -> dict[str, Any]:
    """Tokens per round and speed over plain decoding, by the number of drafts."""
    kept, tau = 1.0, 1.0
    taus, speeds = [], []
    for n, share in enumerate(acceptance, start=1):
        kept *= share or 0.0  # a position that no round reached
        tau += kept
        taus.append(round(tau, 4))
        speeds.append(round(tau * verify[1] / (draft[n] + verify[n + 1]), 4))
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return {
        "draft_ms": [round(1000 * draft[n], 3) for n in sorted(draft)],
        "tau": taus,
        "speedup": speeds,
        "best_num_tokens": best + 1,
    }


def tables(content: dict[str, Any]) -> str:
    """Time and speed of the drafters as Markdown."""
    rows = []
    for case in content["results"]:
        best, last = case["best_num_tokens"] - 1, len(case["tau"]) - 1
        ms = content["verify_ms"]
        rows.append(
            [
                case["drafter"], case["steps"], f"{case['tau'][last]:.3f}", f"{case['draft_ms'][last]:.1f}", f"{ms[last + 1]:.1f}",
                f"{case['speedup'][last]:.3f}", best + 1, f"{case['draft_ms'][best]:.1f}",
                f"{case['speedup'][best]:.3f}",
            ]
        )  # fmt: skip
    names = ["drafter", "steps", "acceptance length", "draft ms", "verify ms", "speed of whole blocks"]
    return markdown_table([*names, "best number of drafts", "draft ms", "speed"], rows)


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    first, *further = map(Path, options.work)
    cases = [(name, trained(first, name)) for name in options.drafters]
    for work in further:
        names = [name for name in options.drafters if (work / name).is_dir()]
        if not names:
            raise ValueError(f"`--work`: `{work}` has none of the drafters {' '.join(options.drafters)}.")
        cases += [(name, trained(work, name)) for name in names]
    machine = start(options)
    facts = machine.environment("bfloat16")
    target = load_target(options.target, "bfloat16")
    drafters = {name: load(first, name) for name in options.drafters}
    verify, draft = measure(target, drafters, context=options.context, repeats=options.repeats)
    content = {
        "environment": facts,
        "target": options.target,
        "context": options.context,
        "repeats": options.repeats,
        "definitions": DEFINITIONS,
        "verify_ms": [round(1000 * verify[n], 3) for n in sorted(verify)],
        "load": machine.load(),
        "results": [
            {"drafter": name, "steps": result["settings"]["steps"]}
            | speeds_of(result["acceptance"], draft[name], verify)
            for name, result in cases
        ],
    }
    repeats = f"medians of {options.repeats} turns"
    print(f"\n{tables(content)}\n\n{conditions(content, batch='batch size 1, greedy', repeats=repeats)}")
    print(f"written to {write_json(options.output, content)}")


main = command(parse_options, run)


if __name__ == "__main__":
    sys.exit(main())
