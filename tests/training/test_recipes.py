"""The shipped recipes, by dry runs: shapes on the meta device, without weights and without the Hub."""

import json
from pathlib import Path

import pytest
import torch

from modeling_dspark import DSparkConfig, DSparkModel
from training.run.dry_run import meta_target
from training.run.initialization import config_for_target
from training.run.options import parse_arguments
from training.train import main


ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "training" / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
SHIPPED = ROOT / "hub_upload" / "repos" / "dspark-smollm2-135m-instruct"
# Parameters of the published checkpoints; of Gemma 3 those of its language model.
TARGETS = {
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "gemma3-12b": 11_766_034_176,
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_dry_run_of_every_recipe(path, capsys):
    more = ["--drafter", str(SHIPPED)] if "continue" in path.stem else []
    found = main(["--config", str(path), "--dry_run", "--report_to", "none", *more])
    assert found.target_parameters == TARGETS.get(path.stem, 134_515_008)
    assert 0 < found.trainable_parameters <= found.drafter_parameters
    assert found.memory["drafter: optimizer, two states (fp32)"] == 8 * found.trainable_parameters
    assert sum(found.sharded.values()) < sum(found.memory.values()) < 80e9
    text = capsys.readouterr().out
    assert f"{found.drafter_parameters:,}" in text
    assert f"{found.cache_bytes / 1e9:.2f} GB for 1,000 conversations" in text


def test_the_table_of_the_documentation():
    page = (ROOT / "docs" / "training.md").read_text()
    for path in RECIPES:
        if "continue" not in path.stem:
            found = main(["--config", str(path), "--dry_run"])
            ddp, fsdp = (f"{sum(column.values()) / 1e9:.2f}" for column in (found.memory, found.sharded))
            cells = (f"{found.target_parameters:,}", f"{found.drafter_parameters:,}", f"{ddp}, {fsdp} GB")
            assert " | ".join([*cells, f"{found.cache_bytes / 1e9:.2f} GB |"]) in page


@pytest.mark.parametrize("name", TARGETS)
def test_the_values_of_the_public_recipe(name):
    drafter, data, training = parse_arguments(["--config", str(CONFIGS / f"{name}.yaml"), "--dry_run"])
    shape = json.loads(Path(drafter.target_shape).read_text())
    last = shape["num_hidden_layers"] - 3
    assert drafter.target_layer_ids == [round(1 + tap * (last - 1) / 4) for tap in range(5)]
    assert (drafter.num_draft_layers, drafter.block_size, drafter.markov_rank) == (5, 7, 256)
    assert (training.num_anchors, training.learning_rate, training.warmup_steps) == (512, 6e-4, 0.04)
    assert training.per_device_train_batch_size * training.gradient_accumulation_steps * 8 == 512
    assert (training.num_train_epochs, training.max_grad_norm, training.bf16) == (10, 1.0, True)
    assert (training.ce_weight, training.l1_weight, training.confidence_weight) == (0.1, 0.9, 1.0)
    assert not training.push_to_hub
    assert data.max_length <= shape["max_position_embeddings"]


def test_counts_are_those_of_a_real_drafter():
    """Parameters, and the size of a feature cache: `2 * D * (L + 1) + 4` bytes a token."""
    found = main(["--config", str(CONFIGS / "smollm2-135m.yaml"), "--dry_run", "--markov_head_type", "rnn"])
    config = json.loads((SHIPPED / "config.json").read_text()) | {"markov_head_type": "rnn"}
    drafter = DSparkModel(DSparkConfig(**config))
    assert found.drafter_parameters == sum(parameter.numel() for parameter in drafter.parameters())
    assert found.cache_bytes == 1000 * 512 * (2 * 576 * 5 + 4)


def test_adapters_leave_little_to_train():
    """Trained are the adapters and the heads; the drafter is of the size that it is used with."""
    pytest.importorskip("peft")
    found = main(["--drafter", str(SHIPPED), "--peft", "lora", "--lora_rank", "4", "--dry_run"])
    whole = main(["--drafter", str(SHIPPED), "--dry_run"])
    drafter = DSparkModel(DSparkConfig(**json.loads((SHIPPED / "config.json").read_text())))
    linear = [
        module
        for name, module in drafter.named_modules()
        if isinstance(module, torch.nn.Linear) and "head" not in name
    ]
    adapters = sum(4 * (module.in_features + module.out_features) for module in linear)
    heads = sum(parameter.numel() for name, parameter in drafter.named_parameters() if "head" in name)
    assert found.trainable_parameters == adapters + heads < whole.trainable_parameters / 2
    assert found.drafter_parameters == whole.drafter_parameters == whole.trainable_parameters
    assert found.memory["drafter: gradients (fp32)"] == 4 * found.trainable_parameters


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # the name that all versions know
def test_checkpointing_and_smaller_batches_take_less():
    recipe = ["--config", str(CONFIGS / "qwen3-8b.yaml"), "--dry_run"]
    usual = main(recipe).memory
    name = "drafter: activations (estimate)"
    assert main([*recipe, "--gradient_checkpointing"]).memory[name] < usual[name] / 2
    assert main([*recipe, "--per_device_train_batch_size", "1"]).memory[name] == pytest.approx(usual[name] / 2)


def test_a_drafter_for_a_target_with_two_kinds_of_rotation_takes_the_global_one():
    target = meta_target("google/gemma-3-12b-it", str(CONFIGS / "targets" / "gemma3-12b.json"), "bfloat16")
    config = config_for_target(target, None, "gemma", target_layer_ids=[1], mask_token_id=4)
    assert config.rope_parameters == target.config.rope_parameters["full_attention"]
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "markov_rank": 2}
    drafter = DSparkModel(DSparkConfig(**(config.to_dict() | small)))
    expected = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 256, 2) / 256)
    torch.testing.assert_close(drafter.rotary_emb.inv_freq, expected / config.rope_parameters.get("factor", 1.0))


