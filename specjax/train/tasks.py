"""First sentences of docstrings as tasks: "Returns the sum of x." -> "return the sum of x"."""

import re

from specjax.train.wordsets import listed

_VERBS = listed(
    """
    accept access accumulate add adjust advance align allocate allow analyse analyze annotate append apply
    approximate arrange assemble assert assess assign attach average balance base bin bind blend break bring
    bucket buffer build cache calculate call capitalize capture cast center change check choose chop chunk clamp
    classify clean clear clip clone close cluster coerce collapse collect colorize combine compact compare
    compile complement complete compose compress compute concatenate condense confirm conjugate connect
    construct consume contract control convert coordinate copy correct count cover create crop cube cut cycle
    decide decode decompose decompress decorate decrease decrement decrypt deduce deduplicate define delete
    demonstrate derive describe detect determine diagonalize diff differentiate disassemble discard discretize
    display distribute divide do double download draw drop dump duplicate edit eliminate emit emulate enclose
    encode encrypt ensure enumerate equalize erase escape estimate evaluate exchange exclude execute expand
    exponentiate export express extend extract factor factorize fetch fill filter find fit fix flatten flip
    floor fold follow force form format fuse gather generate get give go grab group guarantee guess handle hash
    help highlight identify ignore implement import improve include increase increment indent index infer
    initialize inline insert inspect integrate interlace interleave interpolate interpret intersect intersperse
    invert invoke isolate iterate join judge jump keep label left-pad lemmatize list load localize locate log
    look loop lower lowercase make map mark mask match maximize mean measure memoize merge minimize mirror mix
    modify monitor move multiply negate normalise normalize notify number obfuscate obtain offset open optimize
    order orthogonalize overwrite pack pad pair parse partition pass peek perform permute pick place plot pop
    populate position predict prefix prepare prepend preprocess preserve print probe process produce project
    prompt propagate prove provide prune pull push put quantize query quote raise randomize rank rate read
    rearrange rebuild recognize reconstruct record recover redirect reduce refine reflect reformat register
    regroup reject relabel remove rename render reorder repeat replace report represent resample rescale reset
    reshape resize resolve restore restrict retain retrieve return reverse rewrite rotate round run sample
    sanitize save scale scan score search segment select send separate serialize set shift shorten show shrink
    shuffle sign simplify simulate sketch skip slice slide slugify smooth solve sort sparsify split square
    squash stack standardize start stem step stop store strip study style subdivide submit subsample subset
    substitute subtract sum summarize suppress swap symmetrize synthesize tabulate take tally tell test
    threshold tile toggle tokenize total trace track transfer transform translate transliterate transpose
    traverse triangulate trim truncate try turn uncompress underline undo unescape unflatten unify uniquify
    unpack unquote unwrap unzip update upload uppercase use validate verify view visit walk warn weigh weight
    widen wrap write yield zero zip
    """
)
_ABOUT = re.compile(
    r"(?:this|the|a|an)?\s*(?:simple |helper |utility |convenience )?(?:function|method|helper|utility|routine)\s+"
    r"(?:(?:that|which|to|will|is used to|used to|can|for)\s+)*",
    re.I,
)
_BAD = re.compile(
    r"^(?:return|yield|get) (?:none|self|it|this|a new instance|true|false)\b|"
    r"\b(?:same as|like|above|below|following|equivalent|version of|object's|instance of this)\b|"
    r"\bcurrent (?:object|instance)\b|[a-z_]{2,}\.[a-z_]{2,}",
    re.I,
)


def task(sentence: str) -> str | None:
    """A sentence that says what a function does, in the form that goes after "to", without the full stop; None for one
    that has another form."""
    text = re.sub(r"\s*[.!]+$", "", sentence.strip())
    text = _ABOUT.sub("", text, count=1) if _ABOUT.match(text) else text
    text = re.sub(r"^(?:True|Whether|False)\s+(?:if and only if|iff|if)?\s*", "check whether ", text)
    text = re.sub(r"^(?:Return|Returns|Test|Tests)\s+(?:True|``True``) (?:if and only if|iff|if|when)\s+(.*?)"
                  r"(?:,?\s*(?:and |or |else |otherwise |; )?(?:return |returns )?False(?: otherwise)?| otherwise)?$",
                  r"check whether \1", text)  # fmt: skip
    if re.match(
        r"The (number|sum|list|index|product|length|maximum|minimum|set|value|largest|smallest)\b", text
    ):
        text = "return the" + text[3:]
    words = text.split(" ")
    at = 1 if re.fullmatch(r"[A-Z][a-z]+ly", words[0]) and len(words) > 2 else 0
    verb = _base(words[at].rstrip(","))
    if verb is None or (not words[at].isalpha() and not words[at].rstrip(",").isalpha()):
        return None
    words[at] = verb + ("," if words[at].endswith(",") else "")
    words[0] = words[0].lower()
    for i in range(at + 1, len(words) - 1):  # "sorts the list and returns it"
        if (
            words[i] in ("and", "then")
            and words[i + 1] != words[i + 1].rstrip("s")
            and at == 0
            and _third(sentence)
        ):
            words[i + 1] = _base(words[i + 1]) or words[i + 1]
    said = " ".join(words)
    if (
        len(said) < 12
        or len(said) > 220
        or _BAD.search(said)
        or said.count("(") != said.count(")")
        or ":" in said
    ):
        return None
    return said


def third(todo: str) -> str:
    """A task in the form that goes after "that": "return the sum" -> "returns the sum"."""
    words = todo.split(" ")
    at = 1 if words[0].endswith("ly") and words[0] not in _VERBS and len(words) > 1 else 0
    verb = words[at].rstrip(",")
    if re.search(r"(s|x|z|ch|sh|[^aeiou]o)$", verb):
        form = verb + "es"
    else:
        form = verb[:-1] + "ies" if re.search(r"[^aeiou]y$", verb) else verb + "s"
    words[at] = form + words[at][len(verb) :]
    return re.sub(r"\b(and|then) (return|yield)\b", r"\1 \2s", " ".join(words))


def _third(sentence: str) -> bool:
    first = sentence.split(" ")[0].lower()
    return first not in _VERBS


def _base(word: str) -> str | None:
    """The verb's base form ("returns" -> "return"); None if it is none that is known."""
    lower = word.lower()
    if lower in _VERBS:
        return lower
    for form in (lower[:-1], lower[:-2], lower[:-3] + "y"):
        if lower.endswith("s") and form in _VERBS:
            return form
    return None
