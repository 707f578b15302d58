"""The losses and their gradients, chunk by chunk, against the formulas by autograd over whole logits; and their memory."""

import functools

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.builders import VOCAB, tiny_drafter, tiny_target
from training.data.blocks import make_blocks
from training.data.features import compute_features
from training.objective.distributions import TargetDistribution, bias_parameters, draft_logits
from training.objective.forward import forward_blocks
from training.objective.losses import (
    LossWeights,
    confidence_loss,
    linear_between,
    position_weights,
    weighted_position_loss,
)


ALL_TERMS = LossWeights(0.2, 0.7, 0.3)
REDUCED = list(range(3, 43, 2))


def naive_loss(logits, p, labels, weights, w):
    """The formulas as written, by autograd; `p` covers the draft vocabulary and may lack mass."""
    log_q = logits.float().log_softmax(-1)
    q = log_q.exp()
    ce = torch.stack([-row[label] if label >= 0 else row.sum() * 0 for row, label in zip(log_q, labels, strict=True)])
    soft = -(p * log_q).sum(-1)
    l1 = (q - p).abs().sum(-1) + 1 - p.sum(-1)
    return (weights * (w.ce * ce + w.kd * soft + w.l1 * l1)).sum(), l1


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("chunk_size", [3, 16, 1000])
@pytest.mark.parametrize(
    "weights", [LossWeights(0.1, 0.0, 0.9), LossWeights(1.0, 0.0, 0.0), ALL_TERMS, LossWeights(0, 0, 0)], ids=str
)
def test_loss_and_gradient_equal_the_naive_ones(weights, chunk_size, reduced):
    torch.manual_seed(3)
    hidden = (torch.randn(16, 12) * 2).requires_grad_()
    p = (torch.randn(16, 20 if reduced else 12) * 2).softmax(-1)[:, :12]
    labels = torch.randint(-1 if reduced else 0, 12, (16,))
    draft_position = torch.rand(16)
    total, terms = weighted_position_loss(
        hidden,
        None,
        draft_logits_of=lambda rows, _: rows,
        target_of=lambda part: p[part],
        labels=labels,
        weights=draft_position,
        loss_weights=weights,
        chunk_size=chunk_size,
    )
    (3 * total).backward()
    ours, hidden.grad = hidden.grad, None
    expected, l1 = naive_loss(hidden, p, labels, draft_position, weights)
    (3 * expected).backward()
    assert_close(total, expected.detach(), atol=1e-5, rtol=1e-5)
    assert_close(ours, hidden.grad, atol=1e-6, rtol=1e-5)
    assert_close(terms.l1, l1.detach(), atol=1e-5, rtol=1e-5)
    assert not terms.l1.requires_grad


class Step:
    """Blocks of two sequences through a tiny drafter, up to the loss."""

    def __init__(self, family="llama", *, reduced=False, head_bias=False, **fields):
        self.target = tiny_target(family)
        if head_bias:
            self.target.lm_head = with_bias(self.target.lm_head)
        self.target.requires_grad_(False)
        self.drafter = tiny_drafter(self.target, draft_token_ids=REDUCED if reduced else None, **fields).train()
        self.ids = torch.tensor(REDUCED) if reduced else torch.arange(VOCAB)
        self.binding = self.drafter.bind(self.target)
        self.input_ids = torch.randint(4, VOCAB, (2, 13))
        mask = torch.ones(2, 13, dtype=torch.bool)
        anchors = torch.tensor([[2, 4, 5, 9], [1, 2, 7, 11]])
        keep = torch.tensor([[True] * 4, [True, True, True, False]])
        self.blocks = make_blocks(
            self.input_ids, mask, anchors=anchors, keep=keep, block_size=self.drafter.config.block_size
        )
        self.features = compute_features(
            self.target, self.binding, self.input_ids, target_layer_ids=[0, 1, 2], needed=mask
        )
        to_draft = torch.full((VOCAB,), -1)
        to_draft[self.ids] = torch.arange(len(self.ids))
        self.labels = to_draft[self.blocks.labels[self.blocks.supervised]]
        self.weights = position_weights(4, 4.0).expand_as(self.blocks.labels)[self.blocks.supervised]
        rows = torch.arange(2)[:, None, None]
        self.positions = (rows * 13 + self.blocks.label_sources)[self.blocks.supervised]

    def outputs(self):
        return forward_blocks(
            self.drafter, self.binding, self.blocks, input_ids=self.input_ids, features=self.features.features
        )

    def ours(self, *, chunk_size=7, with_logsumexp=False):
        outputs = self.outputs()
        distribution = TargetDistribution(
            self.binding,
            self.features.last_hidden.flatten(0, 1),
            positions=self.positions,
            logsumexp=self.features.logsumexp.flatten() if with_logsumexp else None,
        )
        return weighted_position_loss(
            outputs.hidden,
            outputs.latent,
            draft_logits_of=functools.partial(draft_logits, self.drafter, self.binding),
            target_of=distribution.probabilities,
            labels=self.labels,
            weights=self.weights,
            loss_weights=ALL_TERMS,
            parameters=bias_parameters(self.drafter),
            chunk_size=chunk_size,
        )

    def naive(self):
        """Whole logits: the target's from its own forward, the drafter's from the LM head, the cap and `W2`."""
        outputs = self.outputs()
        with torch.no_grad():
            p = self.target(self.input_ids).logits.float().flatten(0, 1)[self.positions].softmax(-1)[:, self.ids]
        logits = self.target.lm_head(outputs.hidden)
        cap = getattr(self.target.config, "final_logit_softcapping", None)
        if cap:
            logits = cap * torch.tanh(logits / cap)
        logits = logits[:, self.ids]
        if outputs.latent is not None:
            logits = logits + outputs.latent @ self.drafter.markov_head.markov_w2.weight.T
        return naive_loss(logits, p, self.labels, self.weights, ALL_TERMS)

    def gradients(self, loss):
        self.drafter.zero_grad()
        loss.backward()
        return {name: one.grad for name, one in self.drafter.named_parameters() if one.grad is not None}


