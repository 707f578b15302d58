"""SIGKILL at random moments of a command, then the same command until it ends: the files of an undisturbed run.

Moments are drawn by progress, since seconds mean something else on every machine. What a kill at a chosen moment leaves is
tested next to each command.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.training.toy_run import flags, write_inputs
from training.common.files import read_jsonl
from training.run.resuming import last_whole_checkpoint


ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
NUM_KILLS = 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    """A tiny target, prompts, and random answers."""
    folder = tmp_path_factory.mktemp("kills")
    write_inputs(folder, tiny_tokenizer, count=640)
    prompts = [{"text": f"{'abcdefgh'[n % 5 : 5 + n % 4]}{n}", "source": "xy"[n % 2]} for n in range(120)]
    (folder / "sets.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


def run(words, until=lambda: False):
    """A command; killed as soon as it is time, if it has not ended before. Returns whether it has ended."""
    command = [sys.executable, "-m", *map(str, words)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=said)
        try:
            while process.poll() is None and not until():
                time.sleep(0.01)
        finally:
            process.kill()
            status = process.wait()
        said.seek(0)
        assert status in (0, -signal.SIGKILL), said.read().decode()[-3000:]
    return status == 0


def kill_and_resume(words, progress, *, seed, resume=lambda: ()):
    """Run a command to its end, with kills at random `progress` (0 to 1) and up to a fifth of a second later."""
    draw = random.Random(seed)
    marks = sorted(draw.uniform(0, 0.95) for _ in range(NUM_KILLS))
    for number, mark in enumerate(marks):
        delay = draw.uniform(0, 0.2)

        def is_time(mark=mark, delay=delay):
            if progress() < mark:
                return False
            time.sleep(delay)
            return True

        if run((*words, *resume()), is_time):
            assert number > NUM_KILLS / 2, "ended too early to be killed"
            return
    assert run((*words, *resume()))


def files_of(folder):
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def size_of(folder):
    """Bytes of a folder in which files come and go."""
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return total


def assert_same_files(killed, whole):
    one, other = files_of(killed), files_of(whole)
    assert one.keys() == other.keys()
    assert [name for name, path in one.items() if path.read_bytes() != other[name].read_bytes()] == []


def by_size(killed, whole):
    """Progress: the share of the bytes of the undisturbed run that is there."""
    total = size_of(whole)
    return lambda: size_of(killed) / total


def test_regenerate(folder):
    """Answers, their metadata, the dataset and its card."""
    whole, killed = folder / "answers", folder / "answers-killed"
    words = [
        *("training.regenerate", "--target", folder / "target", "--prompts", folder / "sets.jsonl"),
        *("--dtype", "float32", "--batch_size", 4, "--max_new_tokens", 24, "--temperatures", 0.0, 0.8, "--output"),
    ]
    assert run([*words, whole])
    kill_and_resume([*words, killed], by_size(killed, whole), seed=1)
    assert_same_files(killed, whole)


def test_feature_cache(folder):
    """Ten shards and their index; the drafter is trained on them for a few steps."""
    whole, killed = folder / "features", folder / "features-killed"
    words = {name: flags(folder, f"run-{name.name}", feature_cache=name, max_steps=3) for name in (whole, killed)}
    assert run(["training.train", *words[whole]])
    kill_and_resume(["training.train", *words[killed]], by_size(killed, whole), seed=2)
    assert_same_files(killed, whole)
    assert_same_files(folder / "run-features-killed" / "drafter", folder / "run-features" / "drafter")


def test_training(folder):
    """The drafter, and every entry of the log but the last one, which is about the last process."""
    steps = {"max_steps": 100, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 2}
    steps |= {"logging_steps": 3, "eval_strategy": "steps", "eval_steps": 20}
    whole, killed = folder / "trained", folder / "trained-killed"

    def progress():
        numbers = [int(path.name.partition("-")[2]) for path in killed.glob("checkpoint-*")]
        return max(numbers, default=0) / steps["max_steps"]

    def resume():
        return ("--resume_from_checkpoint", "true") if last_whole_checkpoint(killed) else ()

    assert run(["training.train", *flags(folder, whole.name, **steps)])
    words = ["training.train", *flags(folder, killed.name, **steps)]
    kill_and_resume(words, progress, seed=3, resume=resume)
    assert_same_files(killed / "drafter", whole / "drafter")
    assert untimed(killed / "log.jsonl") == untimed(whole / "log.jsonl")


def untimed(log):
    timings = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    return [{name: entry[name] for name in entry.keys() - timings} for entry in read_jsonl(log)[:-1]]
