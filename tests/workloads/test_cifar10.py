"""CIFAR-10 from files: both published forms, folders and archives, and everything that can be wrong with them."""

import contextlib
import gzip
import io
import pickle
import pickletools
import struct
import tarfile
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import DataError
from syncline.workloads import load
from syncline.workloads._cifar10_reader import PARTS, _python, read

IMAGES = 4
ALL_CODES = [code.code.encode("latin1") for code in pickletools.opcodes]
FOLDERS = {"binary": "cifar-10-batches-bin", "python": "cifar-10-batches-py", "python2": "cifar-10-batches-py"}

Files = dict[str, bytes]


def batch(part: str) -> tuple[np.ndarray, list[int]]:
    """A few random images and labels, the same for the same part in every form."""
    random = np.random.default_rng(PARTS.index(part))
    return random.integers(0, 256, (IMAGES, 3072), dtype=np.uint8), random.integers(0, 10, IMAGES).tolist()


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """What Python 2 and numpy 1 wrote: byte strings throughout, old module names."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff"
    state = b"(K\x01J" + struct.pack("<i", len(pixels)) + b"M" + struct.pack("<H", pixels.shape[1]) + b"\x86"
    raw = b"T" + struct.pack("<i", pixels.nbytes) + pixels.tobytes()
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    data = array + state + dtype + b"K\x00tb\x89" + raw + b"tb"
    return b"\x80\x02}(" + text(b"data") + data + text(b"labels") + numbers + b"u."


def encode(form: str, pixels: np.ndarray, labels: list[int]) -> bytes:
    if form == "binary":
        return np.column_stack([np.array(labels, np.uint8), pixels]).tobytes()
    if form == "python2":
        return python2_pickle(pixels, labels)
    return pickle.dumps({b"batch_label": b"small", b"labels": labels, b"data": pixels}, protocol=2)


def files(form: str) -> Files:
    ending = ".bin" if form == "binary" else ""
    return {f"{FOLDERS[form]}/{part}{ending}": encode(form, *batch(part)) for part in PARTS}


def as_folder(path: Path, content: Files) -> Path:
    for name, data in content.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def as_inner_folder(path: Path, content: Files) -> Path:
    as_folder(path, content)
    return path / next(iter(content)).partition("/")[0]


def as_tar(mode: str) -> Callable[[Path, Files], Path]:
    def write(path: Path, content: Files) -> Path:
        with tarfile.open(path / "data.tar", mode) as archive:
            for name, data in content.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return path / "data.tar"

    return write


def as_zip(path: Path, content: Files) -> Path:
    with zipfile.ZipFile(path / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path / "data.zip"


WRITERS = {
    "folder": as_folder,
    "inner folder": as_inner_folder,
    "tar": as_tar("w"),
    "tar.gz": as_tar("w:gz"),
    "tar.xz": as_tar("w:xz"),
    "zip": as_zip,
}


@pytest.mark.parametrize("form", FOLDERS)
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_every_form_in_every_wrapping_gives_the_images(tmp_path, form, writer):
    (pixels, labels), (test_pixels, test_labels) = read(writer(tmp_path, files(form)))
    expected = [batch(part) for part in PARTS]
    assert pixels.shape == (5 * IMAGES, 3, 32, 32)
    assert np.array_equal(pixels.reshape(-1, 3072), np.concatenate([part[0] for part in expected[:-1]]))
    assert labels.tolist() == [label for part in expected[:-1] for label in part[1]]
    assert np.array_equal(test_pixels.reshape(-1, 3072), expected[-1][0])
    assert test_labels.tolist() == expected[-1][1]
    assert labels.dtype == test_labels.dtype == np.int64


def test_archives_may_name_members_with_a_leading_dot(tmp_path):
    dotted = {f"./{name}": data for name, data in files("binary").items()}
    assert len(read(as_tar("w:gz")(tmp_path, dotted))[0][1]) == 5 * IMAGES


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_missing_files_are_named(tmp_path, writer):
    content = files("binary")
    del content["cifar-10-batches-bin/data_batch_3.bin"], content["cifar-10-batches-bin/test_batch.bin"]
    with pytest.raises(DataError, match=r"data_batch_3\.bin, .*test_batch\.bin missing"):
        read(writer(tmp_path, content))


def test_a_path_without_data_says_what_is_expected(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no CIFAR-10 data: expected data_batch_1\.bin"):
        read(tmp_path)
    (tmp_path / "notes").write_text("no archive")
    with pytest.raises(DataError, match="no readable tar or zip archive"):
        read(tmp_path / "notes")


@pytest.mark.parametrize(("kept", "expected"), [(0, 3073), (3072, 3073), (3074, 6146), (4 * 3073 - 1, 4 * 3073)])
def test_a_truncated_binary_file_is_measured(tmp_path, kept, expected):
    content = files("binary")
    name = "cifar-10-batches-bin/data_batch_2.bin"
    content[name] = content[name][:kept]
    with pytest.raises(DataError, match=rf"data_batch_2\.bin is truncated.* {expected} bytes, found {kept}$"):
        read(as_folder(tmp_path, content))


@pytest.mark.parametrize("form", ["binary", "python", "python2"])
def test_a_label_that_does_not_exist_is_named(tmp_path, form):
    content = files(form)
    name = sorted(content)[3]
    pixels, labels = batch(PARTS[3])
    content[name] = encode(form, pixels, [*labels[:2], 10, labels[3]])
    with pytest.raises(DataError, match=r"data_batch_4.* is altered: .*9"):
        read(as_folder(tmp_path, content))


def python_batch(**changes: object) -> bytes:
    pixels, labels = batch("data_batch_1")
    content = {b"data": pixels, b"labels": labels} | {key.encode(): value for key, value in changes.items()}
    return pickle.dumps(content, protocol=2)


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (python_batch(data=np.zeros((IMAGES, 3071), np.uint8)), "found 4 x 3071"),
        (python_batch(data=np.zeros((IMAGES + 1, 3072), np.uint8)), "found 5 x 3072"),
        (python_batch(data=np.zeros((IMAGES, 3072), np.int8)), "of type 'i1'"),
        (python_batch(data=np.zeros((IMAGES, 3072), np.float32)), "of type 'f4'"),
        (python_batch(data=np.asfortranarray(np.zeros((IMAGES, 3072), np.uint8))), "must be 4 x 3072"),
        (python_batch(data=np.zeros(IMAGES * 3072, np.uint8)), "not a two-dimensional array"),
        (python_batch(data=np.full((IMAGES, 3072), None)), "not a two-dimensional array|is altered"),
        (python_batch(data=b"no array"), "must be an array, found bytes"),
        (python_batch(labels=[]), "must be 0 x 3072"),
        (python_batch(labels=None), "must be a list"),
        (python_batch(labels=[0, 1, 2, 3.0]), "must be a list of whole numbers"),
        (python_batch(labels=[0, 1, 2, -1]), "whole numbers from 0 to 9"),
        (pickle.dumps([1, 2], protocol=2), "a dictionary with 'data' and 'labels'"),
        (pickle.dumps({b"data": 1}, protocol=2), "a dictionary with 'data' and 'labels'"),
        (b"", "truncated or altered"),
        (python_batch()[:-100], "found [0-9]+ bytes"),
        (python2_pickle(np.zeros((4, 3072), np.uint8), [0] * 4).replace(b"J\x04\0\0\0", b"J\x05\0\0\0"), "5 x 3072"),
    ],
)
def test_altered_python_files_are_refused(tmp_path, data, hint):
    content = files("python") | {"cifar-10-batches-py/data_batch_1": data}
    with pytest.raises(DataError, match=rf"data_batch_1 .*({hint})"):
        read(as_folder(tmp_path, content))


def test_a_full_python_file_must_have_the_published_sum(tmp_path):
    data = python2_pickle(np.zeros((10_000, 3072), np.uint8), [0] * 10_000)
    with pytest.raises(DataError, match="test_batch is altered: its MD5 sum is not the published 40351d58"):
        read(as_folder(tmp_path, files("python") | {"cifar-10-batches-py/test_batch": data}))


class Command:
    """An object whose pickle runs a function when it is loaded in the ordinary way."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_run_nothing(tmp_path, protocol):
    trace = tmp_path / "trace"
    for attack in (Command(Path.mkdir, trace), Command(exec, f"open({str(trace)!r}, 'w')"), Command(np.load, "x")):
        data = pickle.dumps({b"data": attack, b"labels": []}, protocol=protocol)
        with pytest.raises(DataError, match=r"data_batch_1 is truncated or altered: it names .*, which CIFAR-10 does"):
            read(as_folder(tmp_path, files("python") | {"cifar-10-batches-py/data_batch_1": data}))
    assert not trace.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cnumpy\nndarray\n(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ftR.",  # a huge array, if numpy were asked for it
        b"c_codecs\nencode\n(X\x01\0\0\0aX\x05\0\0\0rot13tR.",
        b"\x80\x04\x8c\x05numpy\x8c\x07os.path\x93.",
        b"cnumpy\ndtype\n(X\x01\0\0\0OtR.",
        b"\x80\x02c_codecs\nencode\nN}X\x0c\0\0\0__defaults__)s\x86b.",  # sets an attribute of what it found
        b"Pelsewhere\n.",
        b"cnumpy\nndarray\n}X\x0c\0\0\0__setstate__Nsb.",
        b"\x82\x01.",
    ],
)
def test_known_names_do_no_harm_either(tmp_path, data):
    with pytest.raises(DataError, match="test_batch"):
        read(as_folder(tmp_path, files("python") | {"cifar-10-batches-py/test_batch": data}))
    assert read(as_folder(tmp_path, files("python")))[1][1].size == IMAGES


