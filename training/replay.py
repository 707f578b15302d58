"""Accepted length without a decoding loop: drafts at every token of the target's own greedy answers, walked as rounds.

Greedy decoding keeps a draft token exactly if it is the token that the target's text goes on with. So the rounds of an
answer follow from the text alone: from each anchor, as many drafts as agree are kept, one token comes from the target,
and that is the next anchor. One forward gives the drafts at all anchors, for any drafter that trains here.

Shapes: `N` blocks, `K` slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from modeling_dspark import DSparkModel
from modeling_dspark.drafting_dspark import argmax
from modeling_dspark.target_dspark import TargetBinding
from training.blocks import make_blocks
from training.data import Conversation
from training.features import compute_features
from training.forward import forward_blocks


@dataclass
class ReplayedRounds:
    """Counts over rounds.

    Attributes:
        accepted (`list[int]`): Draft tokens kept, of each round.
        offered (`list[int]`): Draft tokens that the text had room for, of each round.
        new_tokens (`list[int]`): Tokens that each round made: the kept ones and, unless the text ended, one more.
    """

    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        """Tokens a round, the target's own one counted, pooled over rounds (tau)."""
        return sum(self.new_tokens) / max(len(self.new_tokens), 1)

    def conditional_acceptance(self, num_slots: int) -> list[float]:
        """For each slot: of the rounds that kept all drafts before it, and had room for it, the share that kept it."""
        shares = []
        for slot in range(num_slots):
            reached = [kept for kept, room in zip(self.accepted, self.offered, strict=True) if kept >= slot < room]
            shares.append(sum(kept > slot for kept in reached) / len(reached) if reached else float("nan"))
        return shares


@torch.no_grad()
def kept_at_every_anchor(
    drafter: DSparkModel,
    target: PreTrainedModel,
    binding: TargetBinding,
    conversation: Conversation,
    *,
    blocks_at_once: int = 64,
) -> torch.Tensor:
    """Drafts that greedy decoding keeps `[N]`, at each token of the answer but the last."""
    ids = torch.tensor(conversation.input_ids, device=target.device)[None]
    response = conversation.response_mask[None].to(target.device)
    layer_ids: list[int] = drafter.config.target_layer_ids  # type: ignore[assignment]  # filled in by the config
    needed = torch.zeros_like(response)
    target_features = compute_features(target, binding, ids, target_layer_ids=layer_ids, needed=needed)
    kept = []
    anchors = torch.arange(conversation.response_start, len(conversation.input_ids) - 1, device=target.device)
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
    return torch.cat(kept) if kept else anchors


def replay(
    drafter: DSparkModel, target: PreTrainedModel, conversations: Iterable[Conversation], *, progress: bool = False
) -> ReplayedRounds:
    """Rounds of greedy decoding over answers that the target gave greedily.

    Args:
        drafter ([`DSparkModel`]): Of any kind that trains here.
        target ([`~transformers.PreTrainedModel`]): The target that gave the answers.
        conversations (`Iterable[Conversation]`): Prompts with greedy answers, not cut.
        progress (`bool`, *optional*, defaults to `False`): Show a progress bar.
    """
    binding, rounds = drafter.bind(target), ReplayedRounds()
    for conversation in tqdm(conversations, desc="replay", unit="answer", disable=not progress):
        kept = kept_at_every_anchor(drafter, target, binding, conversation).tolist()
        place = 0
        while place < len(kept):
            room = min(drafter.config.block_size, len(kept) - place)
            rounds.accepted.append(kept[place])
            rounds.offered.append(room)
            rounds.new_tokens.append(min(kept[place] + 1, len(kept) - place))
            place += kept[place] + 1
    return rounds


__all__ = ["ReplayedRounds", "kept_at_every_anchor", "replay"]
