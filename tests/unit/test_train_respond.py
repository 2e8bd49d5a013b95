"""The target's own answers: those of decoding, also after any stop; conversations; given answers."""

import json
import os
import signal
import subprocess
import sys
import time

import families
import jax
import numpy as np
import pytest
import tiny_files
from tiny_models import CONTEXT, greedy, target, token, tokenizer_folder, with_meta
from typer.testing import CliRunner

import specjax
from specjax import checkpoints, cli, prompts as encoding
from specjax.core import platform
from specjax.core.loop import host_state
from specjax.core.programs import fill_caches
from specjax.train import answering, answers, given, prompts, respond, store, store_files
from specjax.train.respond import prepare, seed_of
from specjax.types import tree_bytes

BUDGET, HOT = 10, 8.0
#: One program serves most tests: rows, buffer, budget and the switched-on options are the same.
OPTIONS = {"max_new_tokens": BUDGET, "temperature": (0, HOT), "samples": 3, "rows": 4, "verbose": False}
TURNS = [[f"hello {i} a{i}"] for i in range(9)]


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
    monkeypatch.setattr(answering, "enable_compilation_cache", lambda: None)


def speaker(**meta):
    """The small target; "b" ends its turns, too."""
    return with_meta(target(), **({"eos_ids": (2, token("b"))} | meta))


def write(path, turns=TURNS) -> str:
    path.write_text("\n".join(json.dumps({"turns": t}) for t in turns))
    return str(path)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("prompts") / "p.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where ``whole`` lies."""
    return tmp_path_factory.mktemp("texts") / "whole"


