"""Record the inputs of a drafter's confidence head in verified rounds, and whether each draft was accepted.

Nothing is fitted here.

Shapes: `n` positions, `R` rows, `K` positions of a block, `D` hidden size, `r` Markov rank, `F` inputs of the head.
"""

from collections.abc import Sequence

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, set_seed

from modeling_dspark import DSparkModel, EngineObserver, RunStatistics
from modeling_dspark.draft_tokens import DraftBlock
from modeling_dspark.engine_round import ScheduledDrafts
from training.confidence.rounds import Prompt, batch_seed, make_engine, record, without_tail


Positions = tuple[torch.Tensor, torch.Tensor]


class Recorder(EngineObserver):
    """Inputs of the confidence head and outcomes at the positions whose predecessors were accepted, by answer.

    The engine that it observes verifies every block at full length.

    Args:
        drafter ([`DSparkModel`]): The drafter.
    """

    def __init__(self, drafter: DSparkModel):
        self._drafter = drafter
        self._block: DraftBlock | None = None  # of this round
        # By the identity of an answer's statistics, which outlive the entry.
        self._positions: dict[int, list[Positions]] = {}

    def take(self, statistics: RunStatistics) -> Positions:
        """Inputs `[n, F]` and outcomes `[n]` of a finished answer, which is then forgotten."""
        width = self._drafter.confidence_head.proj.in_features  # type: ignore[union-attr]  # checked when it was loaded
        none = torch.empty(0, width), torch.empty(0, dtype=torch.bool)
        inputs, outcomes = zip(none, *self._positions.pop(id(statistics), []), strict=True)
        return torch.cat(inputs), torch.cat(outcomes)

    def scored(self, block: DraftBlock) -> None:
        """Keep what the heads read until the outcome is known."""
        self._block = block

    def settled(self, drafts: ScheduledDrafts) -> None:
        """Record the positions of a round that drafted."""
        block, self._block = self._block, None
        if block is None or drafts.proposal is None:
            return
        inputs = head_inputs(self._drafter, block.hidden_states, drafts.proposal.tokens, block.anchors)
        for row, request in enumerate(drafts.drafting):
            statistics = request.statistics
            verified, accepted = without_tail(
                verified=statistics.verified[-1],
                accepted=statistics.accepted[-1],
                new_tokens=statistics.new_tokens[-1],
            )
            reached = min(accepted + 1, verified)
            positions = inputs[row, :reached].float().cpu(), torch.arange(reached) < accepted
            self._positions.setdefault(id(statistics), []).append(positions)


def head_inputs(
    drafter: DSparkModel, hidden: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """What the confidence head sees at each position: `[R, K, D]`, `[R, K]`, `[R]` to `[R, K, D (+ r)]`."""
    if not drafter.config.confidence_head_with_markov:
        return hidden
    previous = torch.cat([anchors[:, None].to(tokens.device), tokens[:, :-1]], dim=1)
    embedded = drafter.markov_head.embed(previous)  # type: ignore[union-attr]  # the config demands one
    return torch.cat([hidden, embedded.to(hidden.dtype)], dim=-1)


def record_positions(
    prompts: Sequence[Prompt],
    *,
    drafter: DSparkModel,
    target: PreTrainedModel,
    max_new_tokens: int,
    batch_size: int,
    temperature: float,
    seed: int,
) -> list[Positions]:
    """Answer the prompts; inputs `[n, F]` and outcomes `[n]` of each answer that had a verified draft, in their order.

    Args:
        prompts (`Sequence[Prompt]`): What to answer.
        drafter ([`DSparkModel`]): A drafter with a confidence head.
        target ([`~transformers.PreTrainedModel`]): Its target.
        max_new_tokens (`int`): Longest answer.
        batch_size (`int`): Prompts answered at once.
        temperature (`float`): Of the answers; 0 is greedy.
        seed (`int`): Of the answers when sampling.

    Raises:
        ValueError: if no draft was verified.
    """
    set_seed(batch_seed(seed, len(prompts)))
    recorder = Recorder(drafter)
    engine = make_engine(drafter, target, temperature, observer=recorder)
    finished = record(engine, prompts, device=target.device, max_new_tokens=max_new_tokens, batch_size=batch_size)
    progress = tqdm(finished, total=len(prompts), unit="prompt", desc="rounds")
    by_prompt = {index: recorder.take(statistics) for index, statistics in progress}
    answers = [by_prompt[prompt.index] for prompt in prompts if len(by_prompt[prompt.index][1])]
    if not answers:
        raise ValueError(
            f"No draft was verified in answers of {max_new_tokens} tokens; choose a larger `max_new_tokens`."
        )
    return answers


__all__ = ["Positions", "Recorder", "head_inputs", "record_positions"]
