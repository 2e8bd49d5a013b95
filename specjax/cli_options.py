"""Options of the command line: their declarations, and text turned into keyword values."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

LOAD = ("drafter", "dtype", "speculative_config", "drafter_config", "verbose")


def _option(*names: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, show_default=False)


Target = Annotated[
    str, typer.Argument(help="Short name (smollm2-135m, tiny), Hugging Face id, folder or .gguf file.")
]
System = Annotated[str | None, _option("--system", text="System text of the conversation.")]
Drafter = Annotated[
    list[str] | None,
    _option(
        "--drafter",
        text="Method name (ngram), or a drafter's id or folder; several (repeated, or with commas) are tried in order.",
        metavar="NAME|ID|FOLDER",
    ),
]
DrafterConfig = Annotated[
    str | None,
    _option("--drafter-config", text="Settings of the drafter that replace its file's.", metavar="JSON"),
]
Dtype = Annotated[str | None, _option("--dtype", text="auto, float32 or bfloat16.")]
Speculative = Annotated[
    str | None,
    _option("--speculative-config", "-sc", text="JSON object or file, keys as in vLLM.", metavar="JSON|FILE"),
]
MaxNew = Annotated[int | None, _option("--max-new-tokens", text="Token budget per answer.")]
K = Annotated[
    str | None,
    _option(
        "--k",
        "-k",
        text="Tokens drafted per round; default: the drafter's own. 'auto' = tuned as it goes.",
        metavar="N|auto",
    ),
]
Temperature = Annotated[
    str | None,
    _option("--temperature", "-t", text="0 = greedy; 'model' = the file's defaults.", metavar="FLOAT|model"),
]
TopK = Annotated[int | None, _option("--top-k", text="Keep the k likeliest tokens; 0 = off.")]
TopP = Annotated[
    float | None, _option("--top-p", text="Keep the smallest set with this probability; 1 = off.")
]
MinP = Annotated[float | None, _option("--min-p", text="Drop tokens under this share of the best; 0 = off.")]
Repetition = Annotated[float | None, _option("--repetition-penalty", text="Over prompt and output; 1 = off.")]
Presence = Annotated[
    float | None, _option("--presence-penalty", text="Once per token already emitted; 0 = off.")
]
Frequency = Annotated[float | None, _option("--frequency-penalty", text="Per earlier occurrence; 0 = off.")]
Bias = Annotated[
    list[str] | None, _option("--logit-bias", text="Add to one token's logit; repeatable.", metavar="ID=BIAS")
]
Seed = Annotated[int | None, _option("--seed", text="Seed of the samples.")]
Samples = Annotated[int | None, _option("--n", "-n", text="Samples per prompt.")]
Stop = Annotated[
    list[str] | None,
    _option("--stop", text="Stop text, or id:NUMBER for a token; repeatable.", metavar="TEXT|id:N"),
]
IgnoreEos = Annotated[bool | None, _option("--ignore-eos", text="Go on past the end-of-text token.")]
Rule = Annotated[str | None, _option("--rule", text="auto, match, reject or block.")]
Rows = Annotated[int | None, _option("--rows", text="Rows decoded at once.")]
MaxLen = Annotated[int | None, _option("--max-len", text="Room for prompt and answer, in tokens.")]
Logprobs = Annotated[bool | None, _option("--logprobs", text="Report log-probabilities (with --json).")]
Loop = Annotated[str | None, _option("--loop", text="device or host.")]
Template = Annotated[
    str | None,
    _option(
        "--chat-template", text="'false' = raw prompt; or a template, or its file.", metavar="TEXT|FILE|false"
    ),
]
TemplateArgs = Annotated[
    str | None, _option("--chat-template-kwargs", text="Extra template variables.", metavar="JSON")
]
Verbose = Annotated[bool | None, _option("--verbose", text="Progress everywhere, and tracebacks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


_OWN = (*LOAD, "target", "prompt", "system", "as_json")


def load_options(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords for ``load`` from command line values; what was not given is left out."""
    options = {name: given[name] for name in LOAD if given.get(name) not in (None, [])}
    if "drafter" in options:
        names = [part for text in options["drafter"] for part in text.split(",") if part]
        options["drafter"] = names[0] if len(names) == 1 else tuple(names)
    if "drafter_config" in options:
        options["drafter_config"] = _json("--drafter-config", options["drafter_config"], (dict, list))
    return options


def decode_options(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords for ``decode`` from command line values; what was not given is left out."""
    options = {k: v for k, v in given.items() if k not in _OWN and v is not None and v != []}
    parsers = {
        "k": _width,
        "temperature": lambda text: text if text == "model" else _float("--temperature", text),
        "logit_bias": lambda pairs: dict(_bias(pair) for pair in pairs),
        "stop": lambda items: [_stop(item) for item in items],
        "chat_template": _template,
        "chat_template_kwargs": lambda text: _json("--chat-template-kwargs", text, (dict,)),
    }
    options = {k: parsers[k](v) if k in parsers else v for k, v in options.items()}
    return options if given["verbose"] is None else options | {"verbose": given["verbose"]}


def _width(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--k takes a number of drafts or 'auto', got {text!r}") from None


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} takes a number or 'model', got {text!r}") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ValueError(f"--logit-bias takes ID=BIAS, for instance 42=-3.5, got {text!r}") from None


def _stop(text: str) -> int | str:
    kind, _, number = text.partition(":")
    return int(number) if kind == "id" and number.isdigit() else text


def _template(text: str) -> str | bool:
    if text.lower() == "false":
        return False
    looks_like_path = "{" not in text and len(text) < 4096 and "\n" not in text
    if not looks_like_path:
        return text
    if not Path(text).is_file():
        raise ValueError(f"--chat-template: {text!r} is neither a template nor a file")
    return Path(text).read_text(encoding="utf-8")


def _json(name: str, text: str, kinds: tuple[type, ...]) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, kinds):
        raise ValueError(f"{name} takes a JSON object{' or list' if list in kinds else ''}, got {text!r}")
    return value


def printable(value: Any) -> Any:
    """Values ``json.dumps`` accepts: dataclasses as dicts, arrays and tuples as lists, NaN as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        names += [k for k, v in vars(type(value)).items() if isinstance(v, property)]
        return {name: printable(getattr(value, name)) for name in names}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(k): printable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [printable(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