@pytest.fixture(scope="module")
def whole(folder, source):
    """Prepared without a stop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "enable_compilation_cache", lambda: None)
        return prepare(speaker(), source, folder, **OPTIONS)


def test_answers_are_those_of_decoding(whole, source):
    """Sample s of a prompt is decode's with the prompt's seed; one is greedy, the others are not."""
    asked = prompts.read(source).items
    texts = [p.asked[0] for p in asked]
    seeds = [seed_of(0, p.id) for p in asked]
    assert len(set(seeds)) == len(seeds)
    out = specjax.decode(
        speaker(),
        texts * 2,
        max_new_tokens=BUDGET,
        temperature=[0] * 9 + [HOT] * 9,
        n=3,
        rows=4,
        seed=seeds * 2,
        verbose=False,
    )
    done = [[c.tokens for c in samples] for samples in out.completions]
    assert len(whole) == 27
    reasons = set()
    for i in range(len(whole)):
        d = whole.document(i)
        at = [p.id for p in asked].index(d.prompt)
        completion = out.completions[at + 9 * (d.sample > 0)][d.sample]
        ((first, stop),) = d.spans
        assert d.ids[first:stop].tolist() == completion.tokens == done[at + 9 * (d.sample > 0)][d.sample]
        assert d.ids[:first].tolist() == completion.prompt_tokens
        assert stop == len(d.ids)
        assert d.ended == (completion.finish_reason == "stop",)
        assert (whole.temperature[i] == 0) == (d.sample == 0)
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_what_is_told(whole, folder):
    """What the texts were made with, and how many there are."""
    meta = json.loads((folder / "texts.json").read_text())
    assert meta["complete"]
    assert meta["counts"] == whole.counts() == {"p": meta["counts"]["p"]}
    assert meta["counts"]["p"]["documents"] == meta["counts"]["p"]["answers"] == 27
    assert meta["prompts"]["p"] == {"rows": 9, "prompts": 9, "too_long": 0}
    assert meta["sampling"]["temperature"] == [0, HOT]
    assert meta["specjax"] == specjax.__version__
    (run,) = meta["runs"]
    assert run["answers"] == 27
    assert run["tokens"] == meta["counts"]["p"]["trained"]
    assert run["compile_seconds"] > 0


def stop_after(monkeypatch, count: int, error: BaseException):
    """Let a run die when so many conversations are over."""
    tell = answering._Run._tell

    def told(self):
        tell(self)
        if self.conversations >= count:
            raise error

    monkeypatch.setattr(answering._Run, "_tell", told)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("x")], ids=["interrupt", "error"])
def test_going_on_after_a_stop(whole, source, tmp_path, monkeypatch, error):
    """Whatever stops it: what was finished is there, nothing is made twice, and all is as without a stop."""
    monkeypatch.setattr(answering, "SHARD_DOCUMENTS", 4)
    done = []
    for count in (3, 9):
        with monkeypatch.context() as patch:
            stop_after(patch, count, error)
            with pytest.raises(type(error)):
                prepare(speaker(), source, tmp_path, **OPTIONS)
        done.append(len(store.load(tmp_path, partial=True)))
    assert done[0] >= 3
    assert done[1] >= done[0] + 9
    with pytest.raises(ValueError, match="is not finished"):
        store.load(tmp_path)
    out = prepare(speaker(), source, tmp_path, **OPTIONS)
    assert out.digest == whole.digest
    assert out.meta[0]["runs"][-1]["answers"] == 27 - done[1]
    again = prepare(speaker(), source, tmp_path, **OPTIONS)  # nothing is left to do
    assert again.digest == whole.digest
    assert len(again.meta[0]["runs"]) == 1
    assert len(store_files.shard_files(tmp_path)) > 4


def test_a_full_disk(whole, source, tmp_path, monkeypatch):
    """The error is the disk's; what was written before is whole, and the rest is made anew."""
    monkeypatch.setattr(answering, "SHARD_DOCUMENTS", 4)
    write_shard, seen = store_files.Writer.write, []

    def full(self, documents):
        seen.append(len(documents))
        if len(seen) > 2:
            raise OSError(28, "No space left on device")
        write_shard(self, documents)

    monkeypatch.setattr(store_files.Writer, "write", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(speaker(), source, tmp_path, **OPTIONS)
    monkeypatch.setattr(store_files.Writer, "write", write_shard)
    assert len(store.load(tmp_path, partial=True)) == sum(seen[:2])
    assert prepare(speaker(), source, tmp_path, **OPTIONS).digest == whole.digest


def test_more_prompts_and_samples(whole, tmp_path):
    """A folder grows: what is there stays, and is not decoded again; less than it was begun with is refused."""
    few = write(tmp_path / "p.jsonl", TURNS[:4])
    first = prepare(speaker(), few, tmp_path / "out", **OPTIONS | {"samples": 2})
    assert len(first) == 8
    all_of_them = write(tmp_path / "p.jsonl")
    grown = prepare(speaker(), all_of_them, tmp_path / "out", **OPTIONS)
    assert grown.digest == whole.digest
    assert grown.meta[0]["runs"][-1]["answers"] == 27 - 8
    with pytest.raises(ValueError, match="holds 15 answers to prompts or samples that are not asked for now"):
        prepare(speaker(), write(tmp_path / "p.jsonl", TURNS[:4]), tmp_path / "out", **OPTIONS)


def test_other_settings_and_targets_are_refused(whole, folder, source):
    """The folder says what differs; nothing is decoded and nothing lost."""
    cases = [
        ({"temperature": (0, 0.5)}, r"sampling.temperature is \[0, 8.0\] there and \[0, 0.5\] here"),
        ({"seed": 1}, "sampling.seed is 0 there and 1 here"),
        ({"max_new_tokens": 9}, "sampling.max_new_tokens is 10 there and 9 here"),
        ({"top_p": 0.5}, "sampling.top_p is 1.0 there and 0.5 here"),
        ({"chat_template": tiny_files.CHATML + " "}, "tokenizer.template is"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=f"made otherwise: .*{message}"):
            prepare(speaker(), source, folder, **OPTIONS | changes)
    other = speaker()
    other = other.replace(target=other.target.replace(norm=other.target.norm * 1.5))
    with pytest.raises(ValueError, match=r"made otherwise: target.weights is '\w+' there"):
        prepare(other, source, folder, **OPTIONS)
    with pytest.raises(ValueError, match=r"sampling.stop_ids is \[2, \d+\] there and \[2\] here"):
        prepare(target(), source, folder, **OPTIONS)
    assert store.load(folder).digest == whole.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "3 of 3 samples per prompt are greedy"),
        ({"temperature": (HOT, 0)}, "2 of 3 samples per prompt are greedy"),
        ({"temperature": ()}, "temperature is an empty list"),
        ({"temperature": -1}, "temperature must be in"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": CONTEXT}, "exceeds the model's context"),
        ({"max_prompt_tokens": CONTEXT - 5}, r"max_prompt_tokens \(123\) \+ max_new_tokens \(10\) exceeds"),
        ({"max_prompt_tokens": 3}, "all 9 prompts are longer than 3 tokens"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"prefill_chunk": 24}, "prefill_chunk must be a power of two"),
    ],
)
def test_bad_requests(source, tmp_path, changes, message):
    """Before anything is compiled or written."""
    with pytest.raises(ValueError, match=message):
        prepare(speaker(), source, tmp_path / "out", **OPTIONS | changes)
    assert not (tmp_path / "out" / "texts.json").exists()


