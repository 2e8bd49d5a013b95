"""Functions with a docstring, read from source files: signature, plain description, how self-contained they are."""

import ast
import builtins
import collections
import copy
import dataclasses
import datetime
import decimal
import fractions
import re
import sys
import typing
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from specjax.train import doctext
from specjax.train.doctext import Doc
from specjax.train.packages import Package

#: How much of a function is understood without its package.
ALONE, SOME, LITTLE = 2, 1, 0

_TYPING = frozenset(typing.__all__) | {"Generator"}
_DECORATORS = re.compile(
    r"propert|overload|abstract|setter|getter|deprecat|fixture|register|dispatch$|classmethod|route|parametrize|option"
)
_BUILTINS = frozenset(dir(builtins))
_KINDS = (str, bytes, list, dict, set, frozenset, tuple, int, float, complex, collections.deque, collections.Counter,
          collections.OrderedDict, datetime.datetime, datetime.timedelta, decimal.Decimal, fractions.Fraction, re.Match,
          re.Pattern)  # fmt: skip
_ATTRIBUTES = frozenset(a for kind in _KINDS for a in dir(kind))
_NUMERIC = frozenset({"numpy", "np"})


@dataclasses.dataclass(frozen=True)
class Function:
    """One function. ``head``: ``def`` line with its annotations; ``bare``: without; ``typing``: names the head takes
    from the module typing. ``alone``: :data:`ALONE`, :data:`SOME` or :data:`LITTLE`."""

    package: str
    module: str
    name: str
    arguments: tuple[str, ...]
    head: str
    bare: str
    typing: tuple[str, ...]
    doc: Doc
    alone: int


def functions(package: Package, counts: Counter[str] | None = None) -> Iterator[Function]:
    """Functions of a package that say in plain English what they do.

    Module-level functions and methods that do without their object. ``counts`` is told how many were ``seen`` (with a
    docstring) and ``usable``. Files that are not Python of this version are passed over.
    """
    counts = Counter() if counts is None else counts
    for path in package.files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the package's own escapes
                tree = ast.parse(Path(path).read_bytes())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            counts["unreadable files"] += 1
            continue
        module = _Module(tree)
        for node, inside in _defined(tree):
            docstring = ast.get_docstring(node, clean=False)
            if not docstring:
                continue
            counts["seen"] += 1
            found = _function(package, path, module, node, inside, docstring)
            if found:
                counts["usable"] += 1
                yield found


