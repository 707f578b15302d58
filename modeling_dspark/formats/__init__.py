"""Read checkpoints of other projects as this project's. Not shipped, since published drafters have this project's format.

`table` describes the formats as data, `tensors` reads weight files, `translate` maps configurations to ours, and `load` ties
them together and refuses checkpoints that do not fit.
"""

from .load import foreign_arguments


__all__ = ["foreign_arguments"]
