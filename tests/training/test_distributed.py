"""Two processes on the CPU (gloo) give what one process gives; the launch files name what there is."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from torch.testing import assert_close

from modeling_dspark import DSparkModel, model_backbone
from tests.training.toy_run import flags, write_inputs
from training.run.arguments import DSparkTrainingArguments


ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "training" / "configs" / "accelerate"
STEPS = 4


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def run(command):
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]


def torchrun(processes, module, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    run([*command, "--standalone", "-m", module, *words])


def accelerate(name, words):
    """The command of docs/training.md with two processes on the CPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / f"{name}.yaml")]
    return [*command, "--num_processes", "2", "-m", "training.train", *words]


def launch(words, *, processes, folder):
    """`training.train` in so many processes; returns the entries of the log."""
    torchrun(processes, "training.train", *words)
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_two_processes_give_the_losses_of_one(tmp_path, tiny_tokenizer, head):
    """The same four sequences a step: as one batch, as one in each of two processes, as two in each of them."""
    write_inputs(tmp_path, tiny_tokenizer)
    shared = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 0.1, "markov_head_type": head}
    logs, drafters = {}, {}
    for name, processes, accumulated in (("one", 1, 1), ("two", 2, 1), ("two_accumulating", 2, 2)):
        split = {"per_device_train_batch_size": 4 // processes // accumulated}
        words = flags(tmp_path, name, **shared, **split, gradient_accumulation_steps=accumulated)
        logs[name] = launch(words, processes=processes, folder=tmp_path / name)
        drafters[name] = DSparkModel.from_pretrained(tmp_path / name / "drafter").state_dict()
    losses = {
        name: [entry["position_loss"] for entry in log if "position_loss" in entry] for name, log in logs.items()
    }
    assert len(losses["one"]) == STEPS
    assert losses["one"][-1] != pytest.approx(losses["one"][0], abs=1e-3)
    for name in ("two", "two_accumulating"):
        assert losses[name] == pytest.approx(losses["one"], abs=1e-5)
        for key, weight in drafters["one"].items():
            assert_close(drafters[name][key], weight, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_gradients_of_a_drafter_in_parts(head):
    """FSDP2 over two processes: heads and loss outside of the drafter's forward, as training calls them."""
    torchrun(2, "tests.training.fsdp_worker", head)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_launch_files_train(tmp_path, tiny_tokenizer, name):
    """`accelerate launch` with each file: the losses and the drafter of one process."""
    write_inputs(tmp_path, tiny_tokenizer)
    shared = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 0.1}
    alone = launch(flags(tmp_path, "alone", **shared), processes=1, folder=tmp_path / "alone")
    run(accelerate(name, flags(tmp_path, "both", per_device_train_batch_size=2, **shared)))
    both = [json.loads(line) for line in (tmp_path / "both" / "log.jsonl").read_text().splitlines()]
    losses = [[entry["position_loss"] for entry in log if "position_loss" in entry] for log in (alone, both)]
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    drafters = [
        DSparkModel.from_pretrained(tmp_path / folder / "drafter").state_dict() for folder in ("alone", "both")
    ]
    for key, weight in drafters[0].items():
        assert_close(drafters[1][key], weight, atol=1e-5, rtol=1e-4, msg=key)


def ranks_of(launcher):
    """The training processes of a launcher by rank."""
    found = {}
    for child in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            rank = child.environ().get("RANK")
            if rank is not None:
                found[int(rank)] = child
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_kill_9_of_one_rank(tmp_path, tiny_tokenizer, name):
    """The other process ends too, and what goes on from the checkpoint ends with the drafter of an undisturbed run."""
    write_inputs(tmp_path, tiny_tokenizer)
    shared = {
        "per_device_train_batch_size": 2, "max_steps": 120, "save_strategy": "steps", "save_steps": 10,
        "save_total_limit": 2,
    }  # fmt: skip
    run(accelerate(name, flags(tmp_path, "whole", **shared)))
    words = flags(tmp_path, "killed", **shared)
    with subprocess.Popen(
        accelerate(name, words), cwd=ROOT, env=os.environ | ENVIRONMENT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as launcher:  # fmt: skip
        deadline = time.monotonic() + 120
        while not list((tmp_path / "killed").glob("checkpoint-*")):
            assert time.monotonic() < deadline
            assert launcher.poll() is None
            time.sleep(0.02)
        ranks_of(launcher)[1].send_signal(signal.SIGKILL)
        assert launcher.wait(timeout=120) != 0
    assert not (tmp_path / "killed" / "drafter").exists()
    run(accelerate(name, [*words, "--resume_from_checkpoint", "true"]))
    whole, killed = (
        DSparkModel.from_pretrained(tmp_path / folder / "drafter").state_dict() for folder in ("whole", "killed")
    )
    for key, weight in whole.items():
        assert torch.equal(killed[key], weight), key


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files(path):
    """accelerate reads them, and the layers that FSDP wraps are there."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == 8
    wrapped = yaml.safe_load(path.read_text()).get("fsdp_config", {}).get("fsdp_transformer_layer_cls_to_wrap")
    assert wrapped is None or hasattr(model_backbone, wrapped)
    assert wrapped is None or wrapped in DSparkModel._no_split_modules


def test_looking_for_unused_parameters_is_refused(tmp_path):
    assert DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True).ddp_find_unused_parameters is False
    with pytest.raises(ValueError, match="ddp_find_unused_parameters"):
        DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True, ddp_find_unused_parameters=True)
