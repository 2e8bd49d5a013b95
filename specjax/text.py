"""Text out of a growing list of tokens: pieces that are safe to show, and where a stop string cuts.

Host code only. Positions in text are counted in characters (code points).
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import Protocol

BROKEN = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character


class Decodes(Protocol):
    """All that is asked of a tokenizer here (:mod:`specjax.checkpoints.tokenizer` has them)."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``."""
        ...


class StreamDecoder:
    """Detokenises a row piece by piece; the pieces joined are ``tokenizer.decode`` of all its ids.

    A character whose bytes are spread over several tokens is held back until it is complete. Only the
    last few ids are decoded for each token, so a long row costs no more per token than a short one.

    >>> stream = StreamDecoder(tokenizer)                                      # doctest: +SKIP
    >>> [stream.push([token]) for token in tokens] + [stream.flush()]          # doctest: +SKIP
    """

    def __init__(self, tokenizer: Decodes):
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.text = ""  # everything released
        self.ends: list[int] = []  # characters released after each id
        self._start = 0  # first id of the window that is decoded
        self._read = 0  # ids whose text is released
        self._window = ""  # decode(ids[start:read])

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; returns the text they release."""
        before = len(self.text)
        for token in ids:
            self._step(int(token))
        return self.text[before:]

    def flush(self) -> str:
        """Release what is held back, broken or not: the row has ended."""
        whole = self._tokenizer.decode(self.ids)
        if whole.startswith(self.text):
            rest = whole[len(self.text) :]
        else:  # a decoder that rewrites earlier text; what was released cannot be taken back
            rest = self._tokenizer.decode(self.ids[self._start :])[len(self._window) :]
        self.text += rest
        if self.ends:
            self.ends[-1] = len(self.text)
        return rest

    def tokens_for(self, chars: int) -> int:
        """Fewest leading ids whose released text covers the first ``chars`` characters."""
        if chars > len(self.text):
            raise ValueError(f"{chars} characters asked for, {len(self.text)} released")
        return 0 if chars <= 0 else bisect.bisect_left(self.ends, chars) + 1

    def _step(self, token: int) -> None:
        self.ids.append(token)
        window = self._tokenizer.decode(self.ids[self._start :])
        settled = not window.endswith(BROKEN) and window.startswith(self._window)
        if settled and len(window) > len(self._window):
            self.text += window[len(self._window) :]
            self._advance(window)
        self.ends.append(len(self.text))

    def _advance(self, window: str) -> None:
        """Let the window begin at the ids just released, unless they show nothing on their own (some
        decoders drop a leading space: the ids before must then stay in sight)."""
        alone = self._tokenizer.decode(self.ids[self._read :])
        if alone:
            self._start, window = self._read, alone
        self._read, self._window = len(self.ids), window


def tokens_for_text(tokenizer: Decodes, ids: Sequence[int], chars: int) -> int:
    """Fewest leading ids whose text covers the first ``chars`` characters of ``decode(ids)``.

    A character spread over several tokens needs all of them. The last of these ids may hold more text
    than asked for: cut the text, keep the token.
    """
    stream = StreamDecoder(tokenizer)
    stream.push(ids)
    stream.flush()
    return stream.tokens_for(min(chars, len(stream.text)))


class StopStrings:
    """Finds where the first of several strings ends a text.

    The string *completed* first wins, the one that starts earliest among those completed at the same
    character; the text is cut before it. This depends on the text alone, not on how it was cut into
    pieces, so a row ends at the same place whatever the draft width.
    """

    def __init__(self, strings: Iterable[str]):
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        for s in self.strings:
            if not isinstance(s, str) or not s:
                raise ValueError(f"a stop string must be a non-empty string, got {s!r}")
        self._longest = max(map(len, self.strings), default=0)

    def find(self, text: str, seen: int = 0) -> int | None:
        """Position before which ``text`` must be cut, or None; see :meth:`match`."""
        span = self.match(text, seen)
        return None if span is None else span[0]

    def match(self, text: str, seen: int = 0) -> tuple[int, int] | None:
        """Start and end of the stop string that ends ``text``, or None.

        ``seen``: leading characters that an earlier call has searched without success.
        """
        begin = max(0, seen - self._longest + 1)
        starts = ((text.find(s, begin), s) for s in self.strings)
        hits = [(start + len(s), start) for start, s in starts if start >= 0]
        if not hits:
            return None
        end, start = min(hits)
        return start, end

    def held(self, text: str) -> int:
        """How many trailing characters could be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(s) > size and s.startswith(text[-size:]) for s in self.strings):
                return size
        return 0


class StopFilter:
    """Streams text up to a stop string: what could be the start of one waits until that is known.

    ``cut`` is the position of the stop string once it has occurred, in all text pushed so far, else None.
    """

    def __init__(self, stops: StopStrings):
        self._stops = stops
        self._text = ""
        self._released = 0
        self.cut: int | None = None

    def push(self, piece: str) -> str:
        """Add text; returns what is now certain to be shown. Empty once ``cut`` is set."""
        if self.cut is not None:
            return ""
        seen = len(self._text)
        self._text += piece
        self.cut = self._stops.find(self._text, seen)
        end = len(self._text) - self._stops.held(self._text) if self.cut is None else self.cut
        return self._release(end)

    def flush(self) -> str:
        """The row has ended: what waited was not a stop string after all."""
        return self._release(len(self._text) if self.cut is None else self.cut)

    def _release(self, end: int) -> str:
        piece = self._text[self._released : end]
        self._released = max(self._released, end)
        return piece
