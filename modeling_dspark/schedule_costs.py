"""The cost of a round on this machine, for one target and drafter: a small table with interpolation, stored as JSON.

`T(round) = T_draft(n) + s * T_position(n) + T_verify(B) + T_accept(B)`, for `n` rows that draft `s` positions and `B` verified
tokens. `engine_measure` measures it.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .compat_renamed import renamed


_FORMAT = "dspark-cost-profile"
_VERSION = 1


@dataclass(frozen=True)
class Curve:
    """Seconds at some counts: never falling, linear between points and beyond the last, constant before the first.

    Args:
        counts (`list[int]`): Strictly increasing.
        seconds (`list[float]`): Positive, never falling (see `smoothed`).

    Raises:
        ValueError: if the points do not satisfy this.
    """

    counts: list[int]
    seconds: list[float]

    def __post_init__(self) -> None:
        values: list[Any] = [*self.counts, *self.seconds]
        if not all(isinstance(value, (int, float)) for value in values):
            raise ValueError(
                f"The counts and seconds of a cost curve must be numbers, got {self.counts} and {self.seconds}."
            )
        rising = all(left < right for left, right in zip(self.counts, self.counts[1:], strict=False))
        falling = any(left > right for left, right in zip(self.seconds, self.seconds[1:], strict=False))
        if not 0 < len(self.counts) == len(self.seconds) or not rising or falling:
            raise ValueError(f"A cost curve needs rising counts and seconds, got {self.counts} and {self.seconds}.")
        if not all(0 < float(value) < float("inf") for value in self.seconds):
            raise ValueError(f"The seconds of a cost curve must be positive numbers, got {self.seconds}.")

    @classmethod
    def smoothed(cls, counts: Sequence[int], seconds: Sequence[float]) -> "Curve":
        """Isotonic regression (pool adjacent violators) of noisy points."""
        blocks: list[list[float]] = []  # [mean, weight]
        for value in seconds:
            blocks.append([value, 1])
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (mean, weight), (last, last_weight) = blocks[-2], blocks.pop()
                blocks[-1] = [(mean * weight + last * last_weight) / (weight + last_weight), weight + last_weight]
        return cls(list(counts), [mean for mean, weight in blocks for _ in range(int(weight))])

    @classmethod
    def local(cls, counts: Sequence[int], seconds: Sequence[float]) -> "Curve":
        """Noisy points, each replaced by a line fitted to its neighbourhood (two points to each side), then made to rise.

        A schedule that admits drafts while they pay stops at any bump, so noise must be smoothed away.
        """
        fitted = []
        for index, count in enumerate(counts):
            near = range(max(index - 2, 0), min(index + 3, len(counts)))
            weights = [3 - abs(index - n) for n in near]
            fitted.append(_line([counts[n] for n in near], [seconds[n] for n in near], weights, at=count))
        return cls.smoothed(counts, fitted)

    def __call__(self, count: float) -> float:
        """Seconds at `count`."""
        counts, seconds = self.counts, self.seconds
        if count <= counts[0] or len(counts) == 1:
            return seconds[0]
        right = min(bisect_right(counts, count), len(counts) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (counts[right] - counts[left])
        return seconds[left] + slope * (count - counts[left])


@dataclass(frozen=True)
class CostProfile:
    """Measured costs of one target and drafter on one machine.

    Attributes:
        verify ([`Curve`]): Seconds of a target forward over `B` packed tokens with an empty context.
        seconds_per_context (`float`): Additional seconds per token of context that is read.
        draft ([`Curve`]): Seconds of the backbone for `n` rows, greedy.
        draft_sampled ([`Curve`]): The same with sampling.
        position ([`Curve`]): Seconds of one position through LM head and heads for `n` rows, greedy.
        position_sampled ([`Curve`]): The same with sampling.
        accept ([`Curve`]): Seconds of the rest of a round that verifies `B` tokens, greedy.
        accept_sampled ([`Curve`]): The same with sampling.
        key (`dict`): Conditions of the measurement: device, dtype, attention, models, versions.
        processing (`dict[str, float]`): Seconds that sets of logits processors take for a row of logits, by their names.
        seconds_per_logits (`float`): Seconds of the processors of one call for a row of logits.
    """

    verify: Curve
    seconds_per_context: float
    draft: Curve
    draft_sampled: Curve
    position: Curve
    position_sampled: Curve
    accept: Curve
    accept_sampled: Curve
    key: dict[str, Any] = field(default_factory=dict)
    processing: dict[str, float] = field(default_factory=dict)
    seconds_per_logits: float = 0.0

    slot = renamed("slot", "position")
    slot_sampled = renamed("slot_sampled", "position_sampled")

    @property
    def is_flat(self) -> bool:
        """Whether a token costs nothing, in which case every draft seems worthwhile."""
        return self.verify.seconds[0] == self.verify.seconds[-1]

    def round_seconds(
        self,
        num_tokens: float,
        *,
        num_drafting: int,
        num_draft_positions: int = 1,
        context: int = 0,
        do_sample: bool = False,
    ) -> float:
        """Cost of one round.

        Args:
            num_tokens (`int`): Tokens the target verifies, anchors of all rows included (`B`).
            num_drafting (`int`): Rows that draft; 0 is a plain step.
            num_draft_positions (`int`, *optional*, defaults to `1`): Positions each of them drafts.
            context (`int`, *optional*, defaults to `0`): Context tokens read by attention, over all rows.
            do_sample (`bool`, *optional*, defaults to `False`): Whether tokens are drawn.
        """
        draft, position, accept = (
            (self.draft_sampled, self.position_sampled, self.accept_sampled)
            if do_sample
            else (self.draft, self.position, self.accept)
        )
        drafting = draft(num_drafting) + num_draft_positions * position(num_drafting) if num_drafting else 0.0
        processing = self.seconds_per_logits * (num_tokens + num_drafting * num_draft_positions)
        return (
            drafting + self.verify(num_tokens) + accept(num_tokens) + self.seconds_per_context * context + processing
        )

    def of_round(self, *, context: int, do_sample: bool) -> Callable[[float, int, int], float]:
        """`round_seconds` of verified tokens, drafting rows and draft positions, with the rest of a round fixed."""

        def seconds(num_tokens: float, num_drafting: int, num_draft_positions: int) -> float:
            return self.round_seconds(
                num_tokens,
                num_drafting=num_drafting,
                num_draft_positions=num_draft_positions,
                context=context,
                do_sample=do_sample,
            )

        return seconds

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f"{path.suffix}.partial")
        partial.write_text(json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=2) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "CostProfile":
        """Read a profile in this project's JSON or in SGLang's (`sample_batch_tokens`, `sample_steps_per_sec`).

        Raises:
            ValueError: if the file has another format; names the file and the problem.
        """
        try:
            fields = json.loads(Path(path).read_text())
            profile = cls._from_sglang(fields) if "sample_batch_tokens" in fields else cls._from_own(fields)
            processing: list[Any] = [*profile.processing.values(), profile.seconds_per_logits]
            if not all(isinstance(value, (int, float)) and 0 <= value < float("inf") for value in processing):
                raise ValueError(
                    f"`processing` is {profile.processing}, `seconds_per_logits` {profile.seconds_per_logits}"
                )
            if len(profile.verify.counts) < 2:
                raise ValueError("`verify` has one point, so the cost of a token is unknown")
            if not 0 <= profile.seconds_per_context < float("inf"):
                raise ValueError(f"`seconds_per_context` is {profile.seconds_per_context}")
            return profile
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path} is not a cost profile that can be used: {error!r}.") from error

    def to_sglang(self, block_size: int) -> dict[str, Any]:
        """SGLang's fields, for greedy rounds in which all rows draft and verify whole blocks."""
        counts = self.verify.counts
        seconds = [
            self.round_seconds(count, num_drafting=max(count // (block_size + 1), 1), num_draft_positions=block_size)
            for count in counts
        ]
        return {
            "sample_batch_tokens": list(counts),
            "sample_steps_per_sec": [1.0 / value for value in seconds],
            "max_batch_tokens": counts[-1],
        }

    @classmethod
    def _from_own(cls, fields: dict[str, Any]) -> "CostProfile":
        if fields.pop("format") != _FORMAT or fields.pop("version") != _VERSION:
            raise ValueError("another format or version")
        fields = {_RENAMED.get(name, name): value for name, value in fields.items()}
        values: dict[str, Any] = {n: Curve(**v) if n in _CURVES else v for n, v in fields.items()}
        return cls(**values)

    @classmethod
    def _from_sglang(cls, fields: dict[str, Any]) -> "CostProfile":
        """SGLang measures whole steps, so `verify` includes drafting and the rest, which cost almost nothing here."""
        steps = fields["sample_steps_per_sec"]
        if len(steps) != len(fields["sample_batch_tokens"]) or not all(rate > 0 for rate in steps):
            raise ValueError("`sample_steps_per_sec` must be as many positive numbers as `sample_batch_tokens`")
        verify = Curve.smoothed(fields["sample_batch_tokens"], [1.0 / rate for rate in steps])
        nothing = Curve([1], [1e-9])
        free: dict[str, Any] = {name: nothing for name in _CURVES if name != "verify"}
        return cls(verify=verify, seconds_per_context=0.0, key={"source": "sglang"}, **free)


def _line(x: Sequence[float], y: Sequence[float], weights: Sequence[float], *, at: float) -> float:
    """Weighted least squares: the value at `at` of the line through points."""
    total = sum(weights)
    mean_x = sum(w * value for w, value in zip(weights, x, strict=True)) / total
    mean_y = sum(w * value for w, value in zip(weights, y, strict=True)) / total
    spread = sum(w * (value - mean_x) ** 2 for w, value in zip(weights, x, strict=True))
    if spread == 0:
        return mean_y
    slope = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True)) / spread
    return mean_y + slope * (at - mean_x)


_RENAMED = {"slot": "position", "slot_sampled": "position_sampled"}  # in files of version 0.1
_CURVES = ("verify", "draft", "draft_sampled", "position", "position_sampled", "accept", "accept_sampled")

__all__ = ["CostProfile", "Curve"]
