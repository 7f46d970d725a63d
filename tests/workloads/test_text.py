"""``text``: characters and the following ones, from the standard library or a file, and a causal transformer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from passing import batches

from syncline.errors import DataError, UsageError
from syncline_bench.workloads import load

SENTENCE = b"The quick brown fox jumps over the lazy dog. \xc3\xa4\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "file.txt"
    found.write_bytes(SENTENCE * 400)
    return found


def test_the_standard_library_is_cut_into_sequences() -> None:
    workload, again = load("text"), load("text")
    assert workload.test is not None
    assert (len(workload.train), len(workload.test)) == (7680, 511)
    characters, following = next(batches(workload, 1, 2, 32, seed=3, epoch=0))
    assert characters.shape == following.shape == (16, 64)
    assert np.array_equal(characters[:, 1:], following[:, :-1])
    assert all(np.array_equal(one, other) for one, other in zip(
        (characters, following), next(batches(again, 1, 2, 32, seed=3, epoch=0)), strict=True))  # fmt: skip


def test_a_file_is_taken_whole_and_what_is_not_ascii_is_one_character(path: Path) -> None:
    workload = load(f"text:{path}(width=32, layers=1)")
    assert workload.name == f"text:{path}(width=32, layers=1)"
    assert workload.test is not None
    total = (400 * len(SENTENCE) - 1) // 64
    assert len(workload.train) + len(workload.test) == total
    every, _ = workload.train.take(np.arange(len(workload.train)))
    tested, _ = workload.test.take(np.arange(len(workload.test)))
    whole = np.insert(every.reshape(-1, 64), np.arange(15, 15 * (len(tested) + 1), 15), tested, axis=0).reshape(-1)
    wanted = np.frombuffer((SENTENCE * 400)[: 64 * total], np.uint8)
    assert np.array_equal(whole, np.minimum(wanted, 127))


def test_scores_depend_on_no_later_character(path: Path) -> None:
    model = load(f"text:{path}(width=64, layers=2)").model(0).eval()
    one = torch.randint(0, 128, (1, 64), generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[0, 40:] = (one[0, 40:] + 1) % 128
    with torch.no_grad():
        first, second = model(one), model(other)
    assert first.shape == (1, 128, 64)
    assert torch.allclose(first[..., :40], second[..., :40], atol=1e-6)
    assert not torch.allclose(first[..., 40], second[..., 40], atol=1e-3)


def test_the_output_shares_the_weights_of_the_embedding() -> None:
    model = load("text").model(0)
    assert model.output.weight is model.embedding.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_214_464


def test_it_learns_and_accuracy_counts_characters(path: Path) -> None:
    workload = load(f"text:{path}(width=32, layers=1)")
    torch.manual_seed(0)
    model = workload.model(0)
    before = workload.evaluate(model)
    optimizer = workload.optimizer(model)
    for characters, following in [*batches(workload, 0, 1, 32, 0, 0), *batches(workload, 0, 1, 32, 0, 1)]:
        optimizer.zero_grad()
        workload.loss(model(torch.from_numpy(characters)), torch.from_numpy(following)).backward()
        optimizer.step()
    after = workload.evaluate(model)
    assert before is not None
    assert after is not None
    assert before[0] < 0.1
    assert 0.3 < after[0] <= 1
    assert after[1] < 0.7 * before[1]


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("text(width=100)", UsageError, "width must be a multiple of 32 up to 4096, got 100"),
        ("text(width=4128)", UsageError, "width must be a multiple of 32 up to 4096, got 4128"),
        ("text(layers=0)", UsageError, "layers must be a number from 1 to 64, got 0"),
        ("text(layers=65)", UsageError, "layers must be a number from 1 to 64, got 65"),
        ("text(channels_last=on)", UsageError, "channels_last=on is a layout of images, and text has none"),
        ("text:/nowhere/at.all", DataError, "text:/nowhere/at.all: the file cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_said(text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load(text)


@pytest.mark.parametrize(("count", "fine"), [(2048, False), (2049, True)])
def test_a_text_has_at_least_a_batch(tmp_path: Path, count: int, fine: bool) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(b"a" * count)
    if fine:
        assert len(load(f"text:{short}").train) == 30
    else:
        with pytest.raises(UsageError, match="has 2048 bytes, but a batch takes 2049: give a longer text"):
            load(f"text:{short}")
