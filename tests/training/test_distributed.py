"""Two processes on the CPU (gloo) give what one process gives; the launch files name what there is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.testing import assert_close

from modeling_dspark import DSparkModel, backbone_dspark
from tests.training.toy_run import flags, write_inputs
from training.arguments import DSparkTrainingArguments


ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "training" / "configs" / "accelerate"
STEPS = 4


def torchrun(processes, module, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--standalone", "-m", module, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]


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
    losses = {name: [entry["slot_loss"] for entry in log if "slot_loss" in entry] for name, log in logs.items()}
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


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.yaml")), ids=lambda path: path.stem)
def test_launch_files(path):
    """accelerate reads them, and the layers that FSDP wraps are there."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == 8
    wrapped = yaml.safe_load(path.read_text()).get("fsdp_config", {}).get("fsdp_transformer_layer_cls_to_wrap")
    assert wrapped is None or hasattr(backbone_dspark, wrapped)
    assert wrapped is None or wrapped in DSparkModel._no_split_modules


def test_looking_for_unused_parameters_is_refused(tmp_path):
    assert DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True).ddp_find_unused_parameters is False
    with pytest.raises(ValueError, match="ddp_find_unused_parameters"):
        DSparkTrainingArguments(output_dir=str(tmp_path), use_cpu=True, ddp_find_unused_parameters=True)
