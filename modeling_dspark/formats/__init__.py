"""Checkpoints of other projects, read as this project's. Not shipped: a published drafter has this project's format.

`table` has the formats as data, `tensors` reads weight files, `translate` makes our configuration, `load` refuses what does
not fit.
"""

from .load import foreign_arguments


__all__ = ["foreign_arguments"]
