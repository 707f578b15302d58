"""What a round of each drafter of a study takes, and so what its accepted length is worth in time.

    python -m benchmarks.study_time --work runs/study --threads 1
    python -m benchmarks.study_time --work runs/study runs/study_long --threads 1

A drafter that is run once a draft keeps more of its drafts, and takes longer over them. Here every drafter drafts behind
the same context, and the target verifies what it drafts; all take turns in changing order. How many of `n` drafts are kept
follows from the study's acceptance by position, so each drafter is judged at every `n`, and at its best; those of further
folders, which were trained for longer, by the same times. Heads run in PyTorch, so that none has a kernel which another
lacks.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

from benchmarks.baselines.autoregressive import EagleDrafter
from benchmarks.lib.environment import environment
from benchmarks.lib.packed import exit_status
from benchmarks.lib.pair import positive_int
from benchmarks.lib.report import markdown_table, write_json
from modeling_dspark import DSparkModel
from modeling_dspark.compat_transformers import cache_keyword
from modeling_dspark.draft_propose import propose
from modeling_dspark.model_cache import DSparkCache
from training.common.commands import HelpFormatter
from training.common.targets import EMBEDDED_TARGET, load_target
from training.train import ARCHITECTURES


HERE = Path(__file__).parent
VARIABLE = "DSPARK_FUSED_HEAD"
DRAFTERS = ("dspark", "dspark-depth-5", "dspark-rnn", "dflash", "eagle", "mtp-1")
NEW_TOKENS = 2  # context that is new to the drafter in a round
DEFINITIONS = {
    "verify_ms": "median milliseconds of a target forward over so many tokens, behind the context",
    "draft_ms": "median milliseconds of drafting so many tokens, two tokens of context being new",
    "tau": "tokens a round, at so many drafts: 1 and the products of the study's acceptance by position",
    "speedup": "tau / (draft + verify) over 1 / (verify of one token), at so many drafts",
}


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.study_time", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--target", default=EMBEDDED_TARGET, help="a folder, a Hub id, or the embedded target's name")
    parser.add_argument(
        "--work", nargs="+", default=["runs/study"], help="folders of `benchmarks.study`, all in the first"
    )
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), metavar="NAME", help="folders in --work")
    parser.add_argument("--context", type=positive_int, default=256, metavar="N", help="tokens before a round")
    parser.add_argument("--repeats", type=positive_int, default=40, help="turns of everything")
    parser.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--output", default=str(HERE / "results" / "study_time.json"), help="the JSON file to write")
    return parser.parse_args(argv)


def trained(work: Path, name: str) -> dict[str, Any]:
    """What a study noted of one drafter.

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
    """A function that runs the target over `n` tokens behind a context, always the same one."""
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
    """A function that drafts `n` tokens behind a context, two tokens of which are new."""
    binding, layers = drafter.bind(target), drafter.config.target_layer_ids
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
                drafter,
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
    """Median seconds of verifying so many tokens, and of drafting so many by each drafter."""
    verify = verification(target, context)
    most = max(drafter.config.block_size for drafter in drafters.values())
    turns: dict[tuple[str, int], Callable[[int], object]] = {("", n): verify for n in range(1, most + 2)}
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
    by_name = {name: {n: value for (of, n), value in medians.items() if of == name} for name in ("", *drafters)}
    return by_name.pop(""), by_name


@contextmanager
def heads_in_pytorch() -> Iterator[None]:
    """While this lasts, no head is fused."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "torch"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        os.environ.update({} if before is None else {VARIABLE: before})


def judged(acceptance: Sequence[float | None], draft: dict[int, float], verify: dict[int, float]) -> dict[str, Any]:
    """Tokens a round and speed over plain decoding, by the number of drafts."""
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
    names = ["drafter", "steps", "accepted length", "draft ms", "verify ms", "speed of whole blocks"]
    return markdown_table([*names, "best number of drafts", "draft ms", "speed"], rows)


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    if options.threads:
        torch.set_num_threads(options.threads)
    first, *others = map(Path, options.work)
    found = [(name, trained(first, name)) for name in options.drafters]
    for work in others:
        names = [name for name in options.drafters if (work / name).is_dir()]
        if not names:
            raise ValueError(f"`--work`: `{work}` has none of the drafters {' '.join(options.drafters)}.")
        found += [(name, trained(work, name)) for name in names]
    facts = environment("bfloat16")
    target = load_target(options.target, "bfloat16")
    drafters = {name: load(first, name) for name in options.drafters}
    with heads_in_pytorch():
        verify, draft = measure(target, drafters, context=options.context, repeats=options.repeats)
    content = {
        "environment": facts,
        "target": options.target,
        "context": options.context,
        "repeats": options.repeats,
        "definitions": DEFINITIONS,
        "verify_ms": [round(1000 * verify[n], 3) for n in sorted(verify)],
        "results": [
            {"drafter": name, "steps": result["settings"]["steps"]} | judged(result["acceptance"], draft[name], verify)
            for name, result in found
        ],
    }
    print(f"\n{tables(content)}\n\nwritten to {write_json(options.output, content)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (2: cannot start, 130: interrupted)."""
    options = parse_options(argv)
    return exit_status(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
