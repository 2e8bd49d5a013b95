"""DeepSpec's EAGLE-3 drafters (``Qwen3Eagle3Model``).

Conventions: settings at the top level of a copy of the target's config; ``target_layer_ids`` are outputs of
layers counted from 0 (-1 is the embedding's output). Whole vocabulary, embedding and head stored. The residual is
the feature as it is, and what is recycled is not normed.
"""

from specjax.checkpoints.formats import Files, Found, eagle_parts as parts

#: Loss weights, lengths of training and the like change nothing here.
KEYS = {
    "target_layer_ids", "num_target_layers", "ttt_length", "step_loss_decay", "draft_num_hidden_layers",
    "target_model_name_or_path", *parts.FLAGS,
}  # fmt: skip


def read(files: Files) -> Found:
    """An EAGLE-3 drafter. Raises ValueError for settings that are not implemented or contradict the tensors."""
    hf = files.hf
    notes: list[str] = []
    parts.check(files, hf, KEYS)
    trained, layers = hf.get("num_target_layers"), int(files.target.num_layers)
    if trained is not None and int(trained) != layers:
        raise ValueError(f"{files.where} was made for a target of {trained} layers, this one has {layers}")
    names = parts.names(files)
    settings = parts.settings(files, names, hf, hf)
    ids = hf.get("target_layer_ids")
    settings["taps"] = parts.default_taps(files, notes) if ids is None else tuple(int(i) + 1 for i in ids)
    if hf.get("ttt_length") is not None:
        settings["k"] = int(hf["ttt_length"])
    made_for = str(hf.get("target_model_name_or_path") or "")
    return Found("eagle3", "DeepSpec", settings, names, parts.SKIPPED, tuple(notes), made_for)
