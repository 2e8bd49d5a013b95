"""A layer for multi-token prediction as the checkpoints of its own family have it, in a folder of its own: Qwen's
``mtp.*``, or DeepSeek's layer behind the others, ``model.layers.L``, with copies of the tables.

The tensors are those that belong into the target's files; the config says what kind of layer they are.
"""

from specjax.checkpoints.writers import Folder, Given, keys, models, said
from specjax.checkpoints.writers.tensors import EMBED, HEAD, table
from specjax.targets import deepseek_config, qwen3_5_config

METHODS = ("mtp",)
_DEEPSEEK = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
    "lm_head": "shared_head.head",
}


def problems(given: Given) -> list[str]:
    """Families whose checkpoints have no such layer, and tables that Qwen's does not have."""
    cfg, model = given.cfg, given.cfg.model
    published = isinstance(model, deepseek_config.Config | qwen3_5_config.Config)
    qwen = isinstance(model, qwen3_5_config.Config)
    return said(
        (not published, f"checkpoints of {cfg.family} have no such layer"),
        (qwen and cfg.own_head, "it has an output head of its own"),
    )


def plan(given: Given) -> Folder:
    """The folder."""
    return (_deepseek if isinstance(given.cfg.model, deepseek_config.Config) else _qwen)(given)


def _qwen(given: Given) -> Folder:
    own = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": given.cfg.own_embed}
    config = {
        "architectures": ["Qwen3_5MoeMTP" if given.cfg.model.experts else "Qwen3_5MTP"],
        **models.settings(given.cfg.family, given.cfg.model),
        **own,
        "dtype": keys.dtype(given),
    }
    return Folder(config, {f"mtp.{name}": x for name, x in given.tensors.items()})


def _deepseek(given: Given) -> Folder:
    behind, shared = int(given.target.cfg.num_layers), given.target.shared
    config = {
        "architectures": ["DeepSeekMTPModel"],
        **models.settings(given.cfg.family, given.cfg.model),
        "num_hidden_layers": behind,
        "dtype": keys.dtype(given),
    }
    tensors = {
        **given.tensors,
        EMBED: table(given, EMBED, shared.embed),
        HEAD: table(given, HEAD, shared.head),
    }
    return Folder(config, {f"model.layers.{behind}.{_there(name)}": x for name, x in tensors.items()})


def _there(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    return f"{_DEEPSEEK[stem]}.{kind}" if stem in _DEEPSEEK else name.removeprefix("layers.0.")
