"""Docstrings in plain words: markup taken out, told apart into summary, further text, result and examples."""

import dataclasses
import inspect
import re

from specjax.train import doctests
from specjax.train.wordsets import listed

_UNWANTED = re.compile(
    r"^(?:like|same|similar|see|as|ditto)\b|deprecat|\binternal|\bprivate\b|todo|fixme|do not (?:use|call)|backward|"
    r"compatib|\balias|obsolete|undocumented|wrapper|wraps|overrid|subclass|superclass|this (?:class|method|module)|"
    r"abstract method|\bhook\b|callback|decorator|\bplugin|monkey|not implemented|\bstub\b|placeholder|"
    r"for debugging|pytest|unittest|docstring|\bself\b|\bcls\b|copyright|\blicen[cs]e|\bbug\b|hack\b|workaround|"
    r"command line|argparse|logger|\bsee also\b|\bCLI\b",
    re.I,
)
_HEADER = re.compile(
    r"(?:args?|arguments?|param(?:eter)?s?|keyword arguments|returns?|return value|yields?|raises?|examples?|notes?|"
    r"see also|references?|usage|warnings?|attributes?|complexity|time complexity|space complexity|inputs?|"
    r"outputs?|options|exceptions?|version ?\w+|changed|\.\. .*|doctests?|tests?|sources?|author|reference)\b"
    r"(?:\s*\([^)]*\))?\s*:(?!\w).{0,60}",
    re.I,
)
_RETURNS = re.compile(r"(returns?|yields?)\s*:\s*(.*)|:returns?:\s*(.*)|@returns?:?\s+(.*)", re.I)
_COMMON = listed(
    "a an the of to and in is are for if from with by that as at or on be it into this than using all"
)
_FOREIGN = listed(
    "de la el que para una con por un der die und das ist von les des est pour del los el sie ein eine nicht"
)


@dataclasses.dataclass(frozen=True)
class Doc:
    """What a docstring says. ``summary``: its first sentence. ``more``: the sentences after it. ``result``: what is
    returned, where a section of its own says so. ``fields``: the sections on arguments and result, as they stand.
    ``examples``: (call, what it gives), without setup."""

    summary: str
    more: str
    result: str
    fields: str
    examples: tuple[tuple[str, str], ...]


def parse(docstring: str, name: str, words: tuple[int, int] = (4, 150)) -> Doc | None:
    """The docstring of a function of this name in plain words; None when it does not say in plain English what is
    done, or is too short (fewer than ``words[0]`` words or 20 signs) or too long (more than ``words[1]`` words)."""
    text = inspect.cleandoc(docstring).replace("\r", "")
    prose, result = _prose(text)
    if prose is None or _UNWANTED.search(prose):
        return None
    summary, more = _first_sentence(prose)
    if len(summary) < 20 or not words[0] <= len(summary.split()) or len(prose.split()) > words[1]:
        return None
    if (
        len(summary) > 240
        or re.search(r"\b(?:e\.g|i\.e)\.$", summary)
        or not english(summary)
        or not _is_plain(summary)
    ):
        return None
    more = _readable(more)
    result = result if _is_plain(result) and 8 <= len(result) <= 120 and not _UNWANTED.search(result) else ""
    return Doc(summary, more, result, _fields(text), doctests.examples(text, name))


def english(text: str) -> bool:
    """Whether a text reads as English: Latin letters without accents, and English small words outweigh others."""
    if any(ord(c) > 126 or c in "\t\x0b" for c in text):
        return False
    found = re.findall(r"[a-z]+", text.lower())
    small = sum(w in _COMMON for w in found)
    return small >= 1 and small > 2 * sum(w in _FOREIGN for w in found)


