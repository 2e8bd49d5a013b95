"""DeepSpec's DSpark drafters: its DFlash files (same class) with a Markov head, a confidence head or both."""

from specjax.checkpoints.formats import Files, Found, block, deepspec_dflash, heads


def read(files: Files) -> Found:
    """A DSpark drafter; a DFlash one where there are no heads."""
    settings, names, notes = deepspec_dflash.body(files)
    said = block.merged(files, deepspec_dflash.SECTION, heads.KEYS)
    found = heads.find(files, names, said)
    method = "dspark" if found else "dflash"
    return Found(method, "DeepSpec", {**settings, **found}, names, block.SKIPPED, notes)