def test_targets_that_cannot_be_asked(source, tmp_path):
    with pytest.raises(ValueError, match="without a tokenizer"):
        prepare(with_meta(target(), tokenizer_id=""), source, tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match=r"params must come from specjax.load, got str"):
        prepare("smollm2-135m", source, tmp_path, **OPTIONS)


def test_contaminated_and_long_prompts_are_counted(tmp_path):
    long = "hello " * 40
    source = write(tmp_path / "p.jsonl", [*TURNS[:3], [long], ["12 Hell!"]])
    evaluation = write(tmp_path / "e.jsonl", [["12, hell?"]])
    out = prepare(speaker(), source, tmp_path / "out", evaluation=evaluation, max_prompt_tokens=40, **OPTIONS)
    assert out.meta[0]["prompts"]["p"] == {"rows": 5, "prompts": 3, "contaminated": 1, "too_long": 1}
    assert len(out) == 9


# --- conversations


def test_conversations(tmp_path, monkeypatch):
    """Every turn is answered in order, after what was said before; a conversation is one text where its prompts
    continue each other, and ends where there is no room."""
    turns = [["hello", "12 hell", "o"], ["hell"], ["he", "ll " * 30]]
    source = write(tmp_path / "p.jsonl", turns)
    monkeypatch.setattr(answering, "SHARD_DOCUMENTS", 1)
    out = prepare(
        target(),
        source,
        tmp_path / "out",
        max_new_tokens=BUDGET,
        max_prompt_tokens=100,
        rows=2,
        verbose=False,
    )
    tokenizer = checkpoints.tokenizer.get(tokenizer_folder())
    by_prompt = {p.id: p for p in prompts.read(source).items}
    seen = {}
    for i in range(len(out)):
        d = out.document(i)
        seen.setdefault(by_prompt[d.prompt].asked, []).append(d)
    for asked, documents in seen.items():
        said = []
        for ids, answer in plainly(asked, 100):
            said.append((ids, answer))
        stored = [
            (d.ids[:a].tolist(), d.ids[a:b].tolist())
            for d in sorted(documents, key=lambda d: d.part)
            for a, b in d.spans
        ]
        assert stored == said
        one = answers.texts([answers.Turn(*turn, False) for turn in said])
        assert [d.ids.tolist() for d in documents] == [t.ids for t in one]
    assert [len(seen[tuple(t)][0].spans) for t in turns] == [3, 1, 1]
    assert out.meta[0]["runs"][0]["cut"] == 1
    assert out.meta[0]["runs"][0]["answers"] == 5
    shown = answers.shown(tokenizer, seen[tuple(turns[0])][0].ids.tolist(), seen[tuple(turns[0])][0].spans)
    assert shown.count("\u27e6") == 3


def plainly(asked, longest):
    """(prompt ids, answer ids) of a conversation, by whole passes without a cache."""
    tokenizer, messages = checkpoints.tokenizer.get(tokenizer_folder()), []
    for text in asked:
        messages.append({"role": "user", "content": text})
        ids = encoding.encode(target().meta, messages).ids[0].tolist()
        if len(ids) > longest:
            return
        answer = greedy(ids, BUDGET)[0]
        yield ids, answer
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})


def test_raw_prompts(tmp_path):
    """Without a template a lone user turn is the prompt itself; a conversation needs one."""
    base = with_meta(target(), chat_template=None)
    asked = prompts.read(write(tmp_path / "p.jsonl", [["hello 12"]]))
    encode = answering.Encoder(base.meta, None, None)
    tokenizer = checkpoints.tokenizer.get(tokenizer_folder())
    assert encode(asked.items[0].messages).tolist() == tokenizer.encode("hello 12", True)
    with pytest.raises(ValueError, match="no chat template"):
        prepare(
            base, write(tmp_path / "c.jsonl", [["a", "b"]]), tmp_path / "out", max_new_tokens=4, verbose=False
        )


def test_prompts_are_tokenised_together():
    """The ids are those of each alone; an error names its cause as it would alone."""
    talks = [[{"role": "user", "content": t}] for t in ("hello 12", "a", "ll é")]
    talks.append([{"role": "system", "content": "s"}, *talks[0]])
    for template in (None, tiny_files.CHATML + "12", False):
        encode = answering.Encoder(speaker().meta, template, None)
        given_talks = talks[:3] if template is False else talks
        got = encode.several(given_talks)
        assert [ids.tolist() for ids in got] == [encode(talk).tolist() for talk in given_talks]
        assert got[0].dtype == np.int32
    with pytest.raises(ValueError, match="the chat template failed: no"):
        answering.Encoder(speaker().meta, "{{ raise_exception('no') }}", None).several(talks)


