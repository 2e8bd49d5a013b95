"""Wordings of coding prompts: a function to complete, and a task in one sentence."""

import random
import re
import textwrap
from collections.abc import Sequence

from specjax.train.documented import ALONE, SOME, Function
from specjax.train.tasks import task, third
from specjax.train.wordsets import words

#: How a function to complete is asked for; the first form is that of common evaluation sets and asked most often.
INSTRUCTIONS = (
    "Write a solution to the following problem and make sure that it passes the tests:",
    "Complete the following Python function:",
    "Implement this Python function so that it does what its docstring says:",
    "Here is the beginning of a Python function. Write the whole function.",
    "Please finish this code:",
    "Write the body of the function below.",
    "Can you implement this function in Python?",
)
SENTENCES = (
    ("Write a function to {}.", 40),
    ("Write a python function to {}.", 30),
    ("Write a Python function that can {}.", 4),
    ("Write a function in Python to {}.", 6),
    ("Write a function that {third}.", 10),
    ("How do I {} in Python?", 4),
    ("Please write Python code to {}.", 4),
    ("I need a Python function to {}.", 3),
    ("Implement a function to {} and show how it is used.", 4),
)
NAMED = (
    "Write a function {name}({arguments}) to {task}.",
    "Write a function that takes in {taken} and returns {result}.",
    "Write a python function named {name} to {task}.",
    "Write a function to {task}. Your code should satisfy this test:\nassert {call} == {want}",
    "Write a function to {task}. For example, {call} should return {want}.",
)

#: Tokens of an instruction and a fence.
_FRAME = 22


def size(text: str) -> int:
    """About how many tokens a text has, for tokenizers that split numbers into digits (within 10 %)."""
    pieces = re.findall(r" ?[A-Za-z]+|\d+|[^\sA-Za-z\d]+|\n *| {2,}", text)
    return sum(map(_piece, pieces))


def _piece(piece: str) -> int:
    first = piece.strip()[:1]
    if first.isalpha():
        return 1 + len(piece.strip()) // 9
    return len(piece) if first.isdigit() else (len(piece) + 1) // 2 if first else 1


def asked(function: Function, tokens: int, rng: random.Random) -> list[str]:
    """Prompts that ask for a function: up to three for one that is self-contained, else one or two."""
    todo = task(function.doc.summary)
    if todo and len(words(todo)) < (2 if function.alone == ALONE else 4):
        todo = None  # says too little by itself
    sentence = _sentence(todo, rng) if todo else None
    code = completion(function, rng, tokens - _FRAME)
    first = f"{INSTRUCTIONS[0]}\n```python\n{code}\n```" if code else None
    detailed = bool(function.doc.examples) or len(function.doc.summary + function.doc.more) > 200
    if function.alone == ALONE:
        texts = [first, sentence]
        if detailed or rng.random() < 0.4:
            texts.append(_another(function, todo, rng, tokens))
    elif function.alone == SOME or function.doc.examples:
        texts = (
            [first, sentence]
            if detailed or rng.random() < 0.3
            else [rng.choice([first, sentence]) or sentence]
        )
    else:
        texts = [sentence]
    return [t for t in texts if t and size(t) <= tokens]


def _sentence(todo: str, rng: random.Random) -> str:
    form = _pick(rng, SENTENCES)
    if form.startswith("How") and re.match(r"(return|yield|check|get)\b", todo):
        form = SENTENCES[0][0]
    return form.format(todo, third=third(todo))


def _another(function: Function, todo: str | None, rng: random.Random, tokens: int) -> str | None:
    if todo and rng.random() < 0.4:
        call, want = function.doc.examples[0] if function.doc.examples else ("", "")
        result = _returned(function.doc.result).removeprefix("Returns ").rstrip(".")
        forms = list(NAMED if call and len(call + want) < 90 and "\n" not in want else NAMED[:3])
        if not result or len(function.arguments) > 3:
            forms.remove(NAMED[1])
        fields = {
            "name": function.name,
            "arguments": ", ".join(function.arguments),
            "task": todo,
            "call": call,
        }
        fields |= {"want": want, "result": result, "taken": " and ".join(function.arguments)}
        return rng.choice(forms).format(**fields)
    code = completion(function, rng, tokens - _FRAME)
    return f"{rng.choice(INSTRUCTIONS[1:])}\n```python\n{code.strip()}\n```" if code else None


