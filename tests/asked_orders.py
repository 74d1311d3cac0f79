"""Orders to leave that a test gives layer by layer."""

from typing import Any

from conserve.engine.runtime.safepoint import Word


class Asking:
    """Orders that a test gives when they are asked for, as a word that is looked at instead.

    A pass that has seen an order looks or asks again at the same layer, and gets the same answer.
    """

    flag_readable = True
    _seen: int | None = None

    def rows_ordered(self, stamp: Any) -> int:
        """Rows that are to leave, at the layer of the look before, or at the next one."""
        seen, self._seen = self._seen, None
        return self.asked(stamp) if seen is None else seen

    def asked(self, stamp: Any) -> int:
        """Rows that are to leave at the next layer."""
        raise NotImplementedError

    def word(self, stamp: Any) -> Word:
        """This object, whose items by stamp are its orders."""
        self._seen = None
        words: Any = self
        return Word(words, stamp, 0)

    def __getitem__(self, stamp: Any) -> int:
        rows = self.asked(stamp) if self._seen is None else self._seen
        self._seen = rows or None
        return rows