def with_bias(head):
    linear = torch.nn.Linear(head.in_features, head.out_features)
    linear.weight = head.weight
    torch.nn.init.normal_(linear.bias)
    return linear


CASES = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no_head": {"markov_rank": 0, "confidence_head_with_markov": False},
    "reduced": {"reduced": True},
    "reduced_rnn": {"reduced": True, "markov_head_type": "rnn"},
    "soft_cap": {"family": "gemma2", "final_logit_softcapping": 2.0},
    "soft_cap_reduced": {"family": "gemma2", "reduced": True, "markov_head_type": "gated"},
    "head_bias": {"head_bias": True},
    "head_bias_reduced": {"head_bias": True, "reduced": True},
}


@pytest.mark.parametrize("with_logsumexp", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_of_a_drafter_equal_those_over_whole_logits(case, with_logsumexp):
    """Every head, a reduced vocabulary, soft-capped logits and LM heads with a bias: to 1e-5 of the gradient's size."""
    case = dict(case)
    cap = case.pop("final_logit_softcapping", None)
    step = Step(**case)
    if cap:  # a cap that bends the logits
        step.target.config.final_logit_softcapping = step.binding.softcap = cap
        if with_logsumexp:
            mask = torch.ones_like(step.input_ids, dtype=torch.bool)
            step.features = compute_features(
                step.target, step.binding, step.input_ids, target_layer_ids=[0, 1, 2], needed=mask
            )
    total, terms = step.ours(with_logsumexp=with_logsumexp)
    ours = step.gradients(total)
    expected_total, l1 = step.naive()
    expected = step.gradients(expected_total)
    assert_close(total, expected_total, atol=1e-5, rtol=1e-5)
    assert_close(terms.l1, l1, atol=1e-5, rtol=1e-5)
    assert set(ours) == set(expected)
    assert ("markov_head.markov_w2.weight" in ours) == (step.drafter.markov_head is not None)
    for name, gradient in expected.items():
        assert_close(ours[name], gradient, atol=1e-5 * max(1.0, float(gradient.abs().max())), rtol=1e-5, msg=name)


def test_under_autocast_gradients_are_those_of_bf16():
    """Within what bf16 rounds; parameters keep fp32 gradients."""
    step = Step("llama", markov_head_type="rnn")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = step.ours()
    ours = step.gradients(total)
    exact = step.gradients(step.naive()[0])
    for name, gradient in exact.items():
        assert ours[name].dtype == torch.float32
        assert float((ours[name] - gradient).norm() / gradient.norm()) < 0.05, name


def test_frozen_parameters_get_no_gradient():
    step = Step()
    step.drafter.markov_head.requires_grad_(False)
    gradients = step.gradients(step.ours()[0])
    assert "fc.weight" in gradients
    assert not any(name.startswith("markov_head") for name in gradients)


def test_hooks_on_parameters_fire_once_a_backward():
    """What DDP relies on: the gradient of `W2` arrives through autograd, in `backward`."""
    step = Step()
    calls = []
    step.drafter.markov_head.markov_w2.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    total, _ = step.ours()
    assert calls == []
    total.backward()
    assert calls == [1]


def test_gradients_of_two_batches_add_up():
    step = Step()
    once = step.gradients(step.ours()[0])
    step.drafter.zero_grad()
    for _ in range(2):
        (0.5 * step.ours()[0]).backward()
    for name, parameter in step.drafter.named_parameters():
        if name in once:
            assert_close(parameter.grad, once[name], atol=1e-4, rtol=1e-5)


def test_evaluation_makes_no_gradient(monkeypatch):
    step = Step()
    expected, _ = step.ours()
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.no_grad():
        total, terms = step.ours()
    assert_close(total, expected.detach())
    assert not total.requires_grad
    assert torch.isfinite(terms.l1).all()


class RowsOfLogits(TorchDispatchMode):
    """The most rows of logits, or of anything else as wide as a vocabulary, that one operation makes."""

    def __init__(self, *widths):
        super().__init__()
        self.widths, self.most = widths, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            is_new = isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given
            if is_new and tensor.dim() > 1 and tensor.shape[-1] in self.widths:
                self.most = max(self.most, tensor.numel() // tensor.shape[-1])
        return result


@pytest.mark.parametrize("with_logsumexp", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_one_chunk_of_logits_is_the_largest_there_is(reduced, with_logsumexp):
    """Neither all target logits, nor all draft logits, nor all of their gradients: in forward and backward."""
    step = Step(reduced=reduced)
    outputs = step.outputs()
    step.outputs = lambda: outputs
    chunk = 8
    assert len(step.labels) > 2 * chunk
    with RowsOfLogits(VOCAB, len(step.ids)) as seen:
        total, _ = step.ours(chunk_size=chunk, with_logsumexp=with_logsumexp)
        total.backward()
    assert 0 < seen.most <= chunk
    with RowsOfLogits(VOCAB, len(step.ids)) as naive:
        step.naive()
    assert naive.most >= len(step.labels)


def test_nothing_as_wide_as_the_vocabulary_waits_for_backward():
    step = Step()
    outputs = step.outputs()
    step.outputs = lambda: outputs
    total, _ = step.ours()
    shapes = {tuple(tensor.shape) for tensor in total.grad_fn.saved_tensors}
    assert shapes == {outputs.hidden.shape, outputs.latent.shape, step.drafter.markov_head.markov_w2.weight.shape}


def test_no_supervised_position():
    """A loss of zero that can be differentiated, so that a process without a block takes part in the step."""
    hidden = torch.zeros(0, 5, requires_grad=True)
    weight = torch.randn(7, 3, requires_grad=True)
    total, terms = weighted_position_loss(
        hidden,
        torch.zeros(0, 3),
        draft_logits_of=None,
        target_of=None,
        labels=torch.zeros(0, dtype=torch.long),
        weights=torch.zeros(0),
        loss_weights=LossWeights(),
        parameters=[weight],
    )
    assert float(total.detach()) == 0.0
    assert terms.l1.shape == (0,)
    total.backward()
    assert float(weight.grad.abs().sum()) == 0.0


def test_confidence_target_is_detached():
    logits = torch.zeros(2, requires_grad=True)
    l1 = torch.tensor([0.0, 2.0], requires_grad=True)
    confidence_loss(logits, l1, torch.ones(2)).backward()
    assert l1.grad is None
    assert_close(logits.grad, torch.tensor([-0.5, 0.5]))


def test_weights_of_positions_and_terms():
    assert_close(position_weights(3, 4.0), torch.tensor([1.0, 0.7788008, 0.6065307]))
    assert position_weights(3, None).tolist() == [1, 1, 1]
    assert [linear_between(0, 2, f) for f in (-1, 0, 0.5, 1, 3)] == [0, 0, 1, 2, 2]
    with pytest.raises(ValueError, match="decay"):
        LossWeights(decay=0)
    with pytest.raises(ValueError, match=">= 0"):
        LossWeights(ce=-1)
    with pytest.raises(ValueError, match="finite"):
        LossWeights(l1=float("nan"))