def clean(text: str) -> str:
    """Text without the marks of reStructuredText and Markdown."""
    text = re.sub(r"\s*(\[#?\w+\]_|\[\d+\])", "", text)
    text = re.sub(r"`([^`<>]*?)\s*<[^`<>]*>`__?", r"\1", text)
    text = re.sub(r":[a-z:]+:`[~!]?([^`]*)`", lambda m: m[1].rsplit(".", 1)[-1], text)
    text = re.sub(r"``([^`]*)``|`([^`]*)`_?", lambda m: m[1] or m[2] or "", text)
    text = re.sub(r"(?<![\w*])\*{1,2}(?=[^\s*])([^*\n]*?[^\s*])\*{1,2}(?![\w*])", r"\1", text)
    text = re.sub(r"\[([^\]]+)\]\(http[^)]*\)", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


def _readable(text: str) -> str:
    """The sentences up to the first one that is not plain English."""
    kept = []
    while text:
        sentence, text = _first_sentence(text)
        if not _is_plain(sentence) or any(ord(c) > 126 for c in sentence):
            break
        kept.append(sentence)
    return " ".join(kept)


def _is_plain(text: str) -> bool:
    """Without mathematical markup, code, links and other things that are not sentences."""
    return (
        re.search(r"[\\|{}$`^@#~]|\b_[a-zA-Z]|https?:|\"\"\"|\.\. |::|[=*+]{3}|>>>|--|_\(|\w_\b|\|", text)
        is None
    )


def _prose(text: str) -> tuple[str | None, str]:
    """(the paragraphs before any section, example or list, cleaned; what a section says is returned)."""
    lines = text.split("\n")
    end = len(lines)
    for i, line in enumerate(lines):
        under = lines[i + 1].strip() if i + 1 < len(lines) else ""
        ruled = len(under) >= 3 and not under.strip("-=~^")
        if ruled and i == 0:
            return None, ""  # a heading in the place of a sentence
        if (
            ruled
            or re.match(r"\s*(:\w|@\w|>>>|\.\. |[-*+\u2022] |\d+[.)] |\||In \[|[$#] |```)", line)
            or _HEADER.fullmatch(line.strip())
            or (i and line.startswith(("  ", "\t")) and not lines[i - 1].strip())
        ):
            end = i
            break
    paragraphs = [clean(p) for p in re.split(r"\n\s*\n", "\n".join(lines[:end]))]
    kept: list[str] = []
    for paragraph in (p for p in paragraphs if p):
        introduces = paragraph.endswith(":")
        if introduces and not kept and not re.search(r"[.!?] ", paragraph):
            return (paragraph[:-1].strip() + ".", _result(lines)) if len(paragraph) > 40 else (None, "")
        if introduces:
            paragraph = re.sub(r"(?<=[.!?]) [^.!?]*:$", "", paragraph)
        if not paragraph.endswith(":"):
            kept.append(paragraph if paragraph[-1] in ".!?" else paragraph + ".")
    return (" ".join(kept) or None), _result(lines)


def _result(lines: list[str]) -> str:
    for i, line in enumerate(lines):
        found = _RETURNS.fullmatch(line.strip())
        if not found:
            continue
        said = next((g for g in found.groups()[1:] if g), "")
        rest = []
        for following in lines[i + 1 :]:
            if not following.strip() or not following.startswith((" ", "\t")) or ":param" in following:
                break
            rest.append(following)
        said = clean(" ".join([said, *rest]))
        said = re.sub(r"^[\w\[\], .|]{1,30}:\s+", "", said)  # the type before it
        said = _first_sentence(said)[0]
        return said if english(said) and len(said.split()) > 2 and not _RETURNS.match(said) else ""
    return ""


def _fields(text: str) -> str:
    """Sections on arguments and result; "" where there are none, or too long or marked up ones."""
    google = r"(?:Args|Arguments|Parameters|Returns?|Yields):\n(?:[ \t]+\S.*(?:\n|$))+"
    rest = r"(?::(?:param|returns?)\b.*(?:\n(?=[ \t:])|\n?$|\n(?=\n)))+(?:[ \t]+\S.*\n?)*"
    numpy = r"(?:Parameters|Returns)\n-{5,}\n(?:\S.*\n(?:[ \t]+\S.*(?:\n|$))*)+"
    for form in (google, numpy, rest):
        parts = [m[0].strip() for m in re.finditer(rf"^{form}", text, re.M)]
        said = re.sub(r"``([^`\n]*)``|`([^`\n]*)`", lambda m: m[1] or m[2] or "", "\n\n".join(parts))
        said = re.sub(r"(?<![\w*])\*{1,2}(\w+)\*{1,2}(?![\w*])", r"\1", said)
        if (
            said
            and len(said) <= 350
            and said.isascii()
            and not re.search(r"[\\`$@]|https?:|:class:|>>>|\"\"\"", said)
        ):
            return said
    return ""


def _first_sentence(text: str) -> tuple[str, str]:
    for found in re.finditer(r"[.!?](?=\s+[A-Z\"'(<])", text):
        if not re.search(
            r"\b(e\.g|i\.e|etc|vs|cf|approx|resp|no|fig|eq|[A-Z])\.$", text[: found.end()], re.I
        ):
            return text[: found.end()].strip(), text[found.end() :].strip()
    return (text if not text or text[-1] in ".!?" else text + "."), ""
