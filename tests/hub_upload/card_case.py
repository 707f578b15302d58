"""A tiny drafter with all that a card is made of. Its figures are computed from random rounds, so they are like no others."""

import json
import random

from tests.builders import tiny_drafter, tiny_target
from training.common.files import checksum
from training.confidence.rounds import join
from training.data.features import fingerprint
from training.evaluation.figures import acceptance_figures, calibration_figures, speed_figures, threshold_sweep
from training.evaluation.report import EvalReport, SetReport


TEMPERATURES = [1.2345, 0.6789, 1.1111, 0.9876]
FACTS = """
name: A drafter for tests
repo_id: org/tiny-drafter
base_model: org/tiny-target
license: apache-2.0
language: [en]
datasets: [org/answers]
benchmark: org/prompts
training: On {{ stated.quote("conversations", ",") }} conversations.
thinking: Trained with thinking off.
summary: Made of {{ config.quote("num_hidden_layers") }} layers for tests.
limits: [It has seen letters only.]
commands: [python -m training.train --max_steps 100]
stated: {conversations: 12345}
"""


def make_drafter(folder, **fields):
    """A drafter's folder without a card; returns the drafter."""
    fields = {"confidence_temperatures": TEMPERATURES} | fields
    drafter = tiny_drafter(tiny_target("llama"), **fields)
    drafter.save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    calibration = {"temperatures": TEMPERATURES, "dataset": "calibration.jsonl", "num_samples": 4321}
    calibration |= {"ece_before": [0.0512, 0.0623, 0.0734, 0.0845], "ece_after": [0.0111, 0.0222, 0.0333, 0.0444]}
    (folder / "calibration.json").write_text(json.dumps(calibration))
    (folder / "facts.yaml").write_text(FACTS)
    return drafter


def random_rounds(seed, count=300):
    """Recorded rounds of four positions."""
    generator = random.Random(seed)
    rounds = []
    for _ in range(count):
        verified = generator.choice([4, 4, 4, 3])
        accepted = sum(1 for _ in range(verified) if generator.random() < 0.8 or generator.random() < 0.3)
        rounds.append((verified, accepted, accepted + 1, [generator.gauss(0.5, 1) for _ in range(verified)]))
    names = ("verified", "accepted", "new_tokens", "logits")
    return dict(zip(names, map(list, zip(*rounds, strict=True)), strict=True))


def set_figures(rounds, seed, *, with_speed):
    counts = {name: rounds[name] for name in ("verified", "accepted", "new_tokens")}
    generator = random.Random(seed)
    timings = [
        {name: {"tokens": 30, "seconds": generator.uniform(*span)} for name, span in spans.items()}
        for spans in [{"plain": (2, 3), "assisted": (1, 2)}] * 7
    ]
    calibration = {name: rounds[name] for name in ("logits", "accepted", "verified")}
    sweep = threshold_sweep(
        join([rounds], 4), rounds["new_tokens"], temperatures=TEMPERATURES, thresholds=[0.25, 0.75]
    )
    return SetReport(
        prompts=17 + seed,
        skipped=0,
        acceptance=acceptance_figures(**counts, num_draft_positions=4),
        calibration=calibration_figures(**calibration, temperatures=TEMPERATURES),
        thresholds=tuple(sweep),
        speed=speed_figures(timings) if with_speed else None,
    )


def evaluation(drafter, *, temperature=0.0, with_speed=True, seed=0):
    """A report of `training.evaluate` of the drafter."""
    rounds = {"letters": random_rounds(seed + 1), "digits_2": random_rounds(seed + 2)}
    pooled = {name: [value for part in rounds.values() for value in part[name]] for name in rounds["letters"]}
    figures = {
        name: set_figures(part, index, with_speed=with_speed) for index, (name, part) in enumerate(rounds.items())
    }
    versions = {"torch": "2.99.1", "transformers": "5.99.2", "git_commit": "0123456789abcdef", "git_dirty": False}
    settings = {"prompts": "eval.jsonl", "temperature": temperature, "dtype": "float32", "max_new_tokens": 96}
    return EvalReport(
        drafter={"name": "drafter", "fingerprint": fingerprint(drafter), "block_size": 4},
        target={"name": "tiny", "fingerprint": "f"},
        settings=settings | {"batch_size": 6},
        environment={"device": "A processor", "cores": 64, "threads": 48} | versions,
        sets=figures,
        pooled=set_figures(pooled, 5, with_speed=with_speed),
        notes=(),
        timing={"date": "2026-11-30T10:00:00+00:00", "schedule": "throughput"} if with_speed else None,
    )


def latency(folder):
    """A report of `benchmarks.latency` of the drafter in a folder."""
    figures = {
        "tau": 2.3456,
        "acceptance_rate_by_position": [0.7123, 0.6234, 0.5345, 0.0],
        "tried_by_position": [95, 61, 33, 0],
        "prompts": 13,
    }
    entry = figures | {
        "tokens_per_second": {"plain": 15.622, "assisted": 28.752},
        "ratio": {"assisted": 1.8405},
        "differences": {"count": 2, "largest_logit_gap": 0.125, "items": []},
    }
    overall = figures | {
        "geometric_mean_ratio": {"assisted": 1.8405},
        "min_ratio": {"assisted": 1.7654},
        "differences": {"count": 2, "largest_logit_gap": 0.125},
    }
    versions = {"torch": "2.99.1", "transformers": "5.99.2", "git_commit": "fedcba9876543210", "git_dirty": True}
    return {
        "environment": {"cpu": "A processor", "cores": 64, "dtype": "bfloat16"} | versions,
        "target": "tiny",
        "drafter": {"sha256": checksum(folder / "model.safetensors")},
        "settings": {"decoding": "greedy, batch size 1", "prompts": "p.jsonl", "per_set": 13, "max_new_tokens": 128},
        "complete": True,
        "sections": [{"threads": threads, "sets": {"letters": entry}, "overall": overall} for threads in (3, 5)],
    }