class TestWrongArguments:
    def test_a_target_that_cannot_be_reached(self, tmp_path):
        dry = ["--mask_token_id", "3", "--dry_run"]
        with pytest.raises(ValueError, match="`target_shape`"):
            main(["--target", "nobody/nothing", *dry])
        for content in ("[]", '{"hidden_size": 3}'):
            (tmp_path / "shape.json").write_text(content)
            with pytest.raises(ValueError, match="model_type"):
                main(["--target", "nobody/nothing", "--target_shape", str(tmp_path / "shape.json"), *dry])
        with pytest.raises(ValueError, match="needs a JSON file"):
            main(["--target", "nobody/nothing", "--target_shape", str(tmp_path / "none.json"), *dry])

    def test_a_folder_that_is_not_there(self):
        with pytest.raises(ValueError, match="`target`: there is no folder `runs/no/target`"):
            main(["--target", "runs/no/target", "--mask_token_id", "3", "--dry_run"])
        with pytest.raises(ValueError, match=r"`drafter`: there is no folder `\./drafter`"):
            main(["--drafter", "./drafter", "--answers", "a.jsonl"])

    def test_a_dtype_that_there_is_not(self):
        with pytest.raises(ValueError, match="`target_dtype`.*'float3'"):
            main(["--target_dtype", "float3", "--mask_token_id", "3", "--dry_run"])

    def test_a_drafter_that_is_not_there(self, tmp_path):
        with pytest.raises(ValueError, match="`drafter`"):
            main(["--drafter", str(tmp_path / "none"), "--dry_run"])

    def test_a_drafter_of_another_target(self):
        with pytest.raises(ValueError, match="does not fit"):
            main(["--config", str(CONFIGS / "qwen3-4b.yaml"), "--drafter", str(SHIPPED), "--dry_run"])