HUGE = (1 << 26).to_bytes(4, "little")
VAST = (1 << 62).to_bytes(8, "little")


@pytest.mark.parametrize(
    "data",
    [
        b"Nr" + HUGE + b".",  # the memo's index, binary
        b"Np67108864\n.",  # and in digits
        b"Nj" + HUGE + b".",
        b"Ng67108864\n.",
        *(code + VAST + b"abc." for code in (b"\x8e", b"\x96", b"\x8d", b"\x95")),  # bytes, text, frame
        *(code + b"\xff\xff\xff\x7fabc." for code in (b"B", b"T", b"X", b"\x8b")),
        b"I" + b"9" * 100_000 + b"\n.",
        b"}" * 3_000_000 + b".",
        b"N2" + b"\x86" * 3_000_000 + b".",
        b"(" * 3_000_000 + b".",
    ],
    ids=lambda data: repr(data[:3]),
)
def test_no_number_in_a_pickle_decides_how_much_memory_is_taken(tmp_path, data):
    tracemalloc.start()
    with pytest.raises(DataError, match="test_batch"):
        read(as_folder(tmp_path, files("python") | {"cifar-10-batches-py/test_batch": data}))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_long_header_in_an_archive_is_not_read(tmp_path, kind):
    member = tarfile.TarInfo("long")
    member.type, member.size = kind, 200 * 2**20
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(member.tobuf(tarfile.USTAR_FORMAT) + bytes(2**20))
    tracemalloc.start()
    with pytest.raises(DataError, match="a header of 209715200 bytes"):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_members_without_end_are_not_all_read(tmp_path):
    path = tmp_path / "members.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(tarfile.TarInfo("x").tobuf() * 10_001)
    with pytest.raises(DataError, match="more than 10000 members"):
        read(path)


