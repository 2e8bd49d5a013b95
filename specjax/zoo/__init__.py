"""Drafters that come with the package: folders ``TARGET/METHOD`` in specjax's own layout, each with a model card.

``specjax.load`` finds them by the method's name::

    params = specjax.load("smollm2-135m", drafter="dspark")

Nothing is imported or opened until then. docs/zoo.md tells what they are and how they were made.
"""

import dataclasses
from pathlib import Path

FOLDER = Path(__file__).parent
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
#: Methods that ``specjax train`` knows, hence that may be here.
METHODS = ("assistant", "dflash", "dspark", "eagle3", "mtp")


@dataclasses.dataclass(frozen=True)
class Shipped:
    """One drafter: the short name of its target, its method, its folder."""

    target: str
    method: str
    folder: Path

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.folder.iterdir())

    @property
    def card(self) -> Path:
        """Its model card: data, training, acceptance, licences."""
        return self.folder / CARD


def available(target: str | None = None) -> tuple[Shipped, ...]:
    """What is shipped, for every target or for one, by name.

    Example:
        >>> [one.method for one in specjax.zoo.available("smollm2-135m")]  # doctest: +SKIP
        ['assistant', 'dflash', 'dspark', 'eagle3', 'mtp']
    """
    files = (file for file in sorted(FOLDER.glob(f"*/*/{CONFIG}")) if (file.parent / WEIGHTS).is_file())
    found = (Shipped(file.parts[-3], file.parts[-2], file.parent) for file in files)
    return tuple(one for one in found if target in (None, one.target))


def find(target: str | None, method: str) -> Path | None:
    """Folder of the drafter of a method for a target by its short name; None when none is shipped."""
    if target is None:
        return None
    return next((one.folder for one in available(target) if one.method == method), None)


def targets(method: str) -> tuple[str, ...]:
    """Short names of the targets for which a drafter of a method is shipped."""
    return tuple(one.target for one in available() if one.method == method)


def by_target() -> dict[str, tuple[str, ...]]:
    """Short names of targets -> methods of the drafters that are shipped for them."""
    here = available()
    return {one.target: tuple(other.method for other in here if other.target == one.target) for one in here}


def missing(method: str, target: object) -> str:
    """What to tell somebody who asks for a drafter that is not here, and how to get one."""
    here = "; ".join(f"{', '.join(names)} for {short}" for short, names in by_target().items()) or "none"
    told = f"the package has no {method} drafter for {str(target)!r} (it has: {here})"
    if method not in METHODS:
        return told
    return (
        f"{told}. To train one: specjax train --target {target} --method {method} --prompts prompts.jsonl --out FOLDER "
        "(docs/training.md)"
    )
