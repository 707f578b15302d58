"""Which request is in which row of a ragged cache: one table per cache owns the row numbers."""

from .engine_request import Request
from .model_cache import RaggedCache


class RowTable:
    """Requests in the order of a cache's rows, kept in step with it.

    Args:
        cache ([`RaggedCache`]): The cache; its rows are added, moved and dropped here and nowhere else.
    """

    def __init__(self, cache: RaggedCache):
        self.cache = cache
        self.requests: list[Request] = []
        self._row: dict[int, int] = {}  # by index of the request

    def __len__(self) -> int:
        return len(self.requests)

    def row_of(self, request: Request) -> int:
        """The row of a request."""
        return self._row[request.index]

    def add(self, request: Request) -> None:
        """Give a request an empty row after the others."""
        self._row[request.index] = self.cache.add_row()
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        """Take a request's row away; the last row moves there."""
        row = self._row.pop(request.index)
        self.cache.drop_row(row)
        last = self.requests.pop()
        if last is not request:
            self.requests[row] = last
            self._row[last.index] = row

    def move_to_front(self, requests: list[Request]) -> list[Request]:
        """Move some requests to the first rows, with as few moves as possible; returns them in the order of their rows."""
        chosen = {request.index for request in requests}
        outside = [row for row in range(len(chosen), len(self)) if self.requests[row].index in chosen]
        for row in range(len(chosen)):
            if self.requests[row].index not in chosen:
                self._swap(row, outside.pop())
        return self.requests[: len(chosen)]

    def _swap(self, first: int, second: int) -> None:
        self.cache.swap_rows(first, second)
        requests = self.requests
        requests[first], requests[second] = requests[second], requests[first]
        self._row[requests[first].index], self._row[requests[second].index] = first, second


__all__ = ["RowTable"]