@pytest.mark.parametrize("limit", ["GREATEST_FILE_BYTES", "_GREATEST_BYTES"])
def test_files_larger_than_any_of_cifar_are_not_read_whole(tmp_path, limit, monkeypatch):
    monkeypatch.setattr(f"syncline.workloads._cifar10_reader.{limit}", 10_000)
    for written in (as_folder(tmp_path, files("binary")), as_zip(tmp_path, files("binary"))):
        with pytest.raises(DataError, match="more than 10000 bytes: not CIFAR-10"):
            read(written)


@given(st.lists(st.sampled_from(ALL_CODES) | st.binary(max_size=9), max_size=40).map(b"".join))
@settings(max_examples=300, deadline=None)
def test_any_pickle_is_a_dataset_or_an_error(data):
    with contextlib.suppress(DataError):
        _python("test_batch", data)


@pytest.mark.parametrize("writer", [as_tar("w:gz"), as_zip])
@pytest.mark.parametrize("name", ["../test_batch.bin", "/test_batch.bin", "cifar-10-batches-bin/../../test_batch.bin"])
def test_names_outside_the_archive_are_not_read_and_nothing_is_written(tmp_path, writer, name):
    content = files("binary")
    content[name] = content.pop("cifar-10-batches-bin/test_batch.bin")
    path = writer(tmp_path, content)
    before = sorted(tmp_path.parent.rglob("*"))
    with pytest.raises(DataError, match=r"cifar-10-batches-bin/test_batch\.bin missing"):
        read(path)
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_links_in_archives_are_refused(tmp_path):
    name = "cifar-10-batches-bin/data_batch_1.bin"
    content = files("binary")
    path = as_tar("w")(tmp_path, {key: data for key, data in content.items() if key != name})
    with tarfile.open(path, "a") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(member)
    with pytest.raises(DataError, match=r"data_batch_1\.bin .* is a link"):
        read(path)
    path = as_zip(tmp_path, {key: data for key, data in content.items() if key != name})
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/hostname")
    with pytest.raises(DataError, match=r"data_batch_1\.bin .* is a link"):
        read(path)


