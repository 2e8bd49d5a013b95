"""DSpark drafters of the speculators library: its DFlash files with heads. ``markov_w1`` has a row per target
id and ``markov_w2`` one per draft id; the usual layout is "shift"."""

from specjax.checkpoints.formats import Files, Found, block, heads, speculators_dflash


def read(files: Files) -> Found:
    """A DSpark drafter."""
    settings, names, notes = speculators_dflash.body(files, heads.KEYS)
    settings |= heads.find(files, names, files.hf)
    made_for = speculators_dflash.verifier(files.hf)
    return Found("dspark", "speculators", settings, names, block.SKIPPED, notes, made_for)
