"""Training EAGLE-3: loss and gradients are those of speculators where its recipe is the same."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import packing
import pytest
import torch
from pairwise import name, pairwise
from parity.eagle3_package import DRAFT, VOCAB, WIDTH, build
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import metrics as reference_metrics

from specjax import checkpoints, testing
from specjax.train.methods import eagle3
from specjax.train.serial import Rows, labelled
from specjax.train.types import Features
from specjax.types import Shared

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

STEPS, DECAY, TAPS, LENGTH = 3, 0.8, (1, 2, 4), 26
VARIANTS = {
    "body": ("llama", "qwen3"),
    "before_residual": (False, True),
    "norms": ("none", "norm_before_fc", "fc_norm"),
    "norm_output": (False, True),
    "terms": ("kl", "others"),
    "layers": (1, 2),
}
TERMS = {"kl": (("kl", 1.0),), "others": (("rkl", 0.25), ("tv", 2.0))}
THEIRS = {
    "kl": "kl_div",
    "rkl": "rkl",
    "tv": "tv",
}  # its hard labels are the teacher's best tokens, not the text's
CASES = pairwise(VARIANTS)


@functools.cache
def target():
    return testing.tiny_params(vocab=VOCAB, width=WIDTH, layers=5)


def lent() -> Shared:
    return Shared(target().target.embed, target().target.head)


def load(found, folder):
    """Weights of the package's module as ours."""
    found.save_pretrained(folder)
    source = checkpoints.hub.resolve(folder)
    return checkpoints.load_drafter(source, target().meta.target_cfg, lent(), jnp.float32)


def inputs(documents: list[tuple[list[int], int]]):
    """One packed row of documents with random features."""
    batch, rng = packing.packed([documents], LENGTH), np.random.default_rng(1)
    random = lambda: jnp.asarray(rng.standard_normal((1, LENGTH, WIDTH)) * 2, jnp.float32)  # noqa: E731
    return batch, Features(random(), {tap: random() for tap in TAPS})


def theirs(found, batch, features, ids: np.ndarray, terms, counted: np.ndarray | None):
    """Loss of the package's own forward pass, gradients left in the module. ``counted`` [k R T]: which rows of each
    step count, in place of its own rule, by which rows at a document's end go on into the next one."""
    doc, pos = np.asarray(batch.doc[0]), np.asarray(batch.pos[0])
    at = np.flatnonzero((doc >= 0) & (np.append(doc[1:], -1) == doc))  # pairs within a document
    tensor = lambda x: torch.tensor(np.asarray(x))[None]  # noqa: E731
    taps = np.concatenate([np.asarray(features.taps[tap])[0] for tap in TAPS], -1)
    labels = np.asarray(batch.trained[0])
    inside = (pos[at] + 2 < np.array([np.sum(doc == doc[i]) for i in at])) & labels[
        np.minimum(at + 2, LENGTH - 1)
    ]
    with torch.no_grad():  # the teacher's head; its states are normed already
        found.verifier_lm_head.weight.copy_(torch.tensor(np.asarray(lent().head)[ids]))
    found.verifier_norm = torch.nn.Identity()
    plain = reference_metrics.align_for_step

    def aligned(logits, targets, loss_mask, prev_correct, step):
        out = plain(logits, targets, loss_mask, prev_correct, step)
        rows = tensor(counted[step][0, at[: len(at) - step]])
        return out[0], out[1], rows, out[3]

    found.zero_grad()
    try:
        if counted is not None:
            reference_metrics.align_for_step = aligned
        _, loss, _ = found(
            tensor(taps[at]),
            tensor(np.asarray(batch.tokens[0])[at + 1].astype(np.int64)),
            tensor(doc[at].astype(np.int64)),
            loss_mask=tensor(inside),
            verifier_last_hidden_states=tensor(np.asarray(features.hidden[0])[at + 1]),
            ttt_steps=STEPS,
            ttt_step_loss_decay=DECAY,
            loss_config={
                THEIRS[n]: (resolve_loss_config(THEIRS[n], "eager")[THEIRS[n]][0], c) for n, c in terms
            },
        )
    finally:
        reference_metrics.align_for_step = plain
    loss.backward()
    return float(loss.detach())


def gradients_of(found, folder):
    """Gradients of the package's module in our layout; what it does not train keeps its weights."""
    slopes = copy.deepcopy(found)
    with torch.no_grad():
        for (_, p), (_, source) in zip(slopes.named_parameters(), found.named_parameters(), strict=True):
            if source.grad is not None:
                p.copy_(source.grad)
    return load(slopes, folder).weights


@functools.partial(jax.jit, static_argnums=(1, 2))
def learned(p, cfg, recipe, shared, batch, features):
    def loss(trained):
        return eagle3.loss(p.replace(**trained), shared, cfg, recipe, batch, features, jax.random.key(0))[0]

    fields = ("input_norm", "fc_norm", "fc", "hidden_norm", "layers", "norm", "head")
    return jax.value_and_grad(loss)({field: getattr(p, field) for field in fields})


def compare(case, folder, documents, draft: int, ruled: bool):
    found = build({k: case[k] for k in ("body", "before_residual", "norms", "norm_output")}, TAPS, draft,
                  num_hidden_layers=case["layers"])  # fmt: skip
    found.lm_head.weight.requires_grad_(True)  # frozen there, and trained here where it is the drafter's own
    loaded = load(found, folder / "weights")
    batch, features = inputs(documents)
    recipe = eagle3.recipe(dtype="float32", unroll=STEPS, decay=DECAY, terms=TERMS[case["terms"]])
    head = eagle3.head(loaded.weights, lent(), loaded.cfg)
    ids = np.arange(VOCAB) if head.ids is None else np.asarray(head.ids)
    tokens, wanted = labelled(batch, Rows(None, batch.doc >= 0), STEPS)
    counted = np.asarray(wanted & (head.labels(tokens, VOCAB) >= 0))
    assert counted.any((1, 2)).all()
    theirs_loss = theirs(found, batch, features, ids, TERMS[case["terms"]], counted if ruled else None)
    loss, slopes = learned(loaded.weights, loaded.cfg, recipe, lent(), batch, features)
    scale = sum(DECAY**k for k in range(STEPS))  # theirs is a sum over steps, ours the mean
    np.testing.assert_allclose(float(loss) * scale, theirs_loss, rtol=1e-4)
    wanted = gradients_of(found, folder / "gradients")
    for field, slope in slopes.items():
        jax.tree.map(
            lambda a, b, field=field: np.testing.assert_allclose(
                a * scale, b, atol=1e-4, rtol=1e-4, err_msg=field
            ),
            slope,
            getattr(wanted, field),
        )


def texts(seed: int, *lengths: tuple[int, int]) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, VOCAB, n).tolist(), prompt) for n, prompt in lengths]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if i == 0 else pytest.mark.long) for i, c in enumerate(CASES)],
    ids=name,
)
def test_loss_and_gradients_of_packed_documents(case, tmp_path):
    """PEER.15: recycled steps, a reduced vocabulary, documents in one row; rows that leave their document left out."""
    compare(case, tmp_path, texts(2, (12, 4), (3, 1), (8, 2)), DRAFT, True)


def test_loss_and_gradients_by_its_own_rule(tmp_path):
    """A single document, all of it trained, whole vocabulary: nothing of the package is replaced."""
    case = {
        "body": "llama",
        "before_residual": True,
        "norms": "norm_before_fc",
        "norm_output": True,
        "layers": 1,
    }
    compare(case | {"terms": "kl"}, tmp_path, texts(3, (LENGTH, 2)), VOCAB, False)