def test_a_member_that_comes_twice_is_refused(tmp_path):
    path = as_tar("w")(tmp_path, files("binary"))
    with tarfile.open(path, "a") as archive:
        archive.addfile(tarfile.TarInfo("./cifar-10-batches-bin/test_batch.bin"))
    with pytest.raises(DataError, match="is twice"):
        read(path)


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> list[bytes]:
    path = tmp_path_factory.mktemp("archives")
    return [writer(path, files("binary")).read_bytes() for writer in (as_tar("w:gz"), as_tar("w:xz"), as_zip)]


@settings(max_examples=60, deadline=None)
@given(which=st.integers(0, 2), part=st.floats(0, 0.99999), bit=st.integers(0, 7), cut=st.booleans())
def test_damaged_archives_give_the_right_images_or_an_error(archives, which, part, bit, cut):
    data = bytearray(archives[which])
    at = int(part * len(data))
    if cut:
        del data[at:]
    else:
        data[at] ^= 1 << bit
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            (pixels, _), (test_pixels, _) = read(file.name)
        except DataError:
            return
    expected = np.concatenate([batch(part)[0] for part in PARTS])
    assert np.array_equal(np.concatenate([pixels, test_pixels]).reshape(-1, 3072), expected)


def test_the_checksum_behind_the_end_of_an_archive_is_compared(tmp_path):
    path = as_tar("w")(tmp_path, files("binary"))
    packed = bytearray(gzip.compress(path.read_bytes()))
    packed[-8] ^= 1
    path.write_bytes(packed)
    with pytest.raises(DataError, match="cannot be read: CRC check failed"):
        read(path)


def test_the_workload_is_caffes(tmp_path):
    path = as_folder(tmp_path, files("binary"))
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
    workload = load(f"cifar10:{as_folder(tmp_path, files('binary'))}")
    optimizer = workload.optimizer(torch.nn.Linear(1, 1))
    schedule = workload.schedule(optimizer, 50)
    rates = []
    for _ in range(50):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.001] * 40 + [0.0001] * 10)
