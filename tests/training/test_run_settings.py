"""What a checkpoint notes of its run: another run is not gone on with, and what may change does not matter."""

import json
import re
import shutil

import pytest
import torch
from torch.testing import assert_close
from transformers import Trainer

from modeling_dspark import DSparkModel
from tests.builders import tiny_drafter, tiny_target
from tests.training.toy_run import flags, write_answers, write_inputs
from training.run.resuming import last_whole_checkpoint
from training.train import main


RUN = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
RESUMED = RUN | {"resume_from_checkpoint": "true"}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, tiny_tokenizer):
    """Inputs, and a run of two steps that was stopped behind its checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    write_inputs(folder, tiny_tokenizer, count=12)
    main(flags(folder, "run", **RUN))
    shutil.rmtree(folder / "run" / "drafter")
    return folder


@pytest.fixture
def folder(stopped, tmp_path):
    """A copy of it: where it is does not matter."""
    return shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)


def content_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_of_other_settings_is_refused(folder):
    """Each of them by its argument, with both values; nothing is written."""
    before = content_of(folder / "run")
    others = {
        "seed": (3, 4),  # and with it that of the data
        "data_seed": (3, 5),
        "num_anchors": (4, 5),
        "num_eval_conversations": (4, 3),
        "per_device_train_batch_size": (4, 2),
        "l1_weight": (0.9, 0.5),
        "loss_decay": (4.0, 2.0),
        "l1_warmup_fraction": (0.0, 0.5),
        "learning_rate": (0.005, 0.001),
        "optim": ("adamw_torch", "sgd"),
        "target_dtype": ("float32", "bfloat16"),
    }
    for name, (then, now) in others.items():
        values = re.escape(f"({then!r}, {now!r})")
        with pytest.raises(ValueError, match=f"{name}.*: {values}.*Resume with those of then") as caught:
            main(flags(folder, "run", **RESUMED | {name: now}))
        assert name == "seed" or "'seed'" not in str(caught.value)
    assert content_of(folder / "run") == before


def test_other_data_are_refused(folder):
    """By content: an answer with another token, fewer answers, other prompts, another cut."""
    path = folder / "answers.jsonl"
    answers = [json.loads(line)["answer_ids"] for line in path.read_text().splitlines()]
    prompts = (folder / "prompts.jsonl").read_text()
    refused = r"'answers': \('12 conversations, \d+ tokens, hash \w{16}', '%s conversations.*compared by content"
    write_answers(folder, [[*answers[0][:-1], 5 if answers[0][-1] != 5 else 6], *answers[1:]])
    with pytest.raises(ValueError, match=refused % 12):
        main(flags(folder, "run", **RESUMED))
    write_answers(folder, answers[:-1])
    with pytest.raises(ValueError, match=refused % 11):
        main(flags(folder, "run", **RESUMED))
    write_answers(folder, answers)
    (folder / "prompts.jsonl").write_text(prompts.replace("abc", "abd"))
    with pytest.raises(ValueError, match=refused % 12):
        main(flags(folder, "run", **RESUMED))
    (folder / "prompts.jsonl").write_text(prompts)
    with pytest.raises(ValueError, match=refused % 12):
        main(flags(folder, "run", max_length=12, **RESUMED))


def test_another_target_is_refused(folder):
    target = tiny_target("llama")
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    target.save_pretrained(folder / "target")
    with pytest.raises(ValueError, match="'target': "):
        main(flags(folder, "run", **RESUMED))


def test_another_drafter_or_scale_of_adapters_is_refused(folder):
    for name, seed in (("one", 0), ("other", 1)):
        tiny_drafter(tiny_target("llama"), seed=seed).save_pretrained(folder / name)
    given = {"peft": "lora", "lora_rank": 2, "lora_alpha": 4}
    main(flags(folder, "tuned", drafter=folder / "one", **given, **RUN))
    with pytest.raises(ValueError, match=r"\{'lora_alpha': \(4, 8\)\}"):
        main(flags(folder, "tuned", drafter=folder / "one", **given | {"lora_alpha": 8}, **RESUMED))
    with pytest.raises(ValueError, match=r"\{'drafter': \('\w{16}', '\w{16}'\)\}"):
        main(flags(folder, "tuned", drafter=folder / "other", **given, **RESUMED))


def test_what_may_change(folder):
    """More steps, files elsewhere, more answers than are used: the drafter of an undisturbed run, bit for bit."""
    longer = {"max_steps": 6, "save_steps": 3, "logging_steps": 2, "dataloader_num_workers": 1}
    whole = main(flags(folder, "whole", **RUN | longer)).state_dict()
    for name in ("target", "answers.jsonl", "prompts.jsonl"):
        (folder / name).rename(folder / f"moved-{name}")
    with (folder / "moved-answers.jsonl").open("a") as file:
        file.write('{"prompt": 0, "answer_ids": [7, 8, 9]}\n')
    moved = {
        name: folder / f"moved-{name}{end}"
        for name, end in (("target", ""), ("answers", ".jsonl"), ("prompts", ".jsonl"))
    }
    resumed = main(flags(folder, "run", **RESUMED | longer | moved, max_conversations=12)).state_dict()
    for name, weight in whole.items():
        assert torch.equal(resumed[name], weight), name


def test_a_step_may_be_split_and_packed_and_features_cached(folder):
    """The same steps, up to the order of sums and the bf16 of cached features."""
    whole = main(flags(folder, "whole", **RUN | {"max_steps": 4})).state_dict()
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    split |= {"packing": "true", "packed_length": 40, "feature_cache": folder / "features"}
    resumed = main(flags(folder, "run", **RESUMED | split | {"max_steps": 4})).state_dict()
    for name, weight in whole.items():
        assert_close(resumed[name], weight, atol=1e-2, rtol=0, msg=name)


def test_a_checkpoint_of_an_earlier_version_is_resumed(folder, caplog):
    noted = folder / "run" / "checkpoint-2" / "run_settings.json"
    noted.rename(folder / "settings.json")
    main(flags(folder, "run", **RESUMED | {"max_steps": 3, "seed": 4}))
    assert caplog.text.count("is from an earlier version, which did not note ['answers', ") == 1
    assert DSparkModel.from_pretrained(folder / "run" / "drafter").config.block_size == 3


def test_a_checkpoint_of_an_earlier_version_has_earlier_names(folder, caplog):
    noted = folder / "run" / "checkpoint-2" / "run_settings.json"
    noted.write_text(noted.read_text().replace("kd_weight", "soft_weight"))
    with pytest.raises(ValueError, match=r"'kd_weight': \(0.0, 0.5\)"):
        main(flags(folder, "run", **RESUMED | {"max_steps": 3, "kd_weight": 0.5}))
    main(flags(folder, "run", **RESUMED | {"max_steps": 3}))
    assert "earlier version" not in caplog.text


def test_another_run_begins_from_a_checkpoint(folder):
    """With another seed and rate, which a resumed run cannot have."""
    checkpoint = folder / "run" / "checkpoint-2"
    main(flags(folder, "next", drafter=checkpoint, max_steps=1, seed=4, learning_rate=0.0))
    weights = DSparkModel.from_pretrained(folder / "next" / "drafter").state_dict()
    for name, weight in DSparkModel.from_pretrained(checkpoint).state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_a_checkpoint_that_is_written_over_is_none_meanwhile(folder, monkeypatch):
    """Cut there, its old state of training would stand beside new weights."""

    def interrupted(*_):
        raise KeyboardInterrupt

    main(flags(folder, "run", **RESUMED | {"max_steps": 4}))
    run = folder / "run"
    assert last_whole_checkpoint(run) == run / "checkpoint-4"
    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(flags(folder, "run", **RESUMED | {"max_steps": 4, "resume_from_checkpoint": run / "checkpoint-2"}))
    assert last_whole_checkpoint(run) == run / "checkpoint-2"
