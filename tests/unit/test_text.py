"""Streaming text and stop strings, with tokenizers that split characters in every way."""

import pytest
from hypothesis import example, given, settings, strategies as st

from specjax.text import BROKEN, StopFilter, StopStrings, StreamDecoder, tokens_for_text


class Bytes:
    """One token per byte; 256 is a special token."""

    vocab_size = 257

    def encode(self, text, add_special=True):
        return [256] * add_special + list(text.encode())

    def decode(self, ids, skip_special=True):
        shown = bytes(i for i in ids if i < 256)
        return ("" if skip_special else "<s>" * (256 in ids)) + shown.decode(errors="replace")

    def chat(self, messages, **options):
        return self.encode("".join(m["content"] for m in messages))


class Fallback(Bytes):
    """SentencePiece's way: a run of byte tokens that is no text gives one mark per byte."""

    def decode(self, ids, skip_special=True):
        shown = bytes(i for i in ids if i < 256)
        try:
            return shown.decode()
        except UnicodeDecodeError:
            return BROKEN * len(shown)


class Words:
    """Words that begin with a space, which the first one of a text loses; 0 is special."""

    vocab_size = 6
    pieces = ("", " a", " the", "x", " ", " é")

    def decode(self, ids, skip_special=True):
        return "".join(self.pieces[i] for i in ids).removeprefix(" ")


class Stripped(Words):
    """Drops every leading space of a text."""

    def decode(self, ids, skip_special=True):
        return "".join(self.pieces[i] for i in ids).lstrip(" ")


def pieces_of(tokenizer, ids, sizes):
    stream, out, at = StreamDecoder(tokenizer), [], 0
    for size in [*sizes, len(ids)]:
        out.append(stream.push(ids[at : at + size]))
        at += size
    out.append(stream.flush())
    assert "".join(out) == stream.text
    return out, stream


cuts = st.lists(st.integers(0, 5), max_size=12)


@pytest.mark.parametrize("tokenizer", [Bytes(), Fallback()])
@given(text=st.text(st.sampled_from("aé€😀 👍🏽"), max_size=12), sizes=cuts)
@example(text="😀", sizes=[1, 1, 1, 1])
def test_valid_text_streams_without_broken_characters(tokenizer, text, sizes):
    """Pieces join to the full decode, and none shows part of a character."""
    ids = tokenizer.encode(text)
    out, _ = pieces_of(tokenizer, ids, sizes)
    assert "".join(out) == text
    assert not any(BROKEN in piece for piece in out)
    assert out[-1] == ""  # nothing waits at the end of complete text


@given(raw=st.binary(max_size=24), sizes=cuts)
def test_any_bytes_join_to_the_full_decode(raw, sizes):
    out, _ = pieces_of(Bytes(), list(raw), sizes)
    assert "".join(out) == Bytes().decode(list(raw))


@pytest.mark.parametrize("tokenizer", [Words(), Stripped()])
@given(ids=st.lists(st.integers(0, 5), max_size=16), sizes=cuts)
@example(ids=[1, 4, 2], sizes=[1, 1, 1])
@example(ids=[0, 0, 1, 0, 1], sizes=[1, 1, 1])
def test_leading_space_is_dropped_once(tokenizer, ids, sizes):
    out, _ = pieces_of(tokenizer, ids, sizes)
    assert "".join(out) == tokenizer.decode(ids)


def test_unfinished_character_is_released_at_the_end():
    stream = StreamDecoder(Bytes())
    assert stream.push([ord("a"), 0xE2, 0x82]) == "a"
    assert stream.flush() == BROKEN
    assert stream.tokens_for(2) == 3


def test_broken_bytes_show_once_the_next_character_settles_them():
    stream = StreamDecoder(Bytes())
    assert stream.push([0xE2]) == ""
    assert stream.push([ord("b")]) == BROKEN + "b"


def test_cost_of_a_token_does_not_grow():
    class Counting(Bytes):
        longest = 0

        def decode(self, ids, skip_special=True):
            Counting.longest = max(Counting.longest, len(ids))
            return super().decode(ids)

    StreamDecoder(Counting()).push(list(("hello €" * 200).encode()))
    assert Counting.longest <= 8


@given(text=st.text(st.sampled_from("ab€😀"), max_size=10), chars=st.integers(0, 10))
def test_tokens_for_text_is_the_shortest_prefix(text, chars):
    """LGP.2: a character needs all its tokens, and not one token more is kept."""
    ids, chars = Bytes().encode(text, add_special=False), min(chars, len(text))
    n = tokens_for_text(Bytes(), ids, chars)
    assert n == len(text[:chars].encode())


def test_tokens_for_skips_trailing_special_tokens():
    assert tokens_for_text(Bytes(), [256, 97, 256, 98, 256], 1) == 2
    assert tokens_for_text(Bytes(), [256, 97], 0) == 0


def test_tokens_for_more_than_there_is():
    with pytest.raises(ValueError, match="released"):
        StreamDecoder(Bytes()).tokens_for(1)


def test_stop_string_cuts_before_it():
    stops = StopStrings(["\n\n", "END"])
    assert stops.find("one\n\ntwo END") == 3
    assert stops.find("nothing") is None
    assert StopStrings([]).find("anything") is None
    assert StopStrings("END").strings == ("END",)


def test_first_completed_string_wins():
    """One rule for every way of cutting: 'cd' is complete before 'abcdef' is."""
    assert StopStrings(["abcdef", "cd"]).find("xxabcdef") == 4
    assert StopStrings(["cd", "bcd"]).find("abcd") == 1  # completed together: the earlier start


def test_match_ends_where_the_first_string_is_complete():
    """The tokens kept must not depend on how much text came at once."""
    assert StopStrings(["ab", "abc"]).match("xabc") == StopStrings(["abc", "ab"]).match("xab") == (1, 3)
    assert StopStrings(["ab"]).match("xa") is None


def test_held_back_text():
    stops = StopStrings(["</s>", "ab"])
    assert [stops.held(t) for t in ("", "x", "x<", "x</s", "xa", "x</s>")] == [0, 0, 1, 3, 1, 0]
    assert StopStrings(["aab"]).held("caa") == 2
    assert StopStrings([]).held("abc") == 0


@pytest.mark.parametrize("bad", ["", None, 3])
def test_empty_stop_string_is_refused(bad):
    with pytest.raises(ValueError, match="stop string"):
        StopStrings([bad])


@settings(max_examples=300)
@example(text="cab", stops=["ab"], sizes=[1, 1])
@given(
    text=st.text(st.sampled_from("abc"), max_size=20),
    stops=st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=4), max_size=3),
    sizes=cuts,
)
def test_streamed_stop_does_not_depend_on_the_pieces(text, stops, sizes):
    """STP.5 for stop strings: the same end and the same text, token by token or in blocks."""
    stop, stream, shown, at = StopStrings(stops), None, "", 0
    stream = StopFilter(stop)
    for size in [*sizes, len(text)]:
        shown += stream.push(text[at : at + size])
        at += size
        assert text.startswith(shown)
        if stream.cut is not None:
            assert len(shown) == stream.cut
            break
    shown += stream.flush()
    cut = _first_completed(text, stops)
    assert stream.cut == stop.find(text) == cut
    assert shown == (text if cut is None else text[:cut])


def _first_completed(text, stops):
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None