def test_rows_that_fit_the_device(monkeypatch):
    """A power of two whose caches leave room: by the free memory of the device, where it is told."""
    call = respond._call(speaker(), {"temperature": [0], "max_new_tokens": 10})
    program, weights = call.program, speaker().target
    assert answering.fitting_rows(program, weights) == answering.CPU_ROWS
    state = jax.eval_shape(lambda: fill_caches(program, host_state(program, [None])))
    size = tree_bytes(state)
    for free, rows in ((size, 1), (41 * size, 16), (1 << 50, answering.MOST_ROWS)):
        monkeypatch.setattr(answering, "_free_bytes", lambda target, free=free: free)
        assert answering.fitting_rows(program, weights) == rows


def test_logits_that_are_not_finite(source, tmp_path):
    """The error names the prompt; what was finished is kept."""
    broken = speaker()
    broken = broken.replace(target=broken.target.replace(norm=broken.target.norm * np.nan))
    with pytest.raises(FloatingPointError, match=r"not finite in an answer to a prompt of p \('hello"):
        prepare(broken, source, tmp_path, **OPTIONS)


# --- real kills, other families

PROGRAM = """
import sys
sys.path[:0] = ["tests", "tests/unit"]
import conftest, pathlib, test_train_respond as t
t.answering.SHARD_DOCUMENTS = 3
t.answering.enable_compilation_cache = lambda: None
tell = t.answering._Run._tell
def slowly(self):
    t.time.sleep(0.15)
    while sys.argv[3:] and len(t.store_files.shard_files(pathlib.Path(sys.argv[2]))) >= 6:
        t.time.sleep(1)  # for the kill
    tell(self)
t.answering._Run._tell = slowly
print("digest", t.prepare(t.speaker(), sys.argv[1], sys.argv[2], **t.OPTIONS).digest, flush=True)
"""


