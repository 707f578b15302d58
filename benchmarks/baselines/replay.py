"""Acceptance length without a decoding loop: drafts at every token of the target's own greedy answers, walked as rounds.

Greedy decoding accepts a draft token exactly if it is the next token of the target's text. So the rounds of an answer
follow from the text alone: from each anchor, the drafts that agree are accepted, the target adds one token, and that is
the next anchor. One forward gives the drafts at all anchors, for any drafter that trains here.

Shapes: `N` blocks, `K` positions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.generation import PromptLookupCandidateGenerator

from modeling_dspark import DSparkModel, RunStatistics
from modeling_dspark.draft_tokens import argmax
from modeling_dspark.target_binding import TargetBinding
from training.data.blocks import make_blocks
from training.data.conversations import Conversation
from training.data.features import compute_features
from training.objective.forward import forward_blocks


@torch.no_grad()
def kept_at_every_anchor(
    drafter: DSparkModel,
    target: PreTrainedModel,
    binding: TargetBinding,
    conversation: Conversation,
    *,
    blocks_at_once: int = 64,
) -> torch.Tensor:
    """Drafts that greedy decoding accepts `[N]`, at each token of the answer but the last."""
    num_anchors = max(len(conversation.input_ids) - conversation.response_start - 1, 0)
    anchors = conversation.response_start + torch.arange(num_anchors, device=target.device)
    if not num_anchors:  # an answer of one token, which comes from the prefill
        return anchors
    ids = torch.tensor(conversation.input_ids, device=target.device)[None]
    response = conversation.response_mask[None].to(target.device)
    layer_ids: list[int] = drafter.config.target_layer_ids  # type: ignore[assignment]  # filled in by the config
    needed = torch.zeros_like(response)
    target_features = compute_features(target, binding, ids, target_layer_ids=layer_ids, needed=needed)
    kept = []
    for part in anchors.split(blocks_at_once):
        blocks = make_blocks(
            ids, response, anchors=part[None], keep=torch.ones_like(part[None], dtype=torch.bool),
            block_size=drafter.config.block_size,
        )  # fmt: skip
        outputs = forward_blocks(drafter, binding, blocks, input_ids=ids, features=target_features.features)
        logits = binding.draft_logits(outputs.hidden)
        if outputs.latent is not None:
            logits = logits + drafter.markov_head.bias(outputs.latent)  # type: ignore[union-attr]  # made the latent
        agrees = torch.zeros_like(blocks.supervised)
        agrees[blocks.supervised] = drafter.to_target_ids(argmax(logits)) == blocks.labels[blocks.supervised]
        kept.append(agrees[0].int().cumprod(dim=-1).sum(dim=-1))
    return torch.cat(kept)


def replay(
    drafter: DSparkModel, target: PreTrainedModel, conversations: Iterable[Conversation], *, progress: bool = False
) -> RunStatistics:
    """Rounds of greedy decoding over the target's greedy answers; `requests` has them by answer.

    Args:
        drafter ([`DSparkModel`]): A drafter of any kind that trains here.
        target ([`~transformers.PreTrainedModel`]): The target of the answers.
        conversations (`Iterable[Conversation]`): Prompts with greedy answers, not cut.
        progress (`bool`, *optional*, defaults to `False`): Show a progress bar.
    """
    binding, block_size = drafter.bind(target), drafter.config.block_size
    answers = []
    for conversation in tqdm(conversations, desc="replay", unit="answer", disable=not progress):
        kept = kept_at_every_anchor(drafter, target, binding, conversation).tolist()

        def kept_at(place: int, kept: list[int] = kept) -> tuple[int, int]:
            return block_size, kept[place]

        answers.append(_walk(len(kept), block_size, kept_at))
    return RunStatistics.pooled(block_size, answers)


def replay_prompt_lookup(
    conversations: Iterable[Conversation], *, num_tokens: int, max_matching_ngram_size: int = 2
) -> RunStatistics:
    """The same rounds with drafts of Transformers' prompt lookup, which needs no training.

    Args:
        conversations (`Iterable[Conversation]`): Prompts with greedy answers, not cut.
        num_tokens (`int`): Maximum drafts per round.
        max_matching_ngram_size (`int`, *optional*, defaults to 2): Maximum length of the n-gram that has to match.
    """
    lookup = PromptLookupCandidateGenerator(
        num_output_tokens=num_tokens, max_matching_ngram_size=max_matching_ngram_size, max_length=2**31
    )
    answers = []
    for conversation in conversations:
        ids, start = torch.tensor(conversation.input_ids), conversation.response_start

        def found_at(place: int, ids: torch.Tensor = ids, start: int = start) -> tuple[int, int]:
            end = start + place + 1
            so_far: Any = ids[None, :end]
            drafts = lookup.get_candidates(so_far)[0][0, end:]
            agrees = drafts[: len(ids) - end] == ids[end : end + len(drafts)]
            return len(drafts), int(agrees.int().cumprod(0).sum())

        answers.append(_walk(len(ids) - start - 1, num_tokens, found_at))
    return RunStatistics.pooled(num_tokens, answers)


def _walk(num_tokens: int, block_size: int, drafts_at: Callable[[int], tuple[int, int]]) -> RunStatistics:
    """Rounds after the first token of an answer: `num_tokens` follow it; `drafts_at` gives drafts made and accepted."""
    rounds, place = RunStatistics(block_size), 0
    while place < num_tokens:
        left = num_tokens - place
        drafted, accepted = drafts_at(place)
        new_tokens = min(accepted + 1, left)
        verified = min(drafted, left)  # the text has no room for more
        rounds.add_round(drafted=drafted, verified=verified, accepted=accepted, new_tokens=new_tokens)
        place += new_tokens
    return rounds


__all__ = ["kept_at_every_anchor", "replay", "replay_prompt_lookup"]
