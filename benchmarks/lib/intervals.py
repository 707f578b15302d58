"""Bootstrap intervals of ratios of speeds.

A resampled ratio is a ratio of sums over what was drawn, never a mean of ratios. Two methods that took turns are drawn
together, so that a disturbance that slowed both cancels. All intervals hold 95 % of 2,000 draws from a fixed seed.
"""

from collections.abc import Sequence

import torch


DRAWS = 2000
_TAILS = (0.025, 0.975)


def drawn(size: int, shape: Sequence[int], *, seed: int = 0) -> torch.Tensor:
    """Indices below `size`, with replacement: one set of `shape` per draw."""
    return torch.randint(size, (DRAWS, *shape), generator=torch.Generator().manual_seed(seed))


def edges(values: torch.Tensor, digits: int = 4) -> tuple[float, float]:
    """Lower and upper end of the interval of values `[DRAWS]`."""
    low, high = torch.quantile(values.double(), torch.tensor(_TAILS, dtype=torch.float64)).tolist()
    return round(low, digits), round(high, digits)


def speed_draws(
    tokens: Sequence[int], seconds: Sequence[Sequence[float]], *, prompts: torch.Tensor, repeats: torch.Tensor
) -> torch.Tensor:
    """Tokens per second `[DRAWS]` of a method, over resampled prompts and, in each, the median of resampled repeats.

    Args:
        tokens (`Sequence[int]`): New tokens of each prompt.
        seconds (`Sequence[Sequence[float]]`): Of each prompt's repeats, all prompts having as many.
        prompts (`torch.LongTensor` of shape `(DRAWS, P)`): The prompts that are drawn.
        repeats (`torch.LongTensor` of shape `(DRAWS, P, R)`): The repeats that are drawn for each of these.
    """
    table = torch.tensor(seconds, dtype=torch.float64)
    medians = torch.quantile(table[prompts[..., None], repeats], 0.5, dim=-1)
    return torch.tensor(tokens, dtype=torch.float64)[prompts].sum(dim=1) / medians.sum(dim=1)


__all__ = ["DRAWS", "drawn", "edges", "speed_draws"]
