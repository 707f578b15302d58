"""A confidence head fitted anew: the regression, what it is fitted on, and the folder that is written."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from modeling_dspark import DSparkModel
from tests.builders import tiny_drafter, tiny_target
from training.confidence import pair
from training.confidence import refit as refit_module
from training.confidence.inputs import Recorder, head_inputs
from training.confidence.refit import RefitArguments, choose_weight_decay, fit_head, refit
from training.confidence.rounds import make_engine


def planted(count: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    """Inputs, outcomes drawn from a known head, and that head."""
    generator = torch.Generator().manual_seed(seed)
    truth = nn.Linear(6, 1)
    with torch.no_grad():
        truth.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 0.0, 0.0, 1.5]]))
        truth.bias.fill_(-0.7)
        inputs = torch.randn(count, 6, generator=generator) * torch.tensor([1.0, 0.1, 3.0, 1.0, 1.0, 1.0]) + 0.3
        outcomes = torch.rand(count, generator=generator) < torch.sigmoid(truth(inputs).squeeze(-1))
    return inputs, outcomes, truth


def test_the_regression_finds_a_planted_head():
    inputs, outcomes, truth = planted(40_000)
    fitted = fit_head(nn.Linear(6, 1), inputs, outcomes, weight_decay=0.0)
    # Standard errors here are about 0.015, ten times that for the input with a spread of 0.1.
    tolerance = torch.tensor([[0.08, 0.6, 0.05, 0.08, 0.08, 0.08]])
    assert ((fitted.weight - truth.weight).abs() < tolerance).all()
    assert abs(float((fitted.bias - truth.bias).detach())) < 0.2


def test_a_strong_penalty_keeps_the_head_and_moves_only_the_offset():
    inputs, outcomes, _ = planted(5_000)
    head = nn.Linear(6, 1)
    fitted = fit_head(head, inputs, outcomes, weight_decay=100.0)
    torch.testing.assert_close(fitted.weight, head.weight, atol=2e-2, rtol=0)
    assert abs(torch.sigmoid(fitted(inputs)).mean() - outcomes.float().mean()) < 0.01


def test_the_penalty_is_found_by_what_it_brings():
    """Much data about a head that is wrong all over frees the weights; little about one whose offset is wrong does not."""
    inputs, outcomes, truth = planted(20_000)
    wrong = nn.Linear(6, 1)
    assert choose_weight_decay(wrong, inputs, outcomes) <= 1e-3
    inputs, outcomes, shifted = planted(200, seed=1)
    with torch.no_grad():
        shifted.bias.add_(1.0)
    chosen = choose_weight_decay(shifted, inputs, outcomes)
    assert chosen >= 0.1
    fitted = fit_head(shifted, inputs, outcomes, chosen)
    assert abs(float((fitted.bias - truth.bias).detach())) < abs(float((shifted.bias - truth.bias).detach())) / 2


@pytest.mark.parametrize("with_markov", [True, False])
def test_recorded_inputs_give_the_logits_of_the_head(with_markov):
    """Each recorded input, put through the head, is a logit the engine recorded; outcomes are leading acceptances."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, confidence_head_with_markov=with_markov)
    recorder = Recorder(drafter)
    engine = make_engine(drafter, target, 0.0, observer=recorder)
    requests = [engine.add_request(torch.tensor(prompt), max_new_tokens=12) for prompt in ([5, 6, 7], [9], [4, 8])]
    while engine.requests:
        engine.step()
    positions = [recorder.take(request.statistics) for request in requests]
    assert all(len(inputs) == len(outcomes) > 0 for inputs, outcomes in positions)
    logits = torch.cat([drafter.confidence_head.proj(inputs.float()).squeeze(-1) for inputs, _ in positions])
    for request, (_, outcomes) in zip(requests, positions, strict=True):
        assert int(outcomes.sum()) == sum(request.statistics.accepted)
    expected = sorted(
        value
        for request in requests
        for values, accepted, verified in zip(
            request.statistics.confidence_logits,
            [a for a, d in zip(request.statistics.accepted, request.statistics.drafted, strict=True) if d],
            [v for v, d in zip(request.statistics.verified, request.statistics.drafted, strict=True) if d],
            strict=True,
        )
        for value in values[: min(accepted + 1, verified)]
    )
    # A text that ends at a kept draft hides the position behind it, so a few recorded logits may be missing here.
    assert len(expected) - len(requests) <= len(logits) <= len(expected)
    distances = (logits[:, None] - torch.tensor(expected)).abs().min(dim=1).values
    assert distances.max() < 1e-3  # the engine keeps four decimals


def test_head_inputs_of_a_drafter_without_a_markov_input():
    drafter = tiny_drafter(tiny_target("llama"), confidence_head_with_markov=False)
    hidden = torch.randn(2, 4, 32)
    assert head_inputs(drafter, hidden, torch.zeros(2, 4, dtype=torch.long), torch.zeros(2).long()) is hidden