def completion(function: Function, rng: random.Random, tokens: int) -> str | None:
    """``def`` line and docstring with examples, shortened to ``tokens``; None if they are longer all the same."""
    doc = function.doc
    head, imports = function.head, function.typing
    if head != function.bare and rng.random() < 0.15:
        head, imports = function.bare, ()
    elif rng.random() < 0.6:
        head, imports = _older(head, imports)
    said = [doc.summary, doc.more]
    likely = 0.3 if doc.examples else 0.6
    fields = f"\n\n{doc.fields}\n" if doc.fields and rng.random() < likely else ""
    if not fields and doc.result and not re.search(r"\breturn|\byield", doc.summary + doc.more, re.I):
        said.append(_returned(doc.result))
    examples = _shown(doc.examples, rng)
    width = rng.choice((76, 88, 100))
    opening = rng.choice(('""" ', '"""', '"""\n    ', '"""\n    '))
    while True:
        # shortened from the least telling part on until it fits
        text = textwrap.fill(
            " ".join(part for part in said if part), width, break_long_words=False, break_on_hyphens=False
        )
        body = textwrap.indent(
            text + fields + ("\n" + examples if examples else "")[bool(fields) :], "    "
        ).rstrip()
        start = (
            "from typing import " + ", ".join(imports) + "\n\n\n" if imports else rng.choice(("\n", "\n\n"))
        )
        whole = f'{start}{head}\n    {opening}{body.lstrip()}\n    """\n'
        if size(whole) <= tokens:
            return whole
        if fields:
            fields = ""
        elif said[1]:
            said[1] = _shorter(said[1])
        elif examples.count("\n") > 2:
            examples = _shown(doc.examples[:1], rng)
        else:
            return None


def _shorter(text: str) -> str:
    """Without its last sentence."""
    return (
        re.sub(r"(?:^|(?<=[.!?]) )(?:(?![.!?] ).)*$", "", text, flags=re.S)
        if re.search(r"[.!?] ", text)
        else ""
    )


def _returned(result: str) -> str:
    first, _, rest = result.partition(" ")
    is_word = first in ("A", "An") or (first[1:].islower() and first not in ("True", "False", "None"))
    return f"Returns {first.lower() if is_word else first} {rest}".strip()


def _older(head: str, imports: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Annotations with the names of typing, as most code has them (``list[int]`` -> ``List[int]``)."""
    names = {"list": "List", "dict": "Dict", "tuple": "Tuple", "set": "Set"}
    used = {new for old, new in names.items() if re.search(rf"\b{old}\[", head)}
    head = re.sub(r"\b(list|dict|tuple|set)\[", lambda m: f"{names[m[1]]}[", head)
    if re.search(r": (\w+) \| None\b", head):
        head, used = re.sub(r"(: |-> )(\w+) \| None\b", r"\1Optional[\2]", head), used | {"Optional"}
    return head, tuple(sorted({*imports, *used}))


def _shown(examples: Sequence[tuple[str, str]], rng: random.Random) -> str:
    if not examples:
        return ""
    style = rng.random()
    if style < 0.7 or any("\n" in want for _, want in examples):
        lead = rng.choice(("", "", "\n", "\nExample:\n" if len(examples) == 1 else "\nExamples:\n"))
        return lead + "\n".join(f">>> {call}\n{want}" for call, want in examples)
    sign = rng.choice(("==", "=>", "->", "=", "\u279e"))
    lead = rng.choice(("\nFor example:\n", "\nExamples\n", "\n", "\nExample:\n"))
    return lead + "\n".join(f"{call} {sign} {want}" for call, want in examples)


def _pick(rng: random.Random, weighted: Sequence[tuple[str, int]]) -> str:
    return rng.choices([form for form, _ in weighted], [weight for _, weight in weighted])[0]
