"""What a drafter's confidence head sees in verified rounds, and what came of it: recorded to a file, prompt by prompt.

A record has `prompt` (its line number, from 0), `prompt_sha256` (of its token ids), `outcomes` (0 or 1 for each position whose
predecessors were accepted) and `inputs` (`[n, F]` in fp16, as base64). Nothing is fitted here.

Shapes: `n` positions, `R` rows, `K` positions of a block, `D` hidden size, `r` Markov rank, `F` inputs of the head.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, set_seed

from modeling_dspark import DSparkModel, EngineObserver, RunStatistics
from modeling_dspark.draft_tokens import DraftBlock
from modeling_dspark.engine_round import ScheduledDrafts
from training.common.records import RecordFile
from training.confidence.rounds import Prompt, judged, make_engine, record


Positions = tuple[torch.Tensor, torch.Tensor]


class Recorder(EngineObserver):
    """Inputs of the confidence head and outcomes, of the positions whose predecessors were accepted, by answer.

    The engine that it observes verifies every block at full length.

    Args:
        drafter ([`DSparkModel`]): The drafter.
    """

    def __init__(self, drafter: DSparkModel):
        self._drafter = drafter
        self._block: DraftBlock | None = None  # of this round
        self._positions: dict[
            int, list[Positions]
        ] = {}  # by the identity of an answer's statistics, which outlive this entry

    def take(self, statistics: RunStatistics) -> Positions:
        """Inputs `[n, F]` in fp16 and outcomes `[n]` of an answer, once."""
        width = self._drafter.confidence_head.proj.in_features  # type: ignore[union-attr]  # who records has one
        none = torch.empty(0, width, dtype=torch.half), torch.empty(0, dtype=torch.bool)
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
            verified, accepted = judged(
                verified=statistics.verified[-1],
                accepted=statistics.accepted[-1],
                new_tokens=statistics.new_tokens[-1],
            )
            reached = min(accepted + 1, verified)
            positions = inputs[row, :reached].half().cpu(), torch.arange(reached) < accepted
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
    path: Path,
    settings: dict[str, Any],
    prompts: Sequence[Prompt],
    *,
    drafter: DSparkModel,
    target: PreTrainedModel,
    batch_size: int,
    seed: int,
) -> Positions:
    """Record the prompts that are not in the file yet; inputs `[n, F]` and outcomes `[n]` of all, in their order.

    Args:
        path (`Path`): The file; its folder exists.
        settings (`dict`): Of `recording_settings`. Prompts are compared one by one, so that more may follow.
        prompts (`Sequence[Prompt]`): What to answer.
        drafter ([`DSparkModel`]): A drafter with a confidence head.
        target ([`~transformers.PreTrainedModel`]): Its target.
        batch_size (`int`): Prompts answered at once.
        seed (`int`): Of the answers when sampling.

    Raises:
        ValueError: if the file was made with other settings (names them) or prompts, or no block was verified.
    """
    settings = {name: value for name, value in settings.items() if name != "prompts_sha256"}
    file = RecordFile(path, settings, ("prompt_sha256", "outcomes", "inputs"))
    _check_prompts(file, path, prompts)
    pending = {prompt.index: prompt for prompt in prompts if prompt.index not in file.records}
    set_seed((seed * 1_000_003 + len(pending)) % 2**32)  # a resumed run draws other answers than it drew before
    recorder = Recorder(drafter)
    engine = make_engine(drafter, target, settings["temperature"], observer=recorder)
    sizes = {"max_new_tokens": settings["max_new_tokens"], "batch_size": batch_size}
    with file, tqdm(total=len(prompts), unit="prompt", desc="rounds") as bar:
        bar.update(len(prompts) - len(pending))
        for index, statistics in record(engine, list(pending.values()), device=target.device, **sizes):
            inputs, outcomes = recorder.take(statistics)
            content = base64.b64encode(inputs.numpy().tobytes()).decode()
            fields = {"prompt": index, "prompt_sha256": _digest(pending[index])}
            file.add(fields | {"outcomes": outcomes.int().tolist(), "inputs": content})
            bar.update()
    positions = [
        _positions_of(file.records[prompt.index]) for prompt in prompts if file.records[prompt.index]["outcomes"]
    ]
    if not positions:
        raise ValueError(
            f"No block was verified in answers of {settings['max_new_tokens']} tokens; choose a larger `max_new_tokens`, and "
            "another `output`."
        )
    return torch.cat([inputs for inputs, _ in positions]), torch.cat([outcomes for _, outcomes in positions])


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(str(prompt.input_ids).encode()).hexdigest()[:16]


def _check_prompts(file: RecordFile, path: Path, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        kept = file.records.get(prompt.index)
        if kept is not None and kept["prompt_sha256"] != _digest(prompt):
            raise ValueError(
                f"`prompts`: line {prompt.index + 1} is another prompt than the one recorded in `{path}`. Go on with the same "
                "prompts (more may follow them), choose another `output`, or remove that file."
            )


def _positions_of(record: dict[str, Any]) -> Positions:
    outcomes = torch.tensor(record["outcomes"], dtype=torch.bool)
    inputs = torch.frombuffer(bytearray(base64.b64decode(record["inputs"])), dtype=torch.half)
    return inputs.reshape(len(outcomes), -1).float(), outcomes


__all__ = ["Recorder", "head_inputs", "record_positions"]
