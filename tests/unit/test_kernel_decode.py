"""Kernels as decoding calls them: interpreted they give the ids and the acceptance of XLA's path, what nobody may see
cannot reach them, one that cannot be built is replaced, and no cache is copied on the way."""

import dataclasses
import functools
import re

import gemma_tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import calls, config, registry, testing
from specjax.core import programs, round as rnd
from specjax.core.cache import DenseKV, RingKV
from specjax.core.loop import host_state, padded
from specjax.drafters.body import Body
from specjax.kernels import block_attention, dispatch, kv_injection, rocm
from specjax.types import Proposal

VOCAB = 8  # so few that drafts of random weights are right now and then
PROMPTS = [[3, 1, 4, 1, 5, 2, 2], [6, 5], [0, 7, 7, 3, 2, 3, 1, 4, 6, 2, 6]]
OPTIONS = {"max_new_tokens": 18, "ignore_eos": True}
GEMMA3 = gemma_tiny.CONFIGS["gemma3"] | {
    "vocab_size": VOCAB, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


@functools.cache
def target(name: str):
    """A target with heads of 16 channels, of which the kernels take no fewer; Gemma's have a window of 6."""
    if name == "llama":
        return testing.tiny_params(hf=testing.tiny_config(vocab=VOCAB, head_dim=16))
    hf = GEMMA3 if name == "gemma3" else gemma_tiny.CONFIGS[name] | {"vocab_size": VOCAB}
    return gemma_tiny.uneven(testing.tiny_params(hf=hf), name)


@functools.cache
def drafted(name: str, method: str | None, **changes):
    """The target with a drafter of random weights whose heads have 16 channels."""
    base = target(name)
    if method is None:
        return base
    cfg = dataclasses.replace(registry.drafter(method).tiny(base.meta.target_cfg), **changes)
    part = "body" if isinstance(getattr(cfg, "body", None), Body) else "model"
    if method != "assistant":
        wide = dataclasses.replace(getattr(cfg, part), head_dim=16)
        cfg = dataclasses.replace(cfg, **{part: wide})
    return testing.tiny_drafter(base, method, 1, cfg)


@pytest.fixture(autouse=True)
def only(request, monkeypatch):
    """No kernels but those of attention and injection, apart from a GPU."""
    if "gpu" not in request.keywords:
        mine = {"block_attention", "kv_injection"}
        table = {op: module if op in mine else None for op, module in dispatch.KERNELS.items()}
        monkeypatch.setattr(dispatch, "KERNELS", table)


@pytest.fixture
def used(monkeypatch):
    """Operations of which kernels were interpreted."""
    names, ask = set(), dispatch._interpreted

    def watched(op, facts, reference):
        run = ask(op, facts, reference)
        if run is not reference:
            names.add(op)
        return run

    monkeypatch.setattr(dispatch, "_interpreted", watched)
    return names


@functools.cache
def plain(name: str):
    """The target's own ids, by XLA."""
    return specjax.decode(target(name), PROMPTS, **OPTIONS, kernels="xla").tokens


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "method", "k", "changes"),
    [
        ("gemma3", None, None, {}),
        ("gemma3", "dflash", 3, {}),
        ("llama", "dflash", 7, {"rows": 8, "window_from": "anchor"}),
        ("gemma3", "dspark", 4, {}),
        ("gemma3", "eagle3", 5, {}),
        ("gemma3", "mtp", 2, {}),
        ("gemma4_small", "assistant", 6, {}),
        ("gemma3", "draft_model", 1, {}),
    ],
)
def test_every_drafter(used, name, method, k, changes):
    """KRN.5, KRN.3: widths 1 to 8 over rings and dense caches, ragged; ids are plain decoding's by XLA, and a row's
    drafts are accepted as often as those that XLA makes."""
    params, wide = drafted(name, method, **changes), {} if k is None else {"k": k}
    got = specjax.decode(params, PROMPTS, **OPTIONS, **wide, kernels="interpret")
    assert got.tokens == plain(name)
    assert used >= {"block_attention"} | ({"kv_injection"} if method in ("dflash", "dspark") else set())
    if method is not None:
        want = specjax.decode(params, PROMPTS, **OPTIONS, **wide, kernels="xla")
        assert sum(s.accepted for s in got.stats) > 0
        assert [(s.proposed, s.accepted) for s in got.stats] == [(s.proposed, s.accepted) for s in want.stats]


# ---------------------------------------------------------------- one round, from caches of the test's making

CACHES = (DenseKV, RingKV)
LENGTHS = (1, 9, 30)  # an empty context; within a window of 6; far beyond it


