"""fp32 greedy output equals plain `generate`, token for token, whatever the drafter does."""

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from tests.builders import FAMILIES, HYBRIDS, VOCAB, script, tiny_drafter, tiny_target


PROMPT = [[7, 11, 13, 17, 19, 23]]
HEADS = {
    "none": {"markov_rank": 0, "confidence_head_with_markov": False},
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no_confidence": {"enable_confidence_head": False},
    "confidence_without_markov": {"confidence_head_with_markov": False},
}
SETTINGS = [
    {},
    {"num_assistant_tokens": 0},
    {"num_assistant_tokens": 1},
    {"num_assistant_tokens": 3},
    {"assistant_confidence_threshold": 0.6},
    {"num_assistant_tokens_schedule": "confidence"},
]


def plain(target, prompt, **kwargs):
    return target.generate(torch.tensor(prompt), do_sample=False, **kwargs)


def assisted(target, drafter, prompt, **kwargs):
    return target.generate(torch.tensor(prompt), do_sample=False, assistant_model=drafter, **kwargs)


def check(target, drafter, prompt=PROMPT, *, settings=None, **kwargs):
    """Equal output; returns the run's statistics."""
    expected = plain(target, prompt, **kwargs)
    output = assisted(target, drafter, prompt, **kwargs, **(settings or {}))
    assert output.tolist() == expected.tolist()
    run = drafter.last_run
    assert sum(run.new_tokens) == max(output.shape[1] - len(prompt[0]) - 1, 0)
    return run


def scripted(target, prompt=PROMPT, *, wrong_every=3, num_pads=0, **fields):
    """A drafter that proposes the target's own greedy text, with planted mistakes."""
    kwargs = {"attention_mask": torch.tensor([[0] * num_pads + [1] * (len(prompt[0]) - num_pads)])}
    reference = plain(target, prompt, max_new_tokens=60, eos_token_id=None, **kwargs)[0, num_pads:].tolist()
    return script(tiny_drafter(target, **fields), reference, wrong_every)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    target = tiny_target(family)
    accepted = 0
    for drafter in (tiny_drafter(target), scripted(target), scripted(target, wrong_every=1000)):
        accepted = sum(check(target, drafter, max_new_tokens=40, eos_token_id=None).accepted)
    assert accepted >= 25  # the last drafter is right all the time: whole blocks were taken


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_are_equal_or_refused(family):
    """Recurrent layers: equal where the installed Transformers can roll them back, refused with a reason elsewhere."""
    target = tiny_target(family)
    for wrong_every in (2, 1000):
        drafter = scripted(target, wrong_every=wrong_every)
        try:
            check(target, drafter, max_new_tokens=24, eos_token_id=None)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            assert any(word in str(error).lower() for word in ("crop", "stateful", "roll", "cache"))  # noqa: PT017


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_heads_caps_and_thresholds(head, settings):
    target = tiny_target("qwen3")
    if head == "no_confidence" and ("confidence" in str(settings)):
        pytest.skip("needs a confidence head")
    for drafter in (tiny_drafter(target, **HEADS[head]), scripted(target, **HEADS[head])):
        run = check(target, drafter, max_new_tokens=24, eos_token_id=None, settings=settings)
        assert max(run.verified) <= settings.get("num_assistant_tokens", 4)


@pytest.mark.parametrize("block_size", [1, 2, 7])
@pytest.mark.parametrize("length", range(1, 12))
def test_max_length_in_the_middle_of_a_block(block_size, length):
    target = tiny_target("llama")
    drafter = scripted(target, wrong_every=1000, block_size=block_size)
    check(target, drafter, max_new_tokens=length, eos_token_id=None)
    check(target, drafter, max_length=len(PROMPT[0]) + length, eos_token_id=None)


@pytest.mark.parametrize("step", range(1, 14))
def test_eos_anywhere_in_a_block(step):
    """The end-of-text token at every offset of accepted and rejected blocks."""
    target = tiny_target("llama")
    text = plain(target, PROMPT, max_new_tokens=30, eos_token_id=None)[0].tolist()
    eos = text[len(PROMPT[0]) + step - 1]
    for wrong_every in (2, 1000):
        check(target, scripted(target, wrong_every=wrong_every), max_new_tokens=30, eos_token_id=[eos, VOCAB - 1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("num_pads", [1, 5])
def test_left_padding(family, num_pads):
    target = tiny_target(family)
    prompt = [[0] * num_pads + PROMPT[0]]
    mask = torch.tensor([[0] * num_pads + [1] * len(PROMPT[0])])
    drafter = scripted(target, prompt, wrong_every=1000, num_pads=num_pads)
    run = check(target, drafter, prompt, max_new_tokens=30, eos_token_id=None, attention_mask=mask)
    assert sum(run.accepted) >= 20


def test_prompt_of_one_token():
    target = tiny_target("qwen3")
    check(target, scripted(target, [[9]]), [[9]], max_new_tokens=20, eos_token_id=None)


@pytest.mark.parametrize(
    "processors",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 11]]},
        {"min_new_tokens": 12},
        {"min_length": 15},
        {"suppress_tokens": [4, 5, 6]},
        {"forced_eos_token_id": 2},
        {"exponential_decay_length_penalty": (5, 1.1)},
    ],
    ids=str,
)
def test_processors_that_look_at_the_prefix(processors):
    target = tiny_target("llama")
    expected = plain(target, PROMPT, max_new_tokens=25, **processors)[0].tolist()
    drafter = script(tiny_drafter(target), expected, wrong_every=4)
    run = check(target, drafter, max_new_tokens=25, **processors)
    assert sum(run.accepted) > 0


def test_a_reduced_draft_vocabulary():
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, draft_token_ids=[2, 3, 5, 8, 13, 21, 34, 55])
    check(target, drafter, max_new_tokens=30, eos_token_id=None)
    check(target, drafter, max_new_tokens=30, eos_token_id=None, settings={"assistant_confidence_threshold": 0.5})


class _StopAfter(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("step", range(1, 10))
def test_custom_criteria_at_the_exact_token(step):
    target = tiny_target("llama")
    token = plain(target, PROMPT, max_new_tokens=30, eos_token_id=None)[0, len(PROMPT[0]) + step - 1]
    criteria = StoppingCriteriaList([_StopAfter(token)])
    for wrong_every in (2, 1000):
        drafter = scripted(target, wrong_every=wrong_every)
        check(target, drafter, max_new_tokens=30, eos_token_id=None, stopping_criteria=criteria)


def test_outputs_by_token():
    """Scores, logits and hidden states come one per token, as from plain `generate`."""
    target = tiny_target("qwen3")
    wanted = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "max_new_tokens": 15,
        "eos_token_id": None,
        "repetition_penalty": 1.3,
    }
    expected = plain(target, PROMPT, **wanted)
    output = assisted(target, script(tiny_drafter(target), expected.sequences[0].tolist()), PROMPT, **wanted)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = getattr(output, name), getattr(expected, name)
        assert len(ours) == len(theirs) == 15
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
    assert len(output.hidden_states) == len(expected.hidden_states)
    last = [states[-1][:, -1:] for states in output.hidden_states]
    for one, other in zip(last, expected.hidden_states, strict=True):
        torch.testing.assert_close(one, other[-1][:, -1:], atol=2e-4, rtol=1e-4)


def test_long_text_and_cache_growth():
    """More tokens than the drafter's first buffer holds."""
    target = tiny_target("llama")
    check(target, tiny_drafter(target), max_new_tokens=200, eos_token_id=None)
