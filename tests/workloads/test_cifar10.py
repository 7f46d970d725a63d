"""CIFAR-10 from files: the binary version in its folder, and everything that can be wrong with it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import DataError
from syncline_bench.workloads import cifar10, load
from syncline_bench.workloads.cifar10 import FOLDER, PARTS, RECORD_BYTES, read

IMAGES = 4


def batch(part: str) -> tuple[np.ndarray, list[int]]:
    """A few random images and labels, the same for the same part."""
    random = np.random.default_rng(PARTS.index(part))
    return random.integers(0, 256, (IMAGES, 3072), dtype=np.uint8), random.integers(0, 10, IMAGES).tolist()


def encode(pixels: np.ndarray, labels: list[int]) -> bytes:
    return np.column_stack([np.array(labels, np.uint8), pixels]).tobytes()


def folder(path: Path, **changed: bytes | None) -> Path:
    """Write all parts but those that are changed to None; the folder."""
    contents = {part: encode(*batch(part)) for part in PARTS} | changed
    path.mkdir(parents=True, exist_ok=True)
    for part, data in contents.items():
        if data is not None:
            (path / f"{part}.bin").write_bytes(data)
    return path


@pytest.mark.parametrize("inner", [".", FOLDER])
def test_the_images_are_read_from_their_folder_and_from_the_one_above(tmp_path, inner):
    folder(tmp_path / inner)
    (pixels, labels), (test_pixels, test_labels) = read(tmp_path)
    expected = [batch(part) for part in PARTS]
    assert pixels.shape == (5 * IMAGES, 3, 32, 32)
    assert np.array_equal(pixels.reshape(-1, 3072), np.concatenate([part[0] for part in expected[:-1]]))
    assert labels.tolist() == [label for part in expected[:-1] for label in part[1]]
    assert np.array_equal(test_pixels.reshape(-1, 3072), expected[-1][0])
    assert test_labels.tolist() == expected[-1][1]
    assert labels.dtype == test_labels.dtype == np.int64


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"incomplete: data_batch_3\.bin, test_batch\.bin missing"):
        read(folder(tmp_path, data_batch_3=None, test_batch=None))


def test_a_path_without_data_says_what_is_expected(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no CIFAR-10 data: expected data_batch_1\.bin"):
        read(tmp_path)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"any")
    with pytest.raises(DataError, match="is a file: unpack the archive"):
        read(tmp_path / "cifar-10-binary.tar.gz")


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"cos\nsystem\n")
    for path in (tmp_path, tmp_path / "cifar-10-batches-py"):
        with pytest.raises(DataError, match=r"as pickles, which are not read: expected .*cifar-10-binary\.tar\.gz"):
            read(path)


@pytest.mark.parametrize(("kept", "expected"), [(0, 3073), (3072, 3073), (3074, 6146), (4 * 3073 - 1, 4 * 3073)])
def test_a_truncated_file_is_measured(tmp_path, kept, expected):
    data = encode(*batch("data_batch_2"))[:kept]
    with pytest.raises(DataError, match=rf"data_batch_2\.bin is truncated.* {expected} bytes, found {kept}$"):
        read(folder(tmp_path, data_batch_2=data))


def test_a_label_that_does_not_exist_is_named(tmp_path):
    pixels, labels = batch("data_batch_4")
    with pytest.raises(DataError, match=r"data_batch_4\.bin is altered: image 2 has label 10, the greatest is 9"):
        read(folder(tmp_path, data_batch_4=encode(pixels, [*labels[:2], 10, labels[3]])))


def test_a_file_larger_than_any_of_cifar_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "MOST_BYTES", IMAGES * RECORD_BYTES)
    assert len(read(folder(tmp_path))[0][1]) == 5 * IMAGES
    monkeypatch.setattr(cifar10, "MOST_BYTES", IMAGES * RECORD_BYTES - 1)
    with pytest.raises(DataError, match="more than 12291: not CIFAR-10"):
        read(tmp_path)


@given(data=st.one_of(st.binary(max_size=9), st.binary(min_size=RECORD_BYTES - 1, max_size=2 * RECORD_BYTES)))
def test_any_bytes_are_images_or_an_error(tmp_path_factory, data):
    path = folder(tmp_path_factory.mktemp("any"), test_batch=data)
    if not data or len(data) % RECORD_BYTES or max(data[::RECORD_BYTES]) > 9:
        with pytest.raises(DataError, match=r"test_batch\.bin is"):
            read(path)
    else:
        images, labels = read(path)[1]
        assert encode(images.reshape(-1, 3072), labels.tolist()) == data


def test_the_workload_is_caffes(tmp_path):
    path = folder(tmp_path)
    workload = load(f"cifar10:{path}")
    assert workload.name == f"cifar10:{path}"
    assert (workload.batch, workload.global_batch) == (100, True)
    images, _ = workload.train.take(np.arange(len(workload.train)))
    assert abs(images.mean(0)).max() == pytest.approx(0, abs=1e-3)
    model = workload.model(0)
    accuracy, loss = workload.evaluate(model)
    assert 0 <= accuracy <= 1
    assert loss > 0
    optimizer = workload.optimizer(model)
    rates = {id(tensor): group["lr"] for group in optimizer.param_groups for tensor in group["params"]}
    for name, tensor in model.named_parameters():
        assert rates[id(tensor)] == (0.002 if name.endswith("bias") else 0.001)
    assert all((group["momentum"], group["weight_decay"]) == (0.9, 0.004) for group in optimizer.param_groups)


def test_the_learning_rate_falls_for_the_last_fifth(tmp_path):
    workload = load(f"cifar10:{folder(tmp_path)}")
    optimizer = workload.optimizer(torch.nn.Linear(1, 1))
    schedule = workload.schedule(optimizer, 50)
    rates = []
    for _ in range(50):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.001] * 40 + [0.0001] * 10)