def rows_of(params, k: int, lengths=LENGTHS):
    """Program and state of rows in the middle of decoding: the context random, what nobody may see not a number.
    A program may have more rows than there are lengths (accelerators' are powers of two): these are idle."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    call = calls.plan(params, prompts, **OPTIONS, **({} if params.meta.drafter is None else {"k": k}))
    state = programs.fill_caches(call.program, host_state(call.program, padded(call.program, call.jobs)))
    seen = np.asarray(state.length)[:, None] - 1

    def fill(kv):
        held = np.arange(kv.k.shape[2])[None]
        if isinstance(kv, RingKV):  # the last position of every slot
            slots = kv.pos.shape[1]
            held = held + np.maximum(seen - 1 - held, 0) // slots * slots
            held = np.where(held < seen, held, -1)
            kv = kv.replace(pos=jnp.asarray(held, jnp.int32))
        there = ((held >= 0) & (held < seen))[:, None, :, None]
        draw = lambda x: jnp.where(there, rng.standard_normal(x.shape), jnp.nan).astype(x.dtype)  # noqa: E731
        return kv.replace(k=draw(kv.k), v=draw(kv.v))

    part = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: fill(x) if isinstance(x, CACHES) else x, tree, is_leaf=lambda x: isinstance(x, CACHES)
    )
    return call.program, dataclasses.replace(state, target=part(state.target), drafter=part(state.drafter))


def one_round(program, want: str, told=None):
    """A round as a function of weights and state: drafts, verdict and the state after. ``told``: what is verified."""

    def run(weights, state):
        with dispatch.asking(want):
            drafts, state = rnd.draft(program.pair, weights, state, program.k)
            proposal = (
                drafts if told is None else Proposal(told, jnp.full(told.shape[:1], told.shape[1], jnp.int32))
            )
            state, verdict, _ = rnd.verify(program.pair, weights, state, proposal)
        return drafts.tokens, verdict.out_tokens, verdict.emitted, state

    return run


def compare(params, want: str, tolerance: float):
    """A round by kernels over caches that hold NaN wherever no row may look, and XLA's over zeros there: the drafts and
    verdicts of both, of the rows that are not idle. Relative errors of what caches then hold, up to the anchor's
    position, which every row has kept, are below ``tolerance``; of rows whose next token is the same, which MTP keeps
    there."""
    program, state = rows_of(params, 3)
    live = slice(len(LENGTHS))
    told = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (program.rows, 3)), jnp.int32)
    clean = jax.tree.map(lambda x: jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    weights, errors = (params.target, params.drafter), []
    *got, after = jax.jit(one_round(program, want, told))(weights, state)
    *wanted, plain = jax.jit(one_round(program, "xla", told))(weights, clean)
    same = np.asarray(got[1][live, 0] == wanted[1][live, 0])
    assert same.mean() > 0.6  # near-ties of bfloat16
    held = lambda tree: [  # noqa: E731
        x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, CACHES)) if isinstance(x, CACHES)
    ]
    for a, b in zip(held((after.target, after.drafter)), held((plain.target, plain.drafter)), strict=True):
        pos = np.asarray(a.pos) if isinstance(a, RingKV) else np.arange(a.k.shape[2])[None]
        shown = ((pos >= 0) & (pos < np.asarray(state.length)[:, None]))[live] & same[:, None]
        for x, y in ((a.k, b.k), (a.v, b.v)):
            x, y = (np.asarray(z, np.float64).swapaxes(1, 2)[live][shown] for z in (x, y))
            errors.append(np.linalg.norm(x - y) / np.linalg.norm(y))
    assert np.max(errors) < tolerance  # not-a-number is no error below it
    return jax.tree.map(lambda x: np.asarray(x)[live], (got, wanted))


def test_what_nobody_may_see_may_be_not_a_number(monkeypatch):
    """I2, KRN.3, KRN.5: values too; with an idle row, as accelerators have it for three."""
    monkeypatch.setattr(config, "backend", lambda: "cuda")
    assert rows_of(drafted("gemma3", "dflash"), 3)[0].rows == 4
    got, wanted = compare(drafted("gemma3", "dflash"), "interpret", 1e-5)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gemma3", "dflash"),
        ("llama", "dspark"),
        ("llama", "eagle3"),
        ("gemma3", "mtp"),
        ("gemma4_small", "assistant"),
    ],
)
def test_a_round_on_the_device(name, method):
    """KRN.5, KRN.6: in bfloat16, and nothing had to be left to XLA."""
    got, wanted = compare(half(drafted(name, method)), "auto", 3e-2)
    assert np.mean(got[0] == wanted[0]) > 0.6  # near-ties may flip
    for op in ("block_attention", "kv_injection"):
        assert dispatch.explain(op).implementation == "kernel"
        assert "could not be built" not in dispatch.explain(op).reason


def half(params):
    return specjax.cast(params, jnp.bfloat16)


@pytest.fixture
def pretend(monkeypatch):
    """The table believes in a GPU."""
    monkeypatch.setattr(dispatch.platform, "backend", lambda: "cuda")
    for table in ("_failed", "_refused"):
        monkeypatch.setattr(dispatch, table, {})
    clear = dispatch._failure.cache_clear
    clear()
    yield monkeypatch
    clear()


def test_kernels_that_cannot_be_built_leave_xla_s_program(pretend):
    """KRN.2, KRN.7: the same program to the letter as without kernels, a warning for each, and doctor knows."""
    params = half(drafted("gemma3", "dflash"))
    program, state = rows_of(params, 3)
    weights = params.target, params.drafter

    def text(want):
        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(one_round(program, want))(weights, state)))

    def fails(*_):
        raise RuntimeError("Shared memory size limit exceeded")

    for entry in (block_attention, kv_injection):
        pretend.setattr(entry, "build", fails)
    with pytest.warns(UserWarning, match=r"kernel \w+: not built for cuda: .*the reference runs instead"):
        got = text("auto")
    assert got == text("xla")
    for op in ("block_attention", "kv_injection"):
        assert "could not be built and run as the reference" in dispatch.explain(op).reason
    with pytest.raises(
        ValueError, match="the Pallas kernel is asked for and cannot serve: not built for cuda"
    ):
        text("pallas")


BLOCK = {"block_attention", "block_attention_join", "kv_injection_project", "kv_injection"}


@pytest.mark.parametrize(
    ("platform", "name", "method", "kernels"),
    [
        ("cuda", "gemma3", "dflash", BLOCK),
        ("rocm", "gemma3", "dflash", BLOCK),
        pytest.param("rocm", "llama", "eagle3", {"block_attention"}, marks=pytest.mark.long),
        pytest.param("cuda", "gemma4_small", "assistant", {"block_attention"}, marks=pytest.mark.long),
    ],
)
def test_no_cache_is_copied_in_the_loop(pretend, platform, name, method, kernels):
    """PRF.8: the chunk of rounds as it is lowered for a GPU makes arrays of a cache's size by writing into one, and by
    nothing else: no transposition, no joining, no change of type."""
    pretend.setattr(dispatch, "_failure", lambda *_: None)
    params = half(drafted(name, method))
    program, state = rows_of(params, 3)
    fn, *rest = programs.chunk_program(program)
    shapes = jax.eval_shape(lambda: ((params.target, params.drafter), state))
    chip = {"cuda": "sm_90", "rocm": "gfx942"}[platform]
    with rocm.device(chip), rocm.compiling():
        lowered = jax.jit(fn, donate_argnums=1).trace(*shapes, *rest).lower(lowering_platforms=(platform,))
    held = {tuple(sorted(x.shape)) for x in jax.tree.leaves((state.target, state.drafter)) if x.ndim == 4}
    made, ours = {}, set()
    for op in rocm.walk(lowered.compiler_ir("stablehlo").operation):
        if op.name == "stablehlo.custom_call":
            ours |= {
                word for word in kernels if f'name = "{word}"' in str(op.attributes["mhlo.backend_config"])
            }
        for result in op.results:
            shape = tuple(getattr(result.type, "shape", ()))
            if tuple(sorted(shape)) in held:
                made.setdefault(op.name, shape)
    assert ours == kernels
    # a case: the one over platforms, of which a compiler knows the outcome
    writes = {"scatter", "dynamic_update_slice", "custom_call", "while", "case"}
    assert {name.removeprefix("stablehlo.") for name in made} - {"func.call"} <= writes, made


def test_kernels_are_part_of_a_program_s_key(monkeypatch):
    """PRF.3: what is asked for selects the program; the environment counts where a call says nothing."""
    key = lambda **more: calls.plan(target("llama"), [1, 2], **more).program  # noqa: E731
    assert key() == key(kernels="auto") != key(kernels="xla")
    monkeypatch.setenv("SPECJAX_KERNELS", "off")
    assert key() == key(kernels="xla")
    with pytest.raises(ValueError, match="kernels must be one of auto, pallas, xla, interpret, got 'triton'"):
        key(kernels="triton")
    with pytest.raises(ValueError, match=r"\w+: .* asked for and cannot serve: the kernel needs a GPU"):
        specjax.decode(target("llama"), [1, 2], max_new_tokens=2, kernels="pallas")
