"""Sampling is lossless: the next three tokens are distributed exactly as plain sampling would draw them.

The exact distribution over all three-token texts of a five-token vocabulary is enumerated through the target and the
same logits processors, and compared with sampled texts in a chi-square test at p > 0.001 with fixed seeds.

- `test_rows` draws `NUM_ROWS` texts at once through `propose` and `accept_sampled` (ragged rows, every processor,
  thresholds on and off). That is enough for a total-variation error of 0.02 to fail, which `test_power` shows, and
  broken variants do fail.
- `test_generate` draws through `generate` itself: many tokens of a target that looks at the last token only, so that
  every token is a sample. `test_generate_joint` (slow) repeats the three-token test through `generate`.
"""

import itertools

import pytest
import torch
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modeling_dspark.draft_accept import Acceptance, accept_sampled
from modeling_dspark.draft_propose import propose
from modeling_dspark.draft_tokens import DraftSampling
from modeling_dspark.model_cache import DSparkCache
from modeling_dspark.target_binding import tapped_features
from tests.builders import tiny_drafter, tiny_target


SIZE = 5
PROMPT = torch.tensor([[1, 3]])
LENGTH = 3
NUM_ROWS = 60_000
ROWS_AT_ONCE = 3_000

PROCESSORS = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "plain": ({}, []),
    "top_k": ({"top_k": 3}, [TopKLogitsWarper(3)]),
    "top_p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.15}, [MinPLogitsWarper(0.15)]),
    "repetition_penalty": ({"repetition_penalty": 1.8}, [RepetitionPenaltyLogitsProcessor(1.8)]),
}
"""Arguments of `generate`, and the same processors for the enumeration."""


def soft_target():
    """A target over five tokens whose distributions are neither flat nor peaked."""
    target = tiny_target("qwen3", vocab_size=SIZE, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)
    return target


def soft_drafter(target, **fields):
    drafter = tiny_drafter(target, **({"block_size": 3, "target_layer_ids": [0, 2]} | fields))
    with torch.no_grad():
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w2.weight.mul_(0.5)
    return drafter


