"""The target as a user loads it wherever it decodes, and frozen where it teaches."""

import pytest
from transformers import AutoModelForCausalLM

from tests.builders import tiny_target
from tests.training.toy_run import flags, write_inputs
from training.answers import local
from training.answers.arguments import RegenerateArguments
from training.answers.regeneration import regenerate
from training.common.targets import load_target
from training.run import training as run
from training.train import main


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    write_inputs(tmp_path, tiny_tokenizer, count=8)
    return tmp_path


def requirements(model):
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def test_a_target_is_as_a_user_loads_it(tmp_path):
    tiny_target("llama").save_pretrained(tmp_path)
    user = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16").eval()
    target = load_target(str(tmp_path), "bfloat16")
    assert requirements(target) == requirements(user)
    assert all(requirements(target).values())
    assert (target.training, target.dtype) == (user.training, user.dtype)


def test_answers_are_made_by_such_a_target(folder, monkeypatch):
    seen, answer_batch = [], local.answer_batch

    def noted(target, *given, **options):
        seen.append(all(requirements(target).values()))
        return answer_batch(target, *given, **options)

    monkeypatch.setattr(local, "answer_batch", noted)
    paths = {"prompts": str(folder / "prompts.jsonl"), "output": str(folder / "new.jsonl")}
    regenerate(RegenerateArguments(target=str(folder / "target"), dtype="float32", max_new_tokens=2, **paths))
    assert seen
    assert all(seen)


def test_training_freezes_the_target(folder, monkeypatch):
    """No gradient reaches it, and its weights stay as they are; also with a draft vocabulary and cached features."""
    targets, load = [], run.load_target

    def noted(*given):
        targets.append(load(*given))
        return targets[-1]

    monkeypatch.setattr(run, "load_target", noted)
    main(flags(folder, "run", max_steps=2))
    main(flags(folder, "cached", max_steps=2, feature_cache=folder / "features", draft_vocab_size=40))
    reference = load(str(folder / "target"), "float32").state_dict()
    for target in targets:
        assert not any(requirements(target).values())
        assert all(parameter.grad is None for parameter in target.parameters())
        assert all(weight.equal(reference[name]) for name, weight in target.state_dict().items())
