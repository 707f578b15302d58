"""What training does with input that is wrong: a clear error, or a counted skip."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from modeling_dspark import DSparkModel
from tests.builders import tiny_drafter, tiny_target
from tests.training.toy_run import flags, write_answers, write_inputs
from training.data import load_conversations
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
        assert entries[0]["slot_loss"] > 0

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