@torch.no_grad()
def exact_distribution(target, processors) -> torch.Tensor:
    """Probabilities `[SIZE ** LENGTH]` of all texts, in the order of `itertools.product`."""
    texts = torch.tensor(list(itertools.product(range(SIZE), repeat=LENGTH)))
    ids = torch.cat([PROMPT.expand(len(texts), -1), texts], dim=1)
    logits = target(ids).logits
    total = torch.ones(len(texts), dtype=torch.float64)
    for step in range(LENGTH):
        position = PROMPT.shape[1] + step
        scores = LogitsProcessorList(processors)(ids[:, :position], logits[:, position - 1].float().clone())
        total *= scores.softmax(-1).double().gather(1, ids[:, position : position + 1]).squeeze(1)
    return total


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square p-value; texts expected less than five times are pooled, impossible ones must not occur."""
    total = counts.sum()
    assert counts[expected == 0].sum() == 0
    expected = expected / expected.sum() * total
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    used = wanted > 0
    if int(used.sum()) < 2:
        return 1.0  # only one text is possible, and nothing else occurred
    statistic = ((observed[used] - wanted[used]) ** 2 / wanted[used]).sum()
    return float(chi2.sf(float(statistic), int(used.sum()) - 1))


def prefixes(ids, lengths):
    """Rows cut to `lengths`, left-padded with their own first token (processors here look at sets of tokens)."""
    width = int(lengths.max())
    index = torch.arange(width)[None] - (width - lengths)[:, None]
    return ids.gather(1, index.clamp(min=0))


def sampled_rows(target, drafter, processors, *, threshold=0.0, accept=accept_sampled):
    """Counts `[SIZE ** LENGTH]` of `NUM_ROWS` texts, drawn `ROWS_AT_ONCE` at a time."""
    torch.manual_seed(1234)
    return sum(
        _sampled_rows(target, drafter, processors, threshold=threshold, accept=accept, num_rows=ROWS_AT_ONCE)
        for _ in range(NUM_ROWS // ROWS_AT_ONCE)
    )


@torch.no_grad()
def _sampled_rows(target, drafter, processors, *, threshold, accept, num_rows):
    """Counts of texts drawn by a plain loop over ragged rows around `propose` and `accept`."""
    processor = LogitsProcessorList(processors)
    start, num_draft_positions = PROMPT.shape[1], drafter.config.block_size
    ids = torch.zeros(num_rows, start + LENGTH + num_draft_positions + 1, dtype=torch.long)
    ids[:, :start] = PROMPT
    rows = torch.arange(num_rows)[:, None]
    outputs = target(ids[:, :start], output_hidden_states=True)
    first = processor(ids[:, :start], outputs.logits[:, -1])
    ids[:, start] = torch.multinomial(first.softmax(-1), 1).squeeze(1)
    lengths = torch.full((num_rows,), start + 1)
    binding, cache = drafter.bind(target), DSparkCache(num_rows)
    while int(lengths.min()) < start + LENGTH:
        # Rows that are done go on with the others; only their first three tokens count. Stop before the buffer ends.
        done = lengths >= start + LENGTH
        # Everything before the anchor went through the target in the last forward.
        features = tapped_features(outputs.hidden_states, drafter.config.target_layer_ids)
        new = lengths - 1 - torch.tensor(cache.lengths)
        gather = (torch.tensor(cache.lengths)[:, None] + torch.arange(int(new.max()))).clamp(max=features.shape[1] - 1)
        before = prefixes(ids, lengths)
        proposal = propose(
            binding,
            features[rows, gather],
            anchor_tokens=ids.gather(1, lengths[:, None] - 1).squeeze(1),
            cache=cache,
            context_lengths=new.tolist(),
            sampling=DraftSampling(
                do_sample=True,
                processor=processor
                and (lambda drafts, logits, before=before: processor(torch.cat([before, drafts], dim=1), logits)),
                temperature=1.0 if processor is None else None,
            ),
        )
        verified = (proposal.confidence >= threshold).int().cumprod(dim=-1).sum(dim=-1)
        trial = ids.clone()
        draft_positions = lengths[:, None] + torch.arange(num_draft_positions)
        inside = draft_positions < trial.shape[1]
        trial[rows.expand_as(draft_positions)[inside], draft_positions[inside]] = proposal.tokens[inside]
        outputs = target(trial, output_hidden_states=True)
        logits = outputs.logits
        target_logits = []
        for draft_position in range(num_draft_positions + 1):
            index = (lengths + draft_position).clamp(max=trial.shape[1])
            raw = logits.gather(1, (index - 1)[:, None, None].expand(-1, 1, SIZE)).squeeze(1)
            target_logits.append(processor(prefixes(trial, index), raw))
        verdict = accept(proposal.tokens, proposal.full_logits(SIZE), torch.stack(target_logits, dim=1), verified)
        for draft_position in range(num_draft_positions):
            kept = (verdict.num_accepted > draft_position) & ~done
            ids[kept, lengths[kept] + draft_position] = proposal.tokens[kept, draft_position]
        live = ~done
        ids[live, lengths[live] + verdict.num_accepted[live]] = verdict.next_tokens[live]
        lengths = torch.where(live, lengths + verdict.num_accepted + 1, lengths)
    powers = torch.tensor([SIZE**2, SIZE, 1])
    return torch.bincount((ids[:, start : start + LENGTH] * powers).sum(-1), minlength=SIZE**LENGTH).double()


def each_by_default(names, thresholds, chosen):
    """Cases of every name and threshold; those that are not `chosen` are slow."""
    return [
        pytest.param(name, threshold, marks=[] if (name, threshold) in chosen else pytest.mark.slow)
        for name, threshold in itertools.product(names, thresholds)
    ]


@pytest.mark.parametrize(
    ("name", "threshold"),
    each_by_default(
        PROCESSORS,
        [0.0, 0.55],
        [*((name, 0.0) for name in PROCESSORS), ("top_p", 0.55), ("repetition_penalty", 0.55)],
    ),
)
def test_rows(name, threshold):
    target = soft_target()
    processors = PROCESSORS[name][1]
    counts = sampled_rows(target, soft_drafter(target), processors, threshold=threshold)
    assert p_value(counts, exact_distribution(target, processors)) > 0.001


@pytest.mark.parametrize("head", ["gated", "rnn", "none"])
def test_rows_of_other_heads(head):
    target = soft_target()
    fields = {"markov_rank": 0, "confidence_head_with_markov": False} if head == "none" else {"markov_head_type": head}
    counts = sampled_rows(target, soft_drafter(target, **fields), [], threshold=0.5)
    assert p_value(counts, exact_distribution(target, [])) > 0.001


def test_rows_of_a_reduced_vocabulary():
    """Drafts come from three of five tokens only; the others still appear with the right probability."""
    target = soft_target()
    drafter = soft_drafter(target, draft_token_ids=[0, 2, 4])
    counts = sampled_rows(target, drafter, [])
    assert p_value(counts, exact_distribution(target, [])) > 0.001


def _ignore_q(draft_tokens, draft_logits, target_logits, lengths):
    """Broken: pretends that drafts were drawn uniformly."""
    return accept_sampled(draft_tokens, torch.zeros_like(draft_logits), target_logits, lengths)


def _unprocessed_residual(draft_tokens, draft_logits, target_logits, lengths):
    """Broken: after a rejection draws from p and not from the residual."""
    verdict = accept_sampled(draft_tokens, draft_logits, target_logits, lengths)
    index = verdict.num_accepted[:, None, None].expand(-1, 1, target_logits.shape[-1])
    fresh = torch.multinomial(target_logits.gather(1, index).squeeze(1).softmax(-1), 1).squeeze(1)
    return Acceptance(verdict.num_accepted, fresh)


def _peeking_schedule(draft_tokens, draft_logits, target_logits, lengths):
    """Broken: whether a position is verified depends on the token drawn for it (Appendix A of the paper)."""
    return accept_sampled(draft_tokens, draft_logits, target_logits, ((draft_tokens != 0).int().cumprod(1)).sum(1))


@pytest.mark.parametrize("broken", [_ignore_q, _unprocessed_residual, _peeking_schedule])
def test_broken_acceptance_fails(broken):
    target = soft_target()
    counts = sampled_rows(target, soft_drafter(target), [], accept=broken)
    assert p_value(counts, exact_distribution(target, [])) < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_power(seed):
    """`NUM_ROWS` texts from a distribution with a total-variation error of 0.02 fail the test."""
    exact = exact_distribution(soft_target(), [])
    generator = torch.Generator().manual_seed(seed)
    direction = torch.rand(exact.shape, generator=generator, dtype=torch.float64) - 0.5
    direction = (direction - direction.mean()) * exact
    direction -= exact * direction.sum()
    wrong = exact + direction * (0.02 / (direction.abs().sum() / 2))
    assert float((wrong - exact).abs().sum() / 2) == pytest.approx(0.02)
    draws = torch.multinomial(wrong.clamp(min=0), NUM_ROWS, replacement=True, generator=generator)
    assert p_value(torch.bincount(draws, minlength=len(exact)).double(), exact) < 0.001


def last_token_target():
    """A target whose distribution depends on the last token only: attention adds nothing."""
    target = soft_target()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return target


@pytest.mark.parametrize(
    ("name", "threshold"),
    each_by_default(
        ["temperature", "top_k", "top_p", "min_p"],
        [None, 0.55],
        [("temperature", None), ("top_k", 0.55), ("top_p", None), ("min_p", 0.55)],
    ),
)
def test_generate(name, threshold):
    """Every token that `generate` draws, against the exact distribution after its predecessor."""
    target = last_token_target()
    arguments, processors = PROCESSORS[name]
    settings = {} if threshold is None else {"assistant_confidence_threshold": threshold}
    drafter = soft_drafter(target, max_position_embeddings=4096)
    counts = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    torch.manual_seed(99)
    for _ in range(12):
        output = target.generate(
            PROMPT,
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=230,
            eos_token_id=None,
            **({"top_k": 0} | arguments),
            **settings,
        )[0, 1:]
        counts += torch.bincount(output[:-1] * SIZE + output[1:], minlength=SIZE**2).view(SIZE, SIZE)
    with torch.no_grad():
        logits = target(torch.arange(SIZE)[:, None]).logits[:, -1].float()
    exact = LogitsProcessorList(processors)(torch.arange(SIZE)[:, None], logits).softmax(-1).double()
    assert sum(drafter.last_run.accepted) > 0
    for row in range(SIZE):
        if counts[row].sum() >= 50:
            assert p_value(counts[row], exact[row]) > 0.001 / SIZE


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [None, 0.55])
@pytest.mark.parametrize("name", PROCESSORS)
def test_generate_joint(name, threshold):
    """The three-token test through `generate`, 20,000 calls."""
    target = soft_target()
    arguments, processors = PROCESSORS[name]
    settings = {} if threshold is None else {"assistant_confidence_threshold": threshold}
    drafter = soft_drafter(target)
    counts = torch.zeros(SIZE**LENGTH, dtype=torch.float64)
    powers = torch.tensor([SIZE**2, SIZE, 1])
    torch.manual_seed(5)
    for _ in range(20_000):
        output = target.generate(
            PROMPT,
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=LENGTH,
            eos_token_id=None,
            **({"top_k": 0} | arguments),
            **settings,
        )
        counts[int((output[0, 2:] * powers).sum())] += 1
    assert p_value(counts, exact_distribution(target, processors)) > 0.001


def test_eos_inside_a_sampled_block():
    """The lengths of texts that end on a token are geometric, as plain sampling has them."""
    target = last_token_target()
    with torch.no_grad():
        logits = target(torch.arange(SIZE)[:, None]).logits[:, -1].float()
    step = logits.softmax(-1).double()
    drafter = soft_drafter(target)
    torch.manual_seed(3)
    longest, stop = 5, 2
    counts = torch.zeros(longest, dtype=torch.float64)
    for _ in range(800):
        output = target.generate(
            PROMPT, assistant_model=drafter, do_sample=True, max_new_tokens=longest, eos_token_id=stop, top_k=0
        )[0, 2:]
        assert stop not in output[:-1].tolist()
        counts[len(output) - 1] += 1
    alive = torch.zeros(SIZE, dtype=torch.float64)
    alive[PROMPT[0, -1]] = 1
    exact = torch.zeros(longest, dtype=torch.float64)
    for length in range(longest):
        alive = alive @ step
        exact[length] = alive[stop] if length < longest - 1 else alive.sum()
        alive[stop] = 0
    assert p_value(counts, exact) > 0.001


def test_accept_without_residual_mass():
    """p equals q up to rounding and a draft is rejected: the replacement comes from p, never NaN."""
    logits = torch.tensor([[[0.0, -1.0, 2.0]]])
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        target_logits = torch.cat([logits, logits], dim=1)
        draft = torch.tensor([[2]])
        verdict = accept_sampled(draft, logits + 1e-4, target_logits, torch.tensor([1]), generator=generator)
        assert 0 <= int(verdict.next_tokens) < 3


def test_accept_is_strict():
    """A token of zero target probability is never kept, not even when the random number is zero."""
    draft_logits = torch.zeros(1, 1, 3)
    target_logits = torch.tensor([[[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]]])
    real = torch.rand
    try:
        torch.rand = lambda *shape, **kwargs: torch.zeros(*shape)
        verdict = accept_sampled(torch.tensor([[1]]), draft_logits, target_logits, torch.tensor([1]))
    finally:
        torch.rand = real
    assert int(verdict.num_accepted) == 0
    assert int(verdict.next_tokens) != 1


def test_transformers_own_acceptance_is_left_alone():
    """Outside a DSpark call the wrapped function is Transformers' own."""
    from transformers.generation import utils

    wrapper = utils._speculative_sampling
    original = wrapper._dspark_original
    logits = torch.zeros(1, 1, 4)
    arguments = (torch.tensor([[0, 1]]), logits, 1, torch.zeros(1, 2, 4))
    extra = (False,) if "is_done_candidate" in original.__code__.co_varnames else ()
    torch.manual_seed(0)
    expected = original(*arguments, *extra)
    torch.manual_seed(0)
    output = wrapper(*arguments, *extra)
    assert output[0].tolist() == expected[0].tolist()
