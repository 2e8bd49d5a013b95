"""Examples in docstrings: calls of the function and what they give."""

import ast
import builtins
import doctest
import re

_BUILTINS = frozenset(dir(builtins))


def examples(text: str, name: str) -> tuple[tuple[str, str], ...]:
    """Up to three short doctests (or lines ``name(...) -> result``) that call the function and nothing undefined."""
    try:
        found = [(e.source.strip(), e.want.strip()) for e in doctest.DocTestParser().get_examples(text)]
    except ValueError:
        found = []
    pattern = rf"\s*({re.escape(name)}\(.*\))\s*(?:->|=>|==|\u279e|\u2192|=|returns)\s*(\S.*)"
    lines = [m for line in text.split("\n") if (m := re.fullmatch(pattern, line))]
    found += [(m[1], m[2].strip()) for m in lines if _is_constant(m[2].strip())]
    kept: dict[str, str] = {}
    known: dict[str, ast.expr] = {}
    for call, want in found:
        call = re.sub(rf"\b(?:\w+\.)+{re.escape(name)}\(", f"{name}(", re.sub(r"\s*#.*$", "", call))
        call = _with_values(call, want, known)
        if len(kept) < 3 and len(call) + len(want) <= 140 and _is_usable(call, want, name):
            kept.setdefault(call, want)
    return tuple(kept.items())


def _is_constant(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _with_values(source: str, want: str, known: dict[str, ast.expr]) -> str:
    """An expression with the constants that lines before gave names to; an assignment of a constant is kept in mind."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return source
    match tree.body:
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)] if not want:
            known.pop(name, None)
            if isinstance(value, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Set | ast.UnaryOp):
                known[name] = value
        case [ast.Expr()] if known:
            used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} & known.keys()
            return ast.unparse(_Values(known).visit(tree)) if used else source
    return source


class _Values(ast.NodeTransformer):
    def __init__(self, known: dict[str, ast.expr]):
        self._known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._known.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def _is_usable(call: str, want: str, name: str) -> bool:
    if (
        not want
        or "\n" in call
        or want.count("\n") > 3
        or re.search(r"Traceback|0x[0-9a-f]{6}|\.\.\.|[<\\]|\"\"\"", want)
    ):
        return False
    if not (call + want).isascii() or "\\" in call:
        return False
    try:
        tree = ast.parse(call, mode="eval")
    except (SyntaxError, ValueError):
        return False
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.Lambda) for a in n.args.args}
    return name in names and names - bound <= _BUILTINS | {name}
