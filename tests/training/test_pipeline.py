"""Regenerate, feature cache and training on tiny models, end to end: resume, errors, and that training learns."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from torch.testing import assert_close

from modeling_dspark import DSparkModel
from modeling_dspark.target_binding import hidden_states_argument
from tests.builders import VOCAB, tiny_drafter, tiny_target
from tests.training.toy_run import flags
from training.answers import local as answering
from training.answers.arguments import RegenerateArguments
from training.answers.plan import plan_batches, plan_requests
from training.answers.regeneration import regenerate
from training.common.files import read_jsonl
from training.data.conversations import Conversation, choose_draft_vocabulary, load_conversations
from training.data.features import compute_features, pad_ids
from training.run.initialization import config_for_target, default_layer_ids, start_markov_embedding, warm_start
from training.run.options import parse_arguments
from training.run.training import split_conversations
from training.train import main


ROOT = Path(__file__).parents[2]


@pytest.fixture
def workspace(tmp_path, tiny_tokenizer):
    """A folder with a tiny target, its tokenizer and prompts."""
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    texts = ["abc def"[: 3 + index % 4] + "xyz"[: index % 3] for index in range(23)]
    lines = "".join(json.dumps({"turns": [text]}) + "\n" for text in texts)
    (tmp_path / "prompts.jsonl").write_text(lines)
    return tmp_path


def arguments(workspace, **fields):
    defaults = {"batch_size": 4, "max_new_tokens": 12, "dtype": "float32", "target": str(workspace / "target")}
    return RegenerateArguments(
        prompts=str(workspace / "prompts.jsonl"), output=str(workspace / "answers.jsonl"), **(defaults | fields)
    )


class TestRegenerate:
    def test_answers_are_the_targets(self, workspace):
        """Greedy answers equal one-prompt `generate`; every prompt is answered once."""
        path = regenerate(arguments(workspace, temperatures=[0.0]))
        answers = read_jsonl(path)
        assert sorted(answer["prompt"] for answer in answers) == list(range(23))
        target = tiny_target("llama")
        requests, _ = plan_requests(arguments(workspace), _tokenizer(workspace))
        for request in requests[:6]:
            answer = next(answer for answer in answers if answer["prompt"] == request.prompt)
            ids = torch.tensor([request.input_ids])
            expected = target.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
            assert answer["answer_ids"] == expected

    def test_resume_after_a_crash(self, workspace, monkeypatch):
        """A run that dies in the middle, with half a line written, goes on to the same file as an undisturbed run."""
        whole = regenerate(arguments(workspace)).read_text()
        (workspace / "answers.jsonl").unlink()
        real, calls = answering.answer_batch, []

        def dies(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        monkeypatch.setattr(answering, "answer_batch", dies)
        with pytest.raises(KeyboardInterrupt):
            regenerate(arguments(workspace))
        with (workspace / "answers.jsonl").open("a") as file:
            file.write('{"prompt": 4, "answ')
        monkeypatch.setattr(answering, "answer_batch", real)
        assert regenerate(arguments(workspace)).read_text() == whole

    def test_batches_share_a_temperature(self, workspace):
        requests, _ = plan_requests(
            arguments(workspace, temperatures=[0.0, 0.8], samples_per_prompt=2), _tokenizer(workspace)
        )
        batches = plan_batches(requests, 4, 0)
        assert sorted(r.key for batch in batches for r in batch) == sorted(r.key for r in requests)
        assert all(len({request.temperature for request in batch}) == 1 for batch in batches)
        assert {request.temperature for request in requests} == {0.0, 0.8}

    def test_long_prompts_and_answered_prompts_are_left_out(self, workspace):
        requests, too_long = plan_requests(arguments(workspace, max_prompt_tokens=4), _tokenizer(workspace))
        assert too_long + len(requests) == 23
        assert too_long > 0
        (workspace / "old.jsonl").write_text('{"prompt": 0}\n{"prompt": 5}\n')
        requests, _ = plan_requests(
            arguments(workspace, skip_answered_in=str(workspace / "old.jsonl")), _tokenizer(workspace)
        )
        assert {0, 5} & {request.prompt for request in requests} == set()

    def test_a_datasets_folder(self, workspace):
        from datasets import load_from_disk

        output = arguments(workspace, limit=5)
        output.output = str(workspace / "out")
        regenerate(output)
        assert len(load_from_disk(str(workspace / "out" / "dataset"))) == 5

    @pytest.mark.parametrize(
        "wrong",
        [
            {"batch_size": 0},
            {"temperatures": []},
            {"temperatures": [-1.0]},
            {"temperatures": 0.5},
            {"skip": -1},
            {"dtype": "b"},
        ],
    )
    def test_wrong_arguments(self, workspace, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            arguments(workspace, **wrong)

    def test_resume_with_other_arguments_is_refused(self, workspace):
        regenerate(arguments(workspace, limit=4))
        with pytest.raises(ValueError, match="temperatures"):
            regenerate(arguments(workspace, temperatures=[0.5]))

    def test_wrong_files(self, workspace):
        with pytest.raises(ValueError, match="no file"):
            read_jsonl(workspace / "missing.jsonl")
        (workspace / "broken.jsonl").write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
        with pytest.raises(ValueError, match="line 2"):
            read_jsonl(workspace / "broken.jsonl")
        (workspace / "prompts.jsonl").write_text('{"question": "x"}\n')
        with pytest.raises(ValueError, match="turns.*question"):
            regenerate(arguments(workspace))


def _tokenizer(workspace):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(workspace / "target")


class TestData:
    def test_join(self, workspace):
        (workspace / "a.jsonl").write_text(
            "".join(
                json.dumps(r) + "\n"
                for r in [
                    {"prompt": 0, "answer_ids": [5, 6, 7]},
                    {"prompt": 1, "answer_ids": [5]},
                    {"prompt": 2, "answer_ids": [8] * 100},
                ]
            )
        )
        conversations, counts = load_conversations(
            str(workspace / "prompts.jsonl"), [str(workspace / "a.jsonl")], _tokenizer(workspace), max_length=20
        )
        assert counts == {"short_answers": 1, "long_prompts": 0, "cut": 1}
        assert conversations[0].input_ids[conversations[0].response_start :] == (5, 6, 7)
        assert len(conversations[1].input_ids) == 20
        (workspace / "b.jsonl").write_text('{"prompt": 99, "answer_ids": [1, 2]}\n')
        for wrong in ({"prompt": "1", "answer_ids": [1]}, {"prompt": 1}, {"prompt": 1, "answer_ids": [10**6]}, [1]):
            (workspace / "c.jsonl").write_text(json.dumps(wrong) + "\n")
            with pytest.raises(ValueError, match="answer_ids"):
                load_conversations(
                    str(workspace / "prompts.jsonl"),
                    [str(workspace / "c.jsonl")],
                    _tokenizer(workspace),
                    max_length=20,
                )
        with pytest.raises(ValueError, match="prompt 99"):
            load_conversations(
                str(workspace / "prompts.jsonl"), [str(workspace / "b.jsonl")], _tokenizer(workspace), max_length=20
            )

    def test_draft_vocabulary(self):
        conversations = [Conversation((1, 1, 9, 9, 9, 7), 2), Conversation((1, 5, 7), 1)]
        chosen, coverage = choose_draft_vocabulary(conversations, 3, 20, always=[2])
        assert chosen.tolist() == [2, 7, 9]
        assert coverage == pytest.approx(5 / 6)
        with pytest.raises(ValueError, match="draft_vocab_size"):
            choose_draft_vocabulary(conversations, 0, 20)

    def test_split(self):
        train, held_out = split_conversations([None] * 50, 7)
        assert len(held_out) == 7
        assert sorted(train + held_out) == list(range(50))
        with pytest.raises(ValueError, match="num_eval_conversations"):
            split_conversations([None] * 5, 5)


class TestFeatures:
    def conversations(self, count=9):
        torch.manual_seed(0)
        lengths = torch.randint(5, 14, (count,)).tolist()
        return [Conversation(tuple(torch.randint(4, VOCAB, (n,)).tolist()), 2) for n in lengths]

    def test_features_are_those_of_single_forwards(self):
        target = tiny_target("llama")
        drafter = tiny_drafter(target, target_layer_ids=[0, 2])
        conversations = self.conversations(4)
        input_ids, response_mask = pad_ids(conversations)
        batch = compute_features(
            target, drafter.bind(target), input_ids, target_layer_ids=[0, 2], needed=response_mask, chunk_size=3
        )
        for row, conversation in enumerate(conversations):
            length = len(conversation.input_ids)
            with torch.no_grad():
                outputs = target(torch.tensor([conversation.input_ids]), output_hidden_states=True)
            hidden = outputs.hidden_states
            assert_close(batch.features[row, :length], torch.cat([hidden[1], hidden[3]], -1)[0], atol=1e-5, rtol=1e-4)
            assert_close(batch.last_hidden[row, :length], hidden[-1][0], atol=1e-5, rtol=1e-4)
            start = conversation.response_start
            expected = outputs.logits[0, start:].logsumexp(-1)
            assert_close(batch.logsumexp[row, start:length], expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.skipif(hidden_states_argument([0]) is True, reason="this Transformers keeps all hidden states")
    def test_of_the_hidden_states_only_the_tapped_ones_are_kept(self):
        target = tiny_target("llama")
        kept = []
        target.base_model.register_forward_hook(lambda module, inputs, outputs: kept.append(outputs.hidden_states))
        binding = tiny_drafter(target, target_layer_ids=[-1, 1]).bind(target)
        compute_features(target, binding, torch.tensor([[5, 6, 7]]), target_layer_ids=[-1, 1])
        assert [state is not None for state in kept[0]] == [True, False, True, *[False] * (len(kept[0]) - 3)]


class TestInitialization:
    def test_layers(self):
        assert default_layer_ids(36, 5) == [1, 9, 18, 26, 34]
        assert default_layer_ids(30, 1) == [28]
        assert default_layer_ids(4, 3) == [0, 1, 2] or default_layer_ids(4, 2) == [1, 2]
        with pytest.raises(ValueError, match="taps"):
            default_layer_ids(4, 4)

    def test_config(self, tiny_tokenizer):
        target = tiny_target("llama")
        config = config_for_target(target, tiny_tokenizer, "name", target_layer_ids=[0], mask_token_id=3, block_size=4)
        assert (config.hidden_size, config.vocab_size, config.num_target_layers, config.eos_token_id) == (32, 61, 4, 2)

    def test_warm_start(self):
        """The context starts as the last tapped layer's states through the copied layer's input norm."""
        target = tiny_target("llama")
        drafter = tiny_drafter(target)
        warm_start(drafter, target, [2, 3])
        source = target.model.layers[2]
        assert torch.equal(drafter.layers[0].mlp.up_proj.weight, source.mlp.up_proj.weight)
        features = torch.randn(1, 3, 96)
        context = drafter.hidden_norm(drafter.fc(features))
        assert_close(context, source.input_layernorm(features[..., -32:]), atol=1e-4, rtol=1e-4)
        start_markov_embedding(drafter, target)
        assert_close(drafter.markov_head.markov_w1.weight.std(dim=0), torch.ones(8), atol=1e-4, rtol=0)
        with pytest.raises(ValueError, match="init_from_target_layers"):
            warm_start(drafter, target, [2])


def train_flags(workspace, output, **changes):
    defaults = {"logging_steps": 5, "max_steps": 10, "save_strategy": "steps", "save_steps": 5, "loss_decay": 4.0}
    return flags(workspace, output, **(defaults | changes))


class TestTrain:
    @pytest.fixture(autouse=True)
    def _answers(self, workspace):
        regenerate(arguments(workspace, temperatures=[0.0]))

    def test_it_learns_and_the_result_loads(self, workspace):
        main(
            train_flags(
                workspace,
                "run",
                max_steps=60,
                save_strategy="no",
                eval_strategy="steps",
                eval_steps=30,
                draft_vocab_size=40,
                kd_weight=0.5,
            )
        )
        log = [json.loads(line) for line in (workspace / "run" / "log.jsonl").read_text().splitlines()]
        losses = [entry["position_loss"] for entry in log if "position_loss" in entry]
        assert losses[-1] < 0.8 * losses[0]
        assert any("eval_tau" in entry and "eval_acceptance/2" in entry for entry in log)
        drafter = DSparkModel.from_pretrained(workspace / "run" / "drafter")
        assert drafter.config.draft_vocab_size == 40
        target = tiny_target("llama")
        prompt = torch.tensor([[7, 8, 9]])
        output = target.generate(prompt, assistant_model=drafter, max_new_tokens=8, do_sample=False)
        assert output.tolist() == target.generate(prompt, max_new_tokens=8, do_sample=False).tolist()

    def test_resume_gives_the_same_drafter(self, workspace):
        """Ten steps equal five steps, a stop, and five more from the checkpoint: the same blocks and log, bit for bit."""
        whole = main(train_flags(workspace, "whole", logging_steps=3))
        main(train_flags(workspace, "parts", logging_steps=3))
        shutil.rmtree(workspace / "parts" / "checkpoint-10")
        resumed = main(train_flags(workspace, "parts", logging_steps=3, resume_from_checkpoint="true"))
        for (name, one), (_, other) in zip(whole.state_dict().items(), resumed.state_dict().items(), strict=True):
            assert torch.equal(one, other), name
        logs = [read_jsonl(workspace / name / "log.jsonl")[:-1] for name in ("whole", "parts")]
        assert [entry["step"] for entry in logs[0]] == [3, 5, 6, 9, 10]
        assert logs[1] == logs[0]  # but for the last entry, which is about the last process

    def test_a_checkpoint_that_was_cut_short_is_passed_over(self, workspace):
        whole = main(train_flags(workspace, "whole"))
        main(train_flags(workspace, "parts"))
        (workspace / "parts" / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 1')
        resumed = main(train_flags(workspace, "parts", resume_from_checkpoint="true"))
        for (name, one), (_, other) in zip(whole.state_dict().items(), resumed.state_dict().items(), strict=True):
            assert torch.equal(one, other), name

    def test_a_training_that_is_killed_goes_on(self, workspace):
        """With SIGKILL, while a checkpoint is written and a little later: the same drafter, bit for bit."""
        flags = {"max_steps": 30, "save_steps": 3}
        whole = main(train_flags(workspace, "whole", **flags))
        command = [sys.executable, "-m", "training.train", *train_flags(workspace, "parts", **flags)]
        for checkpoint, delay in (("checkpoint-6", 0.0), ("checkpoint-15", 0.05)):
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            while not (workspace / "parts" / checkpoint).is_dir():
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.002)
            time.sleep(delay)
            process.kill()
            process.communicate()
            command += ["--resume_from_checkpoint", "true"]  # the second time it has no effect
        assert not (workspace / "parts" / "drafter").exists()
        resumed = main(train_flags(workspace, "parts", resume_from_checkpoint="true", **flags))
        for (name, one), (_, other) in zip(whole.state_dict().items(), resumed.state_dict().items(), strict=True):
            assert torch.equal(one, other), name

    def test_cached_features_give_the_same_drafter(self, workspace):
        """Features from disk are those of the step, up to their storage in bf16."""
        fresh = main(train_flags(workspace, "fresh", max_steps=3))
        cached = main(train_flags(workspace, "cached", max_steps=3, feature_cache=workspace / "features"))
        difference = max(
            float((one - other).abs().max())
            for one, other in zip(fresh.state_dict().values(), cached.state_dict().values(), strict=True)
        )
        assert difference < 2e-2
        assert any((workspace / "features").iterdir())

    def test_accumulation_equals_one_large_batch(self, workspace):
        """The loss is normalised over the global batch, whatever the split into accumulation steps."""
        shared = {"max_steps": 2, "optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 0.1}
        large = main(train_flags(workspace, "large", per_device_train_batch_size=4, **shared))
        small = main(
            train_flags(workspace, "small", per_device_train_batch_size=1, gradient_accumulation_steps=4, **shared)
        )
        for (name, one), (_, other) in zip(large.state_dict().items(), small.state_dict().items(), strict=True):
            assert_close(one, other, atol=1e-5, rtol=1e-4, msg=name)
        logs = [
            json.loads((workspace / name / "log.jsonl").read_text().splitlines()[-1]) for name in ("large", "small")
        ]
        assert logs[1]["train_loss"] == pytest.approx(logs[0]["train_loss"], rel=1e-4)

    def test_yaml_and_flags(self, workspace):
        config = workspace / "config.yaml"
        config.write_text(
            yaml.safe_dump(
                {"block_size": 6, "learning_rate": 0.5, "output_dir": str(workspace / "x"), "use_cpu": True}
            )
        )
        drafter, _, training = parse_arguments(["--config", str(config), "--learning_rate", "0.25"])
        assert (drafter.block_size, training.learning_rate) == (6, 0.25)
        config.write_text(yaml.safe_dump({"blok_size": 6}))
        with pytest.raises(ValueError, match="blok_size"):
            parse_arguments(["--config", str(config)])
        for missing in (["--config", str(workspace / "missing.yaml")], [f"--config={workspace}/missing.yaml"]):
            with pytest.raises(ValueError, match="--config"):
                parse_arguments(missing)
        with pytest.raises(ValueError, match="once"):
            parse_arguments(["--config", "a.yaml", "--config=b.yaml"])
        config.write_text("hello")
        with pytest.raises(ValueError, match="key: value"):
            parse_arguments(["--config", str(config)])
        config.write_text("block_size: 2.5")
        with pytest.raises(SystemExit):
            parse_arguments(["--config", str(config)])
        config.write_text("answers: a.jsonl\nloss_decay: null\nuse_cpu: true")
        _, data, training = parse_arguments([f"--config={config}"])
        assert (data.answers, training.loss_decay) == (["a.jsonl"], None)

    def test_resume_with_other_arguments_is_refused(self, workspace):
        main(train_flags(workspace, "run", max_steps=5))
        with pytest.raises(ValueError, match=r"block_size.*3, 4"):
            main(train_flags(workspace, "run", block_size=4, resume_from_checkpoint="true"))
        with pytest.raises(ValueError, match="no checkpoint"):
            main(train_flags(workspace, "other", resume_from_checkpoint="true"))

    def test_a_drafter_needs_a_mask_token(self, workspace):
        """It is missed before anything is read, here a target and answers that are not there."""
        missing = {"target": workspace / "none", "answers": workspace / "none.jsonl"}
        with pytest.raises(ValueError, match="`mask_token_id` is required"):
            main(train_flags(workspace, "run", mask_token_id=None, **missing))

    def test_answers_and_their_prompts_are_needed(self, workspace):
        with pytest.raises(ValueError, match="`answers` is required"):
            main(train_flags(workspace, "run", answers=None, target=workspace / "none"))
        (workspace / "old.jsonl").write_text('{"prompt": 0, "answer_ids": [5, 6, 7]}\n')
        with pytest.raises(ValueError, match="do not hold `prompt_ids`.* as `prompts`"):
            main(train_flags(workspace, "run", answers=workspace / "old.jsonl", prompts=None))

    def test_a_mask_token_that_the_target_produces_is_said(self, workspace, caplog):
        main(train_flags(workspace, "unused", max_steps=1))
        assert "`mask_token_id`" not in caplog.text
        answers = read_jsonl(workspace / "answers.jsonl")
        produced = answers[0]["answer_ids"][0]
        count = sum(produced in answer["answer_ids"] for answer in answers)
        main(train_flags(workspace, "used", mask_token_id=produced, max_steps=1))
        assert f"`mask_token_id`: {count} of {len(answers)} conversations have token {produced}" in caplog.text

    def test_what_a_run_leaves_unused_and_where_it_leaves_the_drafter_is_said(self, workspace, caplog):
        main(train_flags(workspace, "run", max_steps=1))
        assert "held out and not measured" in caplog.text
        assert f"The drafter is in `{workspace / 'run' / 'drafter'}`" in caplog.text
        main(train_flags(workspace, "measured", max_steps=1, eval_strategy="steps", num_eval_conversations=2))
        assert caplog.text.count("held out and not measured") == 1

    def test_temperatures_of_the_old_confidence_head_are_not_kept(self, workspace):
        """They were fitted to another head; the drafter's own folder keeps them."""
        main(train_flags(workspace, "base", max_steps=1))
        folder = workspace / "base" / "drafter"
        config = json.loads((folder / "config.json").read_text()) | {"confidence_temperatures": [2.0, 2.0, 2.0]}
        (folder / "config.json").write_text(json.dumps(config))
        for name, changes in {"whole": {}, "adapted": {"peft": "lora", "lora_rank": 2}}.items():
            main(train_flags(workspace, name, drafter=folder, max_steps=1, **changes))
            trained = DSparkModel.from_pretrained(workspace / name / "drafter").config
            assert trained.confidence_temperatures is None
        assert DSparkModel.from_pretrained(folder).config.confidence_temperatures == [2.0, 2.0, 2.0]

    def test_a_drafter_made_for_a_target_of_another_name_is_said(self, workspace, caplog):
        main(train_flags(workspace, "base", max_steps=1))
        shutil.copytree(workspace / "target", workspace / "copy")
        given = {"drafter": workspace / "base" / "drafter", "max_steps": 1}
        main(train_flags(workspace, "same", **given))
        assert "It was made for" not in caplog.text
        main(train_flags(workspace, "other", target=workspace / "copy", **given))
        assert f"It was made for `{workspace / 'target'}`; `target` is `{workspace / 'copy'}`." in caplog.text

    def test_adapters_leave_the_backbone_and_are_merged(self, workspace):
        """Only adapters and heads are trained; what is saved is a plain drafter, and what `peft` makes it of again."""
        from peft import PeftModel

        base = main(train_flags(workspace, "base", max_steps=2))
        folder = workspace / "base" / "drafter"
        tuned = main(train_flags(workspace, "tuned", drafter=folder, peft="lora", lora_rank=2, max_steps=6))
        saved = DSparkModel.from_pretrained(workspace / "tuned" / "drafter")
        assert {name for name, _ in saved.named_parameters()} == {name for name, _ in base.named_parameters()}
        before, after = base.state_dict(), saved.state_dict()
        changes = {name: float((after[name] - before[name]).abs().max()) for name in before}
        assert changes["layers.0.self_attn.q_proj.weight"] > 0
        assert changes["markov_head.markov_w2.weight"] > 0
        assert changes["norm.weight"] == changes["hidden_norm.weight"] == 0
        rank = torch.linalg.matrix_rank(
            after["layers.0.mlp.up_proj.weight"] - before["layers.0.mlp.up_proj.weight"], tol=1e-5
        )
        assert 0 < int(rank) <= 2
        assert all(torch.equal(after[name], tensor) for name, tensor in tuned.state_dict().items())
        again = PeftModel.from_pretrained(DSparkModel.from_pretrained(folder), workspace / "tuned" / "adapter")
        for name, tensor in again.merge_and_unload().state_dict().items():
            assert_close(tensor, after[name], atol=1e-6, rtol=1e-5, msg=name)

    def test_adapters_resume(self, workspace):
        main(train_flags(workspace, "base", max_steps=2))
        flags = {"drafter": workspace / "base" / "drafter", "peft": "lora", "max_steps": 10}
        whole = main(train_flags(workspace, "whole", **flags))
        main(train_flags(workspace, "parts", **flags))
        shutil.rmtree(workspace / "parts" / "checkpoint-10")
        resumed = main(train_flags(workspace, "parts", resume_from_checkpoint="true", **flags))
        for (name, one), (_, other) in zip(whole.state_dict().items(), resumed.state_dict().items(), strict=True):
            assert torch.equal(one, other), name

    @pytest.mark.slow
    @pytest.mark.parametrize("head", ["vanilla", "rnn"])
    def test_compiled_training_gives_the_same_drafter_and_resumes(self, workspace, head):
        shared = {"markov_head_type": head, "gradient_checkpointing": str(head == "rnn").lower()}
        plain = main(train_flags(workspace, "plain", **shared))
        main(train_flags(workspace, "compiled", torch_compile="true", **shared))
        compiled = DSparkModel.from_pretrained(workspace / "compiled" / "drafter").state_dict()
        for name, weight in plain.state_dict().items():
            assert_close(compiled[name], weight, atol=1e-4, rtol=1e-3, msg=name)
        shutil.rmtree(workspace / "compiled" / "checkpoint-10")
        again = {"torch_compile": "true", "resume_from_checkpoint": "true"}
        main(train_flags(workspace, "compiled", **again, **shared))
        for name, weight in DSparkModel.from_pretrained(workspace / "compiled" / "drafter").state_dict().items():
            assert_close(weight, compiled[name], atol=1e-5, rtol=1e-4, msg=name)

    def test_adapters_need_a_drafter(self, workspace):
        with pytest.raises(ValueError, match="name it with `drafter`"):
            main(train_flags(workspace, "run", peft="lora"))
        with pytest.raises(ValueError, match="`peft` must be `lora`"):
            main(train_flags(workspace, "run", peft="dora"))
