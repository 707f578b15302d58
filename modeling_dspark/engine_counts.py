"""Counts of one `generate` call or one request, kept on the host."""

from dataclasses import dataclass, field

from .compat_renamed import renamed


_LISTS = ("drafted", "verified", "accepted", "new_tokens", "plain")


@dataclass
class RunStatistics:
    """Counts of the rounds of one request, or of all requests of a call; the prefill does not count as a round.

    A round of a request is one target forward that it took part in; every list has one entry per round.

    Attributes:
        block_size (`int`): Draft positions of the drafter.
        drafted (`list[int]`): Draft tokens made.
        verified (`list[int]`): Draft tokens the target verified.
        accepted (`list[int]`): Draft tokens kept.
        new_tokens (`list[int]`): Tokens produced, bonus and replacement tokens included.
        plain (`list[bool]`): Whether the request decoded plainly although it could have drafted.
        confidence_logits (`list[list[float]]`): Raw logits of the confidence head, if recorded.
        requests (`list[RunStatistics]`): The same per request, in the order of the batch.
    """

    block_size: int
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    plain: list[bool] = field(default_factory=list)
    confidence_logits: list[list[float]] = field(default_factory=list)
    requests: list["RunStatistics"] = field(default_factory=list)

    @classmethod
    def pooled(cls, block_size: int, requests: list["RunStatistics"]) -> "RunStatistics":
        """The rounds of several requests in one."""
        run = cls(block_size, requests=list(requests))
        for request in requests:
            run.extend(request)
        return run

    @property
    def rounds(self) -> int:
        """Rounds after the prefill, summed over requests."""
        return len(self.new_tokens)

    @property
    def plain_rounds(self) -> int:
        """Rounds without drafts that could have had some."""
        return sum(self.plain)

    @property
    def acceptance_length(self) -> float:
        """Tokens per round (tau), pooled over rounds, bonus tokens included."""
        return sum(self.new_tokens) / self.rounds if self.rounds else 0.0

    @property
    def mean_verified_tokens(self) -> float:
        """Mean number of draft tokens verified per round."""
        return sum(self.verified) / self.rounds if self.rounds else 0.0

    @property
    def drafted_by_position(self) -> list[int]:
        """Draft tokens made at each position."""
        return self._reaching(self.drafted)

    @property
    def verified_by_position(self) -> list[int]:
        """Draft tokens verified at each position."""
        return self._reaching(self.verified)

    @property
    def accepted_by_position(self) -> list[int]:
        """Draft tokens kept at each position."""
        return self._reaching(self.accepted)

    @property
    def tried_by_position(self) -> list[int]:
        """Rounds in which the position was verified and all positions before it were kept."""
        rounds = list(zip(self.verified, self.accepted, strict=True))
        return [sum(v > position and a >= position for v, a in rounds) for position in range(self.block_size)]

    @property
    def acceptance_rate_by_position(self) -> list[float]:
        """Conditional acceptance at each position (0 where it was never tried)."""
        pairs = zip(self.accepted_by_position, self.tried_by_position, strict=True)
        return [kept / tried if tried else 0.0 for kept, tried in pairs]

    accepted_length = renamed("accepted_length", "acceptance_length")
    acceptance_by_position = renamed("acceptance_by_position", "acceptance_rate_by_position")
    verification_budget = renamed("verification_budget", "mean_verified_tokens")
    parked = renamed("parked", "plain")
    parked_rounds = renamed("parked_rounds", "plain_rounds")

    def add_round(self, *, drafted: int, verified: int, accepted: int, new_tokens: int, plain: bool = False) -> None:
        """Count one round."""
        for name, value in zip(_LISTS, (drafted, verified, accepted, new_tokens, plain), strict=True):
            getattr(self, name).append(value)

    def extend(self, other: "RunStatistics") -> None:
        """Pool the rounds of another call into this one."""
        for name in (*_LISTS, "confidence_logits"):
            getattr(self, name).extend(getattr(other, name))

    def _reaching(self, counts: list[int]) -> list[int]:
        return [sum(count > position for count in counts) for position in range(self.block_size)]


__all__ = ["RunStatistics"]
