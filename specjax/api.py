"""The public functions. Each is thin: the work is in the module it calls."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax import attach, calls, checkpoints, config, generate as _generate, memory, registry
from specjax.bench.table import Table
from specjax.config import acceptance_rule
from specjax.conversation import Conversation
from specjax.core import round as _round
from specjax.core.loop import host_state, prefill_rows
from specjax.core.platform import default_dtype
from specjax.estimate import Explanation
from specjax.identity import Report
from specjax.progress import line
from specjax.results import Piece, Result
from specjax.types import ArraySpec, Params, Proposal, State, Verdict, tree_bytes

Drafter = str | Path | ModuleType


def load(
    target: str | Path,
    drafter: Drafter | Sequence[Drafter] | None = None,
    *,
    dtype: Any = "auto",
    speculative_config: Any = None,
    drafter_config: Any = None,
    shapes_only: bool = False,
    verbose: bool | None = None,
) -> Params:
    """Target and drafter as one pytree.

    Args:
        target: short name (``"smollm2-135m"``, ``"tiny"``), Hugging Face id, local folder (safetensors),
            ``.gguf`` file, or a folder written by :func:`save`.
        drafter: method name (``"ngram"``, or one of those that :mod:`specjax.zoo` has a drafter of for this target),
            a drafter's folder or Hub id (its files say what it is), a module or dotted name of your own, a sequence of
            these (a chain, tried in order), or None for plain decoding.
        dtype: of weights, activations and caches. ``"auto"``: float32 on CPU, bfloat16 on GPU (for a
            folder written by :func:`save`: as saved).
        speculative_config: vLLM's JSON as dict, text or file, instead of or beside ``drafter``
            (docs/speculative-config.md).
        drafter_config: settings that replace the drafter's defaults or what its file says (``k``, ``drafting``,
            ...); for a chain a list with one dict, or None, per drafter.
        shapes_only: ``jax.ShapeDtypeStruct`` in place of every array: reads configs and tensor names, allocates
            nothing. What :func:`explain` needs to tell the memory of a call beforehand. Folders may hold
            ``config.json`` alone, and no weights are downloaded.
        verbose: progress: None = only on a terminal, False = never, True = always.

    Raises:
        ValueError: unknown name or format, unsupported setting, missing or misshapen tensor.
        FileNotFoundError: a file is not there; the message says how to get it.
    """
    with line(verbose) as say:
        say(f"loading {target}")
        wanted = attach.plan(
            drafter,
            speculative_config,
            drafter_config,
            None if str(target) == "tiny" else target,
            weights=not shapes_only,
        )
        if wanted is not None and wanted.open and not shapes_only:
            attach.found(_target(target, dtype, say, True), wanted)  # no large target is loaded for nothing
        params = checkpoints.known.named(_target(target, dtype, say, shapes_only))
        return params if wanted is None else attach.attach(params, wanted, say)


def _target(target: str | Path, dtype: Any, say: attach.Say, shapes_only: bool) -> Params:
    if str(target) == "tiny":
        params = _tiny(_dtype(dtype, "float32"))
        return jax.eval_shape(lambda: params) if shapes_only else params
    source = checkpoints.hub.resolve(target, weights=not shapes_only)
    if source.kind != "orbax":
        return _from_checkpoint(source, _dtype(dtype, None), say, shapes_only)
    params = checkpoints.orbax.load(source.path, shapes_only)
    if dtype == "auto":
        return params
    return jax.eval_shape(lambda p: cast(p, dtype), params) if shapes_only else cast(params, dtype)


def _dtype(dtype: Any, auto: str | None) -> Any:
    if isinstance(dtype, str) and dtype == "auto":
        return jnp.dtype(auto) if auto else default_dtype().dtype
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise ValueError(f"dtype must be 'auto' or a floating type name, got {dtype!r}") from None
    if not jnp.issubdtype(found, jnp.floating) or found.itemsize not in (2, 4):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {found}")
    return found


def _from_checkpoint(source, dtype, say, shapes_only: bool) -> Params:
    progress = lambda done, total, name: say(f"loading {source.name}: {done}/{total} {name}")  # noqa: E731
    say(f"loading {source.name} as {dtype}")
    read = functools.partial(checkpoints.load_target, source, dtype)
    with memory.loading(source.name, lambda: tree_bytes(read(shapes_only=True).weights)):
        loaded = read(progress, shapes_only)
    for reason, count in loaded.skipped.items():
        say(f"loading {source.name}, {count} tensor(s) left out: {reason}")
    meta = config.Meta(
        family=loaded.family,
        target_cfg=loaded.cfg,
        tokenizer_id=loaded.tokenizer_id,
        chat_template=loaded.chat_template,
        eos_ids=tuple(loaded.eos_ids),
        generation=tuple(sorted((k, v) for k, v in loaded.generation.items() if _plain_value(v))),
        name=source.name,
    )
    return Params(loaded.weights, None, meta)


def _plain_value(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _tiny(dtype) -> Params:
    from specjax import testing

    return cast(testing.tiny_params(), dtype)


def decode(params: Params, prompt: Any, **options: Any) -> Result:
    """Generate text; speculative when ``params`` have a drafter. The output is the target's own.

    Sampling options, ``seed`` and ``max_new_tokens`` also take a list with one value per prompt (None in it: the
    default).

    Args:
        params: from :func:`load`.
        prompt: a string (one user turn through the chat template), chat messages (list of dicts with
            role and content), token ids, or a list of any of these (decoded as a ragged batch).
        max_new_tokens: budget per prompt, or one per prompt. Default 256, less near the end of the context.
        k: drafts per round; default what :func:`specjax.tune` set, else the drafter's own. "auto": as many as pay,
            found while decoding; plain decoding where none do (docs/tuning.md). ``rule="auto"`` is "match" then.
        temperature: 0 (greedy) unless given; ``"model"`` takes the file's generation defaults.
        top_k, top_p, min_p: filters, applied in this order after the temperature; 0, 1, 0 = off.
        repetition_penalty: > 1 divides (multiplies) positive (negative) logits of tokens seen in prompt or output.
        presence_penalty, frequency_penalty: subtracted once per token seen, or times its count, in the output.
        logit_bias: token id -> value added to its logit.
        seed: 0 unless given; the sample depends on it, the row's own text and nothing else.
        n: samples per prompt. stop: ids and strings; the text ends before them. ignore_eos: only ``stop`` ends.
        rule: "match" (ids equal plain decoding's with the same seed), "reject" or "block" (same distribution),
            "auto"; default the one of the speculative config, else "auto".
        rows: rows decoded at once (default at most 8); further prompts enter rows as they fall free.
        max_len: token buffer, to share compiled programs between calls of different lengths.
        logprobs: also return the target's raw log-softmax of each token.
        loop: "device" (chunks of rounds in one program) or "host" (one round per call); same tokens.
        chat_template: False = raw text, a string = another template. chat_template_kwargs: its variables.
        prefill_chunk, rounds: prompt tokens per prefill pass (fewer for large batches of long rows, which bounds
            memory), rounds per device call (at most 16).
        kernels: "auto" (the library's kernels where they can serve), "xla" (never), "pallas" (an error where they
            cannot) or "interpret" (on a CPU, slowly); default what ``SPECJAX_KERNELS`` says, else "auto".
        verbose: progress: None = only on a terminal, False = never, True = always.

    Returns:
        :class:`specjax.results.Result`: text, tokens, finish_reason, logprobs, stats; lists for a list.

    Raises:
        ValueError: anything wrong with the request, before compiling.
        TypeError: an option that does not exist.
        FloatingPointError: the target's logits are not finite (``.result`` holds what the other prompts gave).
        MemoryError: device memory ran out; says what needed how much, and what would fit. The process can go on.
    """
    return _generate.decode(params, prompt, **options)


def stream(params: Params, prompt: Any, **options: Any) -> Iterator[Piece]:
    """Like :func:`decode`, yielding a :class:`specjax.results.Piece` per round (``rounds`` per piece)."""
    return _generate.stream(params, prompt, **options)


def chat(params: Params, system: str | None = None, **options: Any) -> Conversation:
    """A conversation that keeps its state between turns; ``options`` are those of :func:`decode`, for every turn."""
    return Conversation(params, system, **options)


def audit(params: Params, prompts: Any, **options: Any) -> Report:
    """Decode plainly and speculatively: identical? Else the first divergence and its float32 logit gap."""
    from specjax import identity as module

    return module.audit(params, prompts, **options)


def explain(params: Params, prompt: Any, *, compile: bool = False, **options: Any) -> Explanation:
    """What a call would compile and allocate; runs nothing.

    ``compile=True`` compiles the call's programs (they are kept for the call itself) and takes the compiler's
    figure of their temporary memory in place of an estimate. ``options`` are those of :func:`decode`.
    """
    from specjax import estimate as module

    return module.explain(params, prompt, compile=compile, **options)


def bench(params: Params | Sequence[Params], dataset: Any = "builtin", **options: Any) -> Table:
    """Measure drafters beside plain decoding: the same prompts, in the same run, in turn.

    Args:
        params: from :func:`load`: a target with a drafter, or several with one target. Of a target alone, "ngram" and
            the drafters that come with the package are measured.
        dataset: ``"builtin"`` (``"builtin:code"``, ``maths``, ``chat``, ``edit``), ``"gsm8k"``, ``"math500"``,
            ``"humaneval"``, ``"mbpp"`` (from the Hugging Face Hub), a file of JSON lines with ``turns``, ``messages``
            or ``prompt``, ``"NAME=FILE"``, or a list of prompts as :func:`decode` takes them.
        methods: other drafters for the target: names, ``"NAME=FOLDER"``, ``"ngram+eagle3"`` (a chain), or a mapping
            from names to what :func:`load` takes as ``drafter``.
        k, batch, temperature: one value or several of each. ``k``: drafts per round, default the drafter's own.
            ``batch``: prompts decoded together.
        limit: the first so many prompts. ``max_prompt_tokens``: longer ones are left out, and counted in a note.
        repeats: times that every prompt is decoded by either side (3).
        max_new_tokens (128), max_len, rule, seed, ignore_eos, prefill_chunk, kernels, chat_template,
            chat_template_kwargs: as in :func:`decode`; ``sampling``: a dict with further sampling options.
        parts: False leaves the times of drafting and verification alone out, and the programs that they compile.
        platform: "cpu", "cuda" or "rocm": an error where jax runs on another.
        done: called with every row as it comes.

    Returns:
        :class:`specjax.bench.table.Table` of :class:`specjax.bench.rows.Row`: shown as a table; ``plot``, ``write``.

    Raises:
        ValueError: unknown data set, too few prompts for a batch, an option that :func:`decode` refuses.
        FileNotFoundError: no such file.
    """
    from specjax.bench import run as module

    return module.bench(params, dataset, **options)


def sweep(
    target: Params | str | Path, methods: Any = None, datasets: Any = ("builtin",), **options: Any
) -> Table:
    """Measure methods x data sets x k, a row at a time, into a folder; called again, it goes on where it was.

    Args:
        target: as in :func:`load`, or params.
        methods: drafters as in :func:`bench`; default "ngram" and those that come with the package.
        datasets: as in :func:`bench`, one or several.
        out: folder. It gets ``rows.jsonl`` (a line per row, on disk before the next begins), ``rows.csv``,
            ``table.md``, plots as PNG. ValueError when it holds rows of other settings or of another machine.
        k: drafts per round ((1, 3, 5, 7)), "auto", or "best": of what ``out`` holds of the method on that data set at
            batch 1 and temperature 0.
        batch, temperature, limit, max_new_tokens, repeats (1), platform, parts and the rest: as in :func:`bench`.
        best_repeats: measure the best k of every method and data set once more, with so many repeats.
        plain_every: plain decoding answers a data set once; beside every row, every so many of its batches (4) are
            decoded plainly again, in turn with the row's own, and ratios are to plain decoding as fast as it is then.
        max_len: token buffer; default: what serves every data set, so that they share their programs.
        compile_threads: programs of a method that are compiled at once, before its first row; default: half the
            processors, at most eight. 1: each when it is needed.
        seconds: begin no row that would not fit, as long as the longest took; ``finished`` of the table tells.
        done: called with the table so far and every new row.

    Returns:
        :class:`specjax.bench.table.Table`.
    """
    from specjax.bench import sweep as module

    return module.sweep(target, methods, datasets, **options)


def save(params: Params, folder: str | Path) -> None:
    """Write everything to one folder (orbax arrays + JSON); :func:`load` reads it back, fastest of all."""
    checkpoints.orbax.save(params, folder)


def export(
    params: Params,
    folder: str | Path,
    layout: str = "own",
    dtype: str = "bfloat16",
    *,
    compact: bool | float = False,
    target: str | None = None,
) -> None:
    """Write the drafter of ``params`` to a folder that :func:`load`, or another library, reads as a drafter.

    Args:
        params: a target with one drafter that has weights.
        folder: made whole or not at all. What an earlier call wrote there is replaced; anything else is left alone.
        layout: ``"own"``, ``"speculators"`` (which vLLM reads), ``"deepspec"``, ``"zlab"``, ``"eagle"``,
            ``"transformers"`` (assistants) or ``"native"`` (layers for multi-token prediction): docs/formats.md.
        dtype: of the weights: ``"bfloat16"``, ``"float32"``, ``"float16"`` or ``"same"`` (as they are).
        compact: store large matrices in about 4.5 bits per weight, or in as many as given, and vectors in 16 bits,
            whatever ``dtype`` (own layout only).
        target: what the file calls its target; default: what ``params`` were loaded as.

    Settings of use (``k``, ``drafting``, ...) that a layout has no place for are told in a warning.

    Raises:
        ValueError: the layout cannot hold this drafter (the message says why, and which layouts can); weights that are
            not finite or do not fit the config.
        FileExistsError: the folder holds something that was not written by this function.
    """
    checkpoints.export(params, folder, layout, dtype, compact, target)


def cast(params: Params, dtype: Any) -> Params:
    """Floating leaves in another dtype; integer tables, and what a target always keeps in float32, are left alone."""
    dtype = _dtype(dtype, None)
    one = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    specs = registry.target(params.meta.family).abstract(params.meta.target_cfg)
    target = jax.tree.map(
        lambda spec, x: x if spec.dtype else one(x),
        specs,
        params.target,
        is_leaf=lambda x: isinstance(x, ArraySpec),
    )
    return dataclasses.replace(params, target=target, drafter=jax.tree.map(one, params.drafter))


def start(params: Params, prompt: Any, *, seed: int | None = None, **options: Any) -> State:
    """Prefilled :class:`~specjax.types.State` for :func:`draft_step` and :func:`verify_step`.

    Options as in :func:`decode`. Sampling needs an explicit ``seed``: there is no hidden key.
    """
    call = calls.plan(params, prompt, seed=0 if seed is None else seed, **options)
    if seed is None and "temperature" in call.program.flags:
        raise ValueError("sampling needs a key: pass seed=")
    if any(job.options.stop_strings for job in call.jobs):
        raise ValueError(
            "start takes stop ids only: stop strings are found on the host, by decode and stream"
        )
    program = dataclasses.replace(call.program, rows=len(call.jobs))
    call.program = program
    engine = call.engines()[0]
    host, chunk = host_state(program, list(call.jobs)), call.drive.prefill_chunk
    return memory.run(lambda: prefill_rows(engine, host, chunk)[0], call)


def draft_step(
    params: Params, state: State, key: Array | None = None, *, k: int | None = None
) -> tuple[Proposal, State]:
    """First half of a round, pure: ask the drafter for up to ``k`` tokens per row. Never donates.

    ``key`` replaces the rows' own keys. Raises ValueError when sampling without any key.
    """
    width = calls.width(params.meta, k)
    return _round.draft(params.meta.pair, (params.target, params.drafter), _keyed(state, key), width)


def verify_step(
    params: Params,
    state: State,
    proposal: Proposal,
    key: Array | None = None,
    *,
    rule: str | None = None,
    logprobs: bool = False,
) -> tuple[State, Verdict]:
    """Second half of a round, pure: check a proposal in one target pass, commit what is kept.

    Raises ValueError when sampling without any key, and for a proposal wider than the ``k`` the state was
    started with.
    """
    _check_width(params, state, proposal.tokens.shape[1])
    weights, chosen = (params.target, params.drafter), acceptance_rule(params.meta, rule)
    state, verdict, _ = _round.verify(
        params.meta.pair, weights, _keyed(state, key), proposal, chosen, logprobs
    )
    return state, verdict if logprobs else dataclasses.replace(verdict, logprobs=None)


def _check_width(params: Params, state: State, k: int) -> None:
    """A cache made for narrower blocks has no room for this one at the end of the buffer."""
    (rows, size), meta = state.tokens.shape, params.meta
    create = registry.target(meta.family).init_cache
    wanted = jax.eval_shape(lambda: create(meta.target_cfg, rows, size + k + 1, k + 1, jnp.float32))
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(state.target), strict=True)
    if any(need > have for a, b in pairs for need, have in zip(a.shape, b.shape, strict=True)):
        raise ValueError(
            f"the proposal is {k} wide, more than the state was started for: pass k={k} to start"
        )


def _keyed(state: State, key: Array | None) -> State:
    if key is not None and not state.sampling.greedy:
        rows = jnp.arange(state.length.shape[0])
        data = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, rows))
        return dataclasses.replace(state, key_data=data)
    if not state.sampling.greedy and state.key_data is None:
        raise ValueError("sampling needs a key: pass key=, or start the state with seed=")
    return state