class _Module:
    """Names of a module: what it imports (name -> top package) and what it defines."""

    def __init__(self, tree: ast.Module):
        self.imports: dict[str, str] = {}
        nodes = [n for top in tree.body for n in (top, *getattr(top, "body", ()))]  # also under if and try
        for node in nodes:
            if isinstance(node, ast.Import):
                self.imports |= {(a.asname or a.name).split(".")[0]: a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                top = "." if node.level else (node.module or "").split(".")[0]
                self.imports |= {a.asname or a.name: top for a in node.names}


def _defined(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, False
        elif isinstance(node, ast.ClassDef):
            yield from ((n, True) for n in node.body if isinstance(n, ast.FunctionDef))


def _function(
    package: Package, path: Path, module: _Module, node: ast.FunctionDef, inside: bool, docstring: str
) -> Function | None:
    name = node.name.strip("_")
    if (
        node.name.startswith("__")
        or len(name) < 2
        or name in ("main", "apply")
        or re.fullmatch(r"[A-Z][a-z]\w*[A-Z]\w*", name)
        or not _decorated_plainly(node)
    ):
        return None
    doc = doctext.parse(docstring, name)
    if doc is None or re.search(rf"\b{re.escape(package.name)}\b", f"{doc.summary} {doc.more}", re.I):
        return None
    arguments = _arguments(node, inside)
    if arguments is None:
        return None
    names = tuple(a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
    alone = LITTLE if inside and not _is_static(node) else _alone(module, node)
    if name != node.name and alone < ALONE:
        return None  # helpers without their package
    bare = _head(name, _without_annotations(arguments), None)
    head, imported = bare, tuple[str, ...]()
    annotations = [a for a in (*(a.annotation for a in _all(arguments)), node.returns) if a]
    if annotations and all(map(_is_plain_annotation, annotations)):
        head = _head(name, arguments, node.returns)
        used = {n.id for a in annotations for n in ast.walk(a) if isinstance(n, ast.Name)}
        imported = tuple(sorted(used & _TYPING))
    elif annotations:
        alone = min(alone, SOME)
    if len(head) > 130:
        head, imported = bare, ()
    if len(bare) > 110 or len(names) > 7:
        return None
    where = f"{Path(path).parent.name}.{Path(path).stem}"
    return Function(package.name, where, name, names, head, bare, imported, doc, alone)


def _decorated_plainly(node: ast.FunctionDef) -> bool:
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
        if _DECORATORS.search(name):
            return False
    return True


def _is_static(node: ast.FunctionDef) -> bool:
    return any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list)


def _arguments(node: ast.FunctionDef, inside: bool) -> ast.arguments | None:
    """Arguments without ``self``; None for a method that uses it, for defaults that are no constants, and if there
    are none."""
    given = copy.deepcopy(node.args)
    if inside and not _is_static(node):
        if not given.args or given.args[0].arg != "self" or given.posonlyargs:
            return None
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if "self" in used or "super" in used or len(node.body) < 2:
            return None
        given.args = given.args[1:]
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    if not (named or given.vararg) or any(
        a.arg.startswith("_") or a.arg in ("self", "cls", "ctx") for a in _all(given)
    ):
        return None
    for default in [*given.defaults, *(d for d in given.kw_defaults if d)]:
        try:
            ast.literal_eval(default)
        except (ValueError, TypeError, SyntaxError):
            return None
    return given


def _all(given: ast.arguments) -> list[ast.arg]:
    more = [a for a in (given.vararg, given.kwarg) if a]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *more]


def _without_annotations(given: ast.arguments) -> ast.arguments:
    bare = copy.deepcopy(given)
    for argument in _all(bare):
        argument.annotation = None
    return bare


def _head(name: str, arguments: ast.arguments, returns: ast.expr | None) -> str:
    return f"def {name}({ast.unparse(arguments)}){' -> ' + ast.unparse(returns) if returns else ''}:"


def _is_plain_annotation(annotation: ast.expr) -> bool:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and node.id not in _BUILTINS | _TYPING:
            return False
        if isinstance(node, ast.Attribute):
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return False
    return True


def _alone(module: _Module, node: ast.FunctionDef) -> int:
    """ALONE: parameters, builtins and the standard library only. SOME: numpy or a few functions of its module, too."""
    names: set[str] = set()
    bound: set[str] = set()
    attributes: set[str] = set()
    annotated = {id(n) for a in _all(node.args) if a.annotation for n in ast.walk(a.annotation)}
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            if not isinstance(n.ctx, ast.Load):
                bound.add(n.id)
            elif id(n) not in annotated:
                names.add(n.id)
        elif isinstance(n, ast.arg):
            bound.add(n.arg)
        elif isinstance(n, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            bound.add(n.name or "")
        elif isinstance(n, ast.Import | ast.ImportFrom):
            bound |= {(a.asname or a.name).split(".")[0] for a in n.names}
        elif isinstance(n, ast.Attribute) and not (
            isinstance(n.value, ast.Name) and n.value.id in module.imports
        ):
            attributes.add(n.attr)
    free = names - bound - _BUILTINS
    tops = {module.imports.get(name, "") for name in free}  # "" = defined in the module
    own = sum(name not in module.imports for name in free)
    foreign = {t for t in tops if t and t not in sys.stdlib_module_names}
    simple = len(node.args.args) <= 5 and len(attributes - _ATTRIBUTES) == 0
    if not foreign and own <= 2 and simple:
        return ALONE
    if foreign <= _NUMERIC and own <= 5 and len(attributes - _ATTRIBUTES) <= 3:
        return SOME
    return LITTLE