@pytest.mark.long
def test_a_real_kill(whole, source, tmp_path):
    """SIGKILL between shards: what is there is whole, and the end is that of an undisturbed run."""
    command = [sys.executable, "-c", PROGRAM, source, str(tmp_path)]
    process = subprocess.Popen([*command, "wait"], env=os.environ, stdout=subprocess.PIPE)
    while len(store_files.shard_files(tmp_path)) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    held = len(store_files.shard_files(tmp_path))
    assert 2 <= held < 9
    assert len(store.load(tmp_path, partial=True)) == 3 * held
    done = subprocess.run(command, env=os.environ, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().split() == ["digest", whole.digest]


@pytest.mark.long
@pytest.mark.parametrize("name", ["hybrid", "latent", "gemma3"])
def test_recurrent_latent_and_windowed_targets(name, tmp_path):
    """Rows are refilled in targets with recurrent states, latent caches and rings as in any other."""
    if name == "gemma3":
        hf = tiny_files.config(**tiny_files.GEMMA3 | {"vocab_size": 265, "sliding_window": 16})
        base = specjax.testing.tiny_params(2, hf=hf)
    else:
        base = families.target(name, vocab=265)
    base = with_meta(base, tokenizer_id=tokenizer_folder(), chat_template=tiny_files.CHATML, eos_ids=(2,))
    turns = [[f"hello {'12 hell ' * (i % 3)}{i}"] for i in range(20)]
    out = prepare(
        base, write(tmp_path / "p.jsonl", turns), tmp_path / "out", max_new_tokens=24, rows=16, verbose=False
    )
    alone = specjax.decode(base, [t[0] for t in turns], max_new_tokens=24, rows=3, verbose=False)
    asked = {p.id: i for i, p in enumerate(prompts.read(str(tmp_path / "p.jsonl")).items)}
    for i in range(len(out)):
        d = out.document(i)
        ((first, stop),) = d.spans
        assert d.ids[first:stop].tolist() == alone.tokens[asked[d.prompt]]


# --- given answers


TALKS = [
    [("user", "hello"), ("assistant", "hell"), ("user", "12"), ("assistant", "o")],
    [("system", "s"), ("user", "a"), ("assistant", "b")],
]


def conversations(path, talks=TALKS):
    rows = [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in talks]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_given_answers(tmp_path):
    """PEER.22: given conversations become texts of the same kind; asked again, only new ones are added."""
    source = conversations(tmp_path / "c.jsonl")
    out = given.prepare_given(speaker(), source, tmp_path / "out", verbose=False)
    assert len(out) == 2
    assert sorted(len(out.document(i).spans) for i in range(2)) == [1, 2]
    assert np.isnan(out.temperature).all()
    assert out.meta[0]["kind"] == "given"
    again = given.prepare_given(speaker(), source, tmp_path / "out", verbose=False)
    assert again.digest == out.digest
    assert len(store_files.shard_files(tmp_path / "out")) == 1
    more = conversations(tmp_path / "c.jsonl", [*TALKS, [("user", "x"), ("assistant", "y")], [("user", "z")]])
    grown = given.prepare_given(speaker(), more, tmp_path / "out", verbose=False)
    assert len(grown) == 3
    assert grown.meta[0]["prompts"]["c"] == {"rows": 4, "unanswered": 1, "prompts": 3, "unreadable": 0}
    with pytest.raises(ValueError, match="kind is 'given' there and 'own' here"):
        prepare(speaker(), source, tmp_path / "out", **OPTIONS)


def test_given_answers_that_cannot_be_told(tmp_path):
    """TRD.2: an error that names the conversation; with ``lenient`` it is counted, unless it is every one."""
    source = conversations(
        tmp_path / "c.jsonl", [*TALKS, [("assistant", "first"), ("user", "hm"), ("assistant", "x")]]
    )
    fussy = (
        "{% if messages | length == 0 %}{{ raise_exception('nobody asked') }}{% endif %}" + tiny_files.CHATML
    )
    params = speaker(chat_template=fussy)
    with pytest.raises(
        ValueError, match=r"a conversation of c \('hm'\): Cannot apply chat template to an empty"
    ):
        given.prepare_given(params, source, tmp_path / "a", verbose=False)
    out = given.prepare_given(params, source, tmp_path / "b", lenient=True, verbose=False)
    assert len(out) == 2
    assert out.meta[0]["prompts"]["c"] == {"rows": 3, "prompts": 2, "unreadable": 1}
    no_end = speaker(eos_ids=(200,))
    with pytest.raises(ValueError, match="writes no end-of-turn id"):
        given.prepare_given(no_end, source, tmp_path / "c", lenient=True, verbose=False)
    marks = ("<|im_start|>assistant\n", "<|im_end|>")
    by_marks = given.prepare_given(no_end, source, tmp_path / "d", marks=marks, verbose=False)
    assert len(by_marks) == 3


# --- command line


def run(*args: str):
    return CliRunner().invoke(cli.app, ["train", *args])


@pytest.fixture
def loaded(monkeypatch):
    monkeypatch.setattr(platform, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(specjax, "load", lambda *args, **keywords: speaker())


def test_command_line(whole, source, tmp_path, loaded):
    """The same options as the function's; counts and speed at the end; trained tokens shown."""
    wanted = ["--max-new-tokens", "10", "--temperature", "0,8", "--samples", "3", "--rows", "4"]
    out = run("prepare", "small", str(tmp_path), "--prompts", f"p={source}", *wanted)
    assert out.exit_code == 0, out.output
    assert store.load(tmp_path).digest == whole.digest
    assert "p: 27 texts" in out.output
    assert "tokens/s" in out.output
    shown = run("show", "small", str(tmp_path), "--count", "2", "--pairs")
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("\u27e6") == 2
    assert shown.output.count("--- p, prompt") == 2
    first = store.load(tmp_path).document(0)
    assert json.dumps(answers.pairs(first.ids.tolist(), first.spans)) in shown.output
    assert run("show", "small", str(tmp_path), "--source", "q").exit_code == 2


def test_command_line_errors(source, tmp_path, loaded):
    bad = run("prepare", "small", str(tmp_path), "--prompts", source, "--suffix", "q=hm")
    assert (bad.exit_code, "NAME one of p" in bad.output) == (2, True)
    bad = run("prepare", "small", str(tmp_path), "--prompts", source, "--given", "--rows", "3")
    assert (bad.exit_code, "--rows does not go with --given" in bad.output) == (2, True)
    bad = run("prepare", "small", str(tmp_path), "--prompts", source, "--lenient")
    assert (bad.exit_code, "go with --given only" in bad.output) == (2, True)
    bad = run("prepare", "small", str(tmp_path), "--prompts", source, "--temperature", "hot")
    assert (bad.exit_code, "takes numbers with commas" in bad.output) == (2, True)
    talks = conversations(tmp_path / "c.jsonl")
    good = run("prepare", "small", str(tmp_path / "out"), "--prompts", talks, "--given")
    assert good.exit_code == 0, good.output
    assert "c: 2 texts" in good.output