@pytest.fixture
def workspace(tmp_path, tiny_tokenizer, monkeypatch):
    target = tiny_target("llama")
    monkeypatch.setattr(pair, "load_target", lambda *_: target)
    monkeypatch.setattr(pair, "load_tokenizer", lambda *_: tiny_tokenizer)
    drafter = tiny_drafter(target, target_name_or_path="tiny", confidence_temperatures=[1.5] * 4)
    drafter.save_pretrained(tmp_path / "drafter")
    lines = [{"text": "".join(chr(97 + (7 * i + j) % 26) for j in range(3 + i % 5))} for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def arguments(workspace, **fields) -> RefitArguments:
    return RefitArguments(
        **(
            {
                "drafter": str(workspace / "drafter"),
                "prompts": str(workspace / "prompts.jsonl"),
                "output": str(workspace / "refitted"),
                "max_new_tokens": 24,
                "dtype": "float32",
                "holdout": 0.25,
            }
            | fields
        )
    )


def test_only_the_confidence_head_changes(workspace):
    report = refit(arguments(workspace, weight_decay=1.0))
    assert report["loss_after"] < report["loss_before"]
    before = load_file(workspace / "drafter" / "model.safetensors")
    after = load_file(workspace / "refitted" / "model.safetensors")
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    drafter = DSparkModel.from_pretrained(workspace / "refitted")
    assert drafter.config.confidence_temperatures is None  # those were the old head's
    with pytest.raises(ValueError, match="holds a drafter already.*--overwrite"):
        arguments(workspace)


def test_the_report_says_which_penalty_was_found(workspace):
    report = refit(arguments(workspace))
    assert report["loss_after"] < report["loss_before"]
    assert report == json.loads((workspace / "refitted" / "refit_confidence.json").read_text())
    again = refit(arguments(workspace, weight_decay=report["weight_decay"], overwrite=True))
    assert again == report


def test_the_folder_of_another_model_is_not_written_to(workspace):
    """Of a large one, whose weights are in several files."""
    (workspace / "refitted").mkdir()
    (workspace / "refitted" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="config.json.*--overwrite"):
        arguments(workspace)


def test_too_few_rounds_are_named_and_nothing_is_written(workspace):
    with pytest.raises(ValueError, match="a larger `max_new_tokens`"):
        refit(arguments(workspace, max_new_tokens=1))
    with pytest.raises(ValueError, match="too few to fit on|no better on the held-out"):
        refit(arguments(workspace, max_new_tokens=3, num_prompts=2))
    assert not (workspace / "refitted").exists()


def test_whole_answers_are_held_out(workspace, monkeypatch):
    """A quarter of the prompts: no answer has positions on both sides."""
    recorded, record_positions = [], refit_module.record_positions

    def noted(*given, **options):
        recorded.extend(record_positions(*given, **options))
        return recorded

    monkeypatch.setattr(refit_module, "record_positions", noted)
    report = refit(arguments(workspace, weight_decay=1.0, dry_run=True))
    lengths = [len(outcomes) for _, outcomes in recorded]
    assert len(lengths) == 24
    assert (report["num_positions_fit"], report["num_positions_held_out"]) == (sum(lengths[:18]), sum(lengths[18:]))
    assert not (workspace / "refitted").exists()


def test_a_head_that_is_no_better_is_not_written(workspace, monkeypatch):
    monkeypatch.setattr(refit_module, "_loss", lambda *_: 1.0)
    with pytest.raises(ValueError, match="no better on the held-out.*more `prompts`"):
        refit(arguments(workspace, weight_decay=1.0))
    assert not (workspace / "refitted").exists()


def test_one_row_leaves_numbers(workspace):
    """Its spread is zero, and not undefined."""
    fitted = fit_head(nn.Linear(6, 1), torch.ones(1, 6), torch.tensor([True]), weight_decay=1.0)
    assert fitted.weight.isfinite().all()


def test_an_old_config_never_meets_a_new_head(workspace, monkeypatch):
    """Interrupted while the weights are written: the folder loads, with the old head and without temperatures."""
    refit(arguments(workspace, weight_decay=1.0))
    config = json.loads((workspace / "refitted" / "config.json").read_text()) | {"confidence_temperatures": [2.0] * 4}
    (workspace / "refitted" / "config.json").write_text(json.dumps(config))
    before = (workspace / "refitted" / "model.safetensors").read_bytes()
    monkeypatch.setattr(refit_module, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        refit(arguments(workspace, weight_decay=1.0, overwrite=True))
    assert (workspace / "refitted" / "model.safetensors").read_bytes() == before
    assert DSparkModel.from_pretrained(workspace / "refitted").config.confidence_temperatures is None
    assert not list((workspace / "refitted").glob(".*.partial"))


def interrupted(_, path, **__):
    path.write_bytes(b"half")
    raise KeyboardInterrupt


def test_mistakes_are_named(workspace):
    (workspace / "sharded").mkdir()
    with pytest.raises(ValueError, match="no model.safetensors"):
        arguments(workspace, drafter=str(workspace / "sharded"))
    with pytest.raises(ValueError, match="own folder"):
        arguments(workspace, output=str(workspace / "drafter"))
    with pytest.raises(ValueError, match="weight_decay.*-1"):
        arguments(workspace, weight_decay=-1.0)
    with pytest.raises(ValueError, match="no config.json|config.json"):
        refit(arguments(workspace, drafter=str(workspace / "nowhere")))
