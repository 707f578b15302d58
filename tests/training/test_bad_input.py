"""What training does with input that is wrong: a clear error, or a counted skip."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from modeling_dspark import DSparkModel
from tests.builders import tiny_drafter, tiny_target
from tests.training.toy_run import flags, write_answers, write_inputs
from training.common.files import only_writer
from training.data.conversations import load_conversations
from training.run.adapters import add_lora
from training.run.resuming import check_resumed, last_whole_checkpoint
from training.train import main


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    write_inputs(tmp_path, tiny_tokenizer)
    return tmp_path


def poison(folder):
    """A target whose last layer returns NaN."""
    target = tiny_target("llama")
    with torch.no_grad():
        target.model.norm.weight[3] = torch.nan
    target.save_pretrained(folder / "target")


class TestLossThatIsNoNumber:
    def test_stops_training_at_the_next_entry_of_the_log(self, folder):
        poison(folder)
        with pytest.raises(ValueError, match=r"loss is nan at step 2.*`learning_rate`"):
            main(flags(folder, "run", logging_steps=2))
        assert not (folder / "run" / "drafter").exists()

    def test_is_never_saved_in_a_checkpoint(self, folder):
        poison(folder)
        with pytest.raises(ValueError, match="loss is nan at step 1"):
            main(flags(folder, "run", logging_steps=100, save_strategy="steps", save_steps=1))
        assert not list((folder / "run").glob("checkpoint-*"))

    def test_after_the_last_entry_of_the_log_saves_no_drafter(self, folder):
        poison(folder)
        with pytest.raises(ValueError, match="loss is nan"):
            main(flags(folder, "run", logging_steps=100))
        assert not (folder / "run" / "drafter").exists()

    def test_infinity_is_none_either(self, folder):
        with pytest.raises(ValueError, match="loss is (nan|inf)"):
            main(flags(folder, "run", learning_rate=1e30, max_steps=6))

    def test_loss_weights_are_numbers(self, folder):
        with pytest.raises(ValueError, match="finite"):
            main(flags(folder, "run", ce_weight="nan"))


class TestConversations:
    def load(self, folder, **options):
        tokenizer = AutoTokenizer.from_pretrained(folder / "target")
        names = (str(folder / "prompts.jsonl"), [str(folder / "answers.jsonl")])
        return load_conversations(*names, tokenizer, **({"max_length": 50} | options))

    def test_empty_and_one_token_answers_are_counted_and_skipped(self, folder):
        write_answers(folder, [[], [5], *[[7, 8, 9, 10]] * 10])
        conversations, counts = self.load(folder)
        assert (len(conversations), counts["short_answers"]) == (10, 2)
        main(flags(folder, "run", max_steps=1))
        assert (folder / "run" / "drafter").is_dir()

    def test_nothing_but_empty_answers_is_an_error(self, folder):
        write_answers(folder, [[], [], [5]])
        with pytest.raises(ValueError, match=r"No conversation to train on.*'short_answers': 3"):
            main(flags(folder, "run"))

    def test_long_conversations_are_cut_and_long_prompts_skipped(self, folder):
        """Prompts have 3 to 5 tokens: with a limit of 6, those of 5 leave no room for two tokens of an answer."""
        write_answers(folder, [[9] * 20] * 8)
        conversations, counts = self.load(folder, max_length=6)
        assert counts == {"short_answers": 0, "long_prompts": 2, "cut": 6}
        assert {len(conversation.input_ids) for conversation in conversations} == {6}
        assert all(int(conversation.response_mask.sum()) >= 2 for conversation in conversations)

    def test_training_on_cut_conversations(self, folder):
        write_answers(folder, [[9, 10, 11] * 20] * 24)
        main(flags(folder, "run", max_length=8, max_steps=2))
        entries = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
        assert entries[0]["position_loss"] > 0

    def test_tokens_that_the_target_does_not_have(self, folder):
        tiny_target("llama", vocab_size=40).save_pretrained(folder / "target")
        with pytest.raises(ValueError, match="`target` has 40 tokens.*tokenizer"):
            main(flags(folder, "run"))


class TestMismatch:
    @pytest.mark.parametrize(
        "fields", [{"vocab_size": 64}, {"num_target_layers": 5}], ids=["vocab_size", "num_hidden_layers"]
    )
    def test_a_drafter_of_another_target(self, folder, fields, request):
        """Named with both values, before anything is trained or cached."""
        tiny_drafter(tiny_target("llama"), **fields).save_pretrained(folder / "other")
        field = request.node.callspec.id
        with pytest.raises(ValueError, match=f"does not fit the target.*`{field}`"):
            main(flags(folder, "run", drafter=folder / "other", feature_cache=folder / "cache"))
        assert not (folder / "cache").exists()
        assert not (folder / "run" / "drafter").exists()

    def test_the_right_drafter_goes_on(self, folder):
        tiny_drafter(tiny_target("llama")).save_pretrained(folder / "same")
        main(flags(folder, "run", drafter=folder / "same", max_steps=1))
        assert DSparkModel.from_pretrained(folder / "run" / "drafter").config.block_size == 4

    def test_layers_that_the_target_does_not_have(self, folder):
        with pytest.raises(ValueError, match="`target_layer_ids`"):
            main(flags(folder, "run", target_layer_ids="0 9"))


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("feature_cache_gb", "nan"),
            ("feature_cache_gb", "-1"),
            ("l1_warmup_fraction", "-1"),
            ("l1_warmup_fraction", "1.5"),
            ("gradient_accumulation_steps", "0"),
            ("target_dtype", "foo"),
        ],
    )
    def test_values_without_a_meaning(self, folder, name, value):
        with pytest.raises(ValueError, match=f"`{name}` must.*{value}"):
            main(flags(folder, "run", **{name: value}))

    @pytest.mark.parametrize("epochs", ["0", "-1", "nan"])
    def test_no_epochs(self, folder, epochs):
        """They would save a drafter that was never trained."""
        with pytest.raises(ValueError, match="`num_train_epochs`"):
            main(flags(folder, "run", max_steps=None, num_train_epochs=epochs))

    def test_compiling_the_autoregressive_baseline(self, folder):
        eagle = {"architecture": "eagle", "markov_rank": 0, "confidence_head": "false"}
        with pytest.raises(ValueError, match=r"`torch_compile`.*`architecture: eagle`"):
            main(flags(folder, "run", torch_compile="true", **eagle))

    def test_a_layer_counted_from_the_end(self, folder):
        with pytest.raises(ValueError, match=r"`init_from_target_layers`.*\[0, 4\).*-1"):
            main(flags(folder, "run", init_from_target_layers="-1"))

    def test_answers_that_need_prompts_without_any(self, folder):
        with pytest.raises(ValueError, match="as `prompts`"):
            main(flags(folder, "run", prompts=None))

    @pytest.mark.parametrize("fields", [{"turn": "x"}, {"sample": [1]}, {"turn": None}])
    def test_answers_of_wrong_types(self, folder, fields):
        (folder / "answers.jsonl").write_text(json.dumps({"prompt": 0, "answer_ids": [5, 6, 7]} | fields) + "\n")
        with pytest.raises(ValueError, match="an answer needs"):
            main(flags(folder, "run"))

    @pytest.mark.parametrize("content", ["a: [", "- a", "1: 2\nb: 3", "\x00"])
    def test_yaml_that_is_none(self, folder, content):
        (folder / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match="config.yaml"):
            main(["--config", str(folder / "config.yaml")])

    def test_the_config_file_has_no_short_name(self, folder):
        """It was taken for the flag, and the file was not read."""
        (folder / "config.yaml").write_text("max_steps: 1")
        with pytest.raises(ValueError, match="--conf"):
            main([*flags(folder, "run"), "--conf", str(folder / "config.yaml")])


class TestWhereARunBegins:
    def checkpoint(self, folder, name, **config):
        """A checkpoint as far as it is looked at."""
        path = folder / "run" / name
        path.mkdir(parents=True)
        (path / "trainer_state.json").write_text("{}")
        (path / "config.json").write_text(json.dumps(config))
        return path

    @pytest.mark.parametrize("there", ["drafter", "adapter", "checkpoint-3"])
    def test_not_in_the_folder_of_another_run(self, folder, there):
        self.checkpoint(folder, there)
        for more in ({}, {"resume_from_checkpoint": "false"}):
            with pytest.raises(ValueError, match=f"`output_dir`.*'{there}'.*resume-from-checkpoint"):
                main(flags(folder, "run", **more))

    def test_nor_while_another_process_trains_there(self, folder):
        (folder / "run").mkdir()
        with only_writer(folder / "run"), pytest.raises(ValueError, match="Another process is writing"):
            main(flags(folder, "run"))

    def test_the_last_checkpoint_is_a_numbered_one(self, folder):
        last = self.checkpoint(folder, "checkpoint-10")
        for name in ("checkpoint-9", "checkpoint-best"):
            self.checkpoint(folder, name)
        self.checkpoint(folder, "checkpoint-11").joinpath("config.json").unlink()
        assert last_whole_checkpoint(folder / "run") == last

    @pytest.mark.parametrize("place", ["nowhere", "."])
    def test_not_from_a_folder_that_is_no_checkpoint(self, folder, place):
        with pytest.raises(ValueError, match="`resume_from_checkpoint` must be"):
            main(flags(folder, "run", resume_from_checkpoint=folder / place))

    def test_other_layers_are_not_resumed(self, folder):
        drafter = tiny_drafter(tiny_target("llama"))
        drafter.save_pretrained(folder / "saved")
        check_resumed(folder / "saved", drafter)
        for fields in ({"num_hidden_layers": 1}, {"sample_from_anchor": False}):
            with pytest.raises(ValueError, match=next(iter(fields))):
                check_resumed(folder / "saved", tiny_drafter(tiny_target("llama"), **fields))

    def test_adapters_are_not_resumed_without_them(self, folder):
        drafter = tiny_drafter(tiny_target("llama"))
        drafter.save_pretrained(folder / "saved")
        add_lora(drafter, rank=2, alpha=4)
        with pytest.raises(ValueError, match=r"lora_A.*`lora_rank`"):
            check_resumed(folder / "saved", drafter)

    def test_a_full_disk_is_said(self, folder, monkeypatch):
        def full(*_, **__):
            raise RuntimeError("inline_container.cc: unexpected pos")  # of `torch.save`

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(ValueError, match=r"checkpoint of step 1 .* could not be written.*resume-from-checkpoint"):
            main(flags(folder, "run", save_strategy="steps", save_steps=1))

    def test_cut_weights_are_named(self, folder):
        drafter = tiny_drafter(tiny_target("llama"))
        drafter.save_pretrained(folder / "saved")
        path = folder / "saved" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ValueError, match=r"model.safetensors` is damaged"):
            check_resumed(folder / "saved", drafter)
