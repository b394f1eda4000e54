"""Plays: speakers are owners, pieces hold all that is said, and what is learnt is the next token."""

from __future__ import annotations

import lzma
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commands import raffm
from raffm.data import plays
from raffm.data.examples import Examples
from raffm.data.sources import load
from raffm.data.task import Batch, LanguageModelling, kind_of
from raffm.data.text import Bytes
from raffm.errors import CheckpointError, DataError
from raffm.models.load import tiny, trainable

PLAY = "\n\n".join(f"{name}:\n{word * 300}" for _ in range(2) for name, word in (("ROMEO", "love "), ("TYBALT", "peace ")))


@pytest.fixture
def play(tmp_path: Path) -> Path:
    path = tmp_path / "verona" / "input.txt.xz"
    path.parent.mkdir()
    path.write_bytes(lzma.compress(PLAY.encode()))
    return path


def test_speakers_keep_their_words_and_those_who_say_little_are_left_out() -> None:
    said = plays.speeches(PLAY + "\n\nNURSE:\nAy, ay.\n\nno speaker at all")
    assert list(said) == ["ROMEO", "TYBALT"]
    assert said["ROMEO"] == "\n".join(["love " * 300] * 2)


@pytest.mark.parametrize("place", ["verona", "verona/input.txt.xz"])
def test_every_piece_is_what_its_owner_says_and_all_of_it_is_there(play: Path, place: str) -> None:
    dataset = load(str(play.parent.parent / place), tokenizer=Bytes(), max_length=64)
    assert dataset.owners is not None
    assert kind_of(dataset) == "language"
    said = list(plays.speeches(PLAY).values())
    counts = [0, 0]
    for examples, owners in zip((dataset.train, dataset.test), dataset.owners, strict=True):
        for place_, owner in enumerate(owners):
            length = int(examples.inputs["lengths"][place_])
            words = bytes(examples.inputs["input_ids"][place_, :length].tolist()).decode()
            assert words in said[owner]
            assert examples.labels[place_, :length].tolist() == examples.inputs["input_ids"][place_, :length].tolist()
            assert (examples.labels[place_, length:] == plays.IGNORED).all()
            counts[owner] += length
    assert counts == [len(words.encode()) for words in said]
    assert all(set(owners) == {0, 1} for owners in dataset.owners)
    assert len(dataset.test) == math.ceil(0.2 * (len(dataset.train) + len(dataset.test)))


@given(st.lists(st.integers(2, 8), min_size=1, max_size=5), st.integers(0, 99))
def test_perplexity_is_that_of_the_family_whatever_the_padding(lengths: list[int], seed: int) -> None:
    """Over all tokens alike; the family's own loss sees one text at a time."""
    model = tiny("gpt2", vocab_size=32).eval()
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 32, (len(lengths), 8), generator=draw)
    labels = torch.where(torch.arange(8) < torch.tensor(lengths)[:, None], ids, plays.IGNORED)
    examples, task = Examples({"input_ids": ids.int(), "lengths": torch.tensor(lengths)}, labels), LanguageModelling(multiple=1)
    with torch.no_grad():
        outputs = task.forward(model, task.batch(examples, torch.arange(len(lengths))))
        own = [float(model(ids[at : at + 1, :n], labels=ids[at : at + 1, :n]).loss) for at, n in enumerate(lengths)]  # type: ignore[operator]
    assert task.losses(outputs, labels).tolist() == pytest.approx(own, rel=1e-4)
    mean = sum(loss * (n - 1) for loss, n in zip(own, lengths, strict=True)) / sum(n - 1 for n in lengths)
    assert task.metrics(outputs, labels)["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)


def test_gradients_are_those_of_the_mean_loss() -> None:
    model, task = tiny("llama", vocab_size=16), LanguageModelling()
    ids = torch.randint(0, 16, (3, 8), generator=torch.Generator().manual_seed(0))
    batch = Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids)
    weights = list(model.parameters())
    mine = torch.autograd.grad(task.losses(task.forward(model, batch), ids).mean(), weights)
    theirs = torch.autograd.grad(model(ids, labels=ids).loss, weights)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("family", "method"), [("gpt2", "raffm"), ("llama", "heterofl")])
def test_a_language_is_learnt_by_speakers_of_two_sizes(play: Path, tmp_path: Path, family: str, method: str) -> None:
    words = [f"--data={play.parent}", f"--model={family}:tiny", f"--method={method}", "--split=column", "--fleet=1, 1/2"]
    words += ["--set=data.tokenizer=bytes", "--rounds=2", "--lr=0.01", "--set=participation.clients=2", "--no-tensorboard"]
    words += ["--set=method.masked_loss=false"] if method == "heterofl" else []
    ran = raffm("train", *words, "--set=data.max_length=16", f"--folder={tmp_path / 'run'}")
    assert ran.returncode == 0, ran.stderr
    assert "of 2 clients" in ran.stdout + ran.stderr
    assert "perplexity" in (tmp_path / "run" / "metrics.csv").read_text()
    if family == "gpt2":
        long = raffm("train", *words, "--set=data.max_length=999", f"--folder={tmp_path / 'long'}")
        assert "positions: set data.max_length to" in long.stderr


def test_wrong_plays_are_refused_in_words(tmp_path: Path, play: Path) -> None:
    (tmp_path / "prose.txt").write_text("Once upon a time.")
    with pytest.raises(DataError, match="has no speaker with 1000 characters"):
        load(str(tmp_path / "prose.txt"), tokenizer=Bytes())
    (tmp_path / "torn.txt.xz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        load(str(tmp_path / "torn.txt.xz"), tokenizer=Bytes())
    with pytest.raises(DataError, match="Give a tokenizer"):
        load(str(play))
    with pytest.raises(DataError, match="at least 2"):
        load(str(play), tokenizer=Bytes(), max_length=1)
    with pytest.raises(CheckpointError, match="has no model that writes texts"):
        trainable("vit:tiny", "language", 256)
    tiny("gpt2", vocab_size=64).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"256 tokens, but .* knows 64"):
        trainable(str(tmp_path / "small"), "language", 256)
