"""Reads CIFAR-10 in its two published forms, from a folder or an archive, without trusting the files.

Binary form: ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, records of one label byte and 3072
pixel bytes (red, green, blue planes of 32x32). Python form: the same names without ``.bin``, pickled dictionaries with
``data`` (n, 3072) uint8 and ``labels``. Either lies at the top or in the folder that the published archives contain
(``cifar-10-batches-bin``, ``cifar-10-batches-py``); when both are complete, the binary form is read.

Archives are read in memory and never unpacked, so names that leave the folder, links and the like have no effect.
Pickles go through ``_Restricted``, which knows three names and answers them with inert stand-ins: no code that a file
names is ever called, numpy's own reconstruction included. No number in a file decides how much memory is taken: files,
headers, members and operations are bounded, and the memo is a dictionary. Checked are: that all files are there, whole
records or the shapes that the file itself claims, labels 0 to 9, the checksums inside archives, and, for files of the
python form with the published number of images, the published MD5 sums. The binary form has none for single files:
changed pixels are not noticed there.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]

RECORD_BYTES = 3073
PIXEL_BYTES = 3072
GREATEST_FILE_BYTES = 512 * 2**20
"""Larger files are refused before they fill the memory (the published ones have 31 MB)."""
_GREATEST_BYTES = 4 * GREATEST_FILE_BYTES
"""All files of all forms together."""
_GREATEST_HEADER_BYTES = 2**20
"""Headers of tar archives that have a length of their own: long names, and what POSIX added."""
_MOST_MEMBERS = 10_000
_OPERATIONS = 100_000
_BYTES_PER_OPERATION = 64
"""An image has 3072 bytes and a few operations; a pickle of operations alone would become many times as large."""

PARTS = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_FOLDERS = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}
"""Ending of the file names of a form -> the folder it is published in; the preferred form first."""

_PUBLISHED_IMAGES = 10_000
_PUBLISHED_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def read(path: str | Path) -> tuple[tuple[Pixels, Labels], tuple[Pixels, Labels]]:
    """Training and test set, each as pixels (n, 3, 32, 32) uint8 and labels (n,) int64.

    Raises DataError naming the file that is missing, truncated or altered.
    """
    path = Path(path).expanduser()
    ending, files = _choose(path, _contents(path))
    decode = _binary if ending else _python
    parts = [decode(part, files[part]) for part in PARTS]
    pixels = np.concatenate([part[0] for part in parts[:-1]])
    return (pixels, np.concatenate([part[1] for part in parts[:-1]])), parts[-1]


def _choose(path: Path, found: Mapping[str, bytes]) -> tuple[str, dict[str, bytes]]:
    """The form (its ending) and place of which most files are there; DataError unless all are."""
    places = [(ending, place) for ending, folder in _FOLDERS.items() for place in ("", f"{folder}/")]

    def missing(ending: str, place: str) -> list[str]:
        return [f"{place}{part}{ending}" for part in PARTS if f"{place}{part}{ending}" not in found]

    ending, place = min(places, key=lambda each: len(missing(*each)))
    absent = missing(ending, place)
    if len(absent) == len(PARTS):
        raise DataError(
            f"{path} holds no CIFAR-10 data: expected data_batch_1.bin to data_batch_5.bin and test_batch.bin (binary "
            f"form) or the same names without .bin (python form), there or in {' or '.join(_FOLDERS.values())}"
        )
    if absent:
        raise DataError(f"{path} is incomplete: {', '.join(absent)} missing; unpack or download the data again")
    return ending, {part: found[f"{place}{part}{ending}"] for part in PARTS}


# Where the bytes come from ---------------------------------------------------------------------------------------


def _contents(path: Path) -> dict[str, bytes]:
    """Every file of either form that ``path`` holds, by its name relative to the top."""
    wanted = {
        f"{place}{part}{ending}"
        for ending, folder in _FOLDERS.items()
        for place in ("", f"{folder}/")
        for part in PARTS
    }
    try:
        if path.is_dir():
            return _collect(path, wanted, _files(path, wanted))
        if not path.exists():
            raise DataError(f"{path} does not exist: give the folder or archive that holds CIFAR-10")
        members = _zip_members(path) if zipfile.is_zipfile(path) else _tar_members(path)
        return _collect(path, wanted, members)
    except DataError:
        raise
    except tarfile.ReadError as fault:
        raise DataError(f"{path} is no readable tar or zip archive, or is truncated: {fault}") from fault
    except OSError as fault:  # gzip's and bz2's checksum errors are OSErrors too
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except Exception as fault:  # broken archives raise nearly anything
        reason = str(fault) or type(fault).__name__
        raise DataError(f"{path} is truncated, altered or of another format: {reason}") from fault


def _collect(path: Path, wanted: set[str], members: Iterator[tuple[str, bytes | None]]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for number, (name, data) in enumerate(members):
        if number == _MOST_MEMBERS:
            raise DataError(f"{path} has more than {_MOST_MEMBERS} members: not CIFAR-10")
        name = str(PurePosixPath(name))  # drops a leading ./ and keeps .. as it is
        if name not in wanted:
            continue
        if data is None:
            raise DataError(f"{name} in {path} is a link or not a file: altered archive")
        if len(data) > GREATEST_FILE_BYTES:
            raise DataError(f"{name} in {path} has more than {GREATEST_FILE_BYTES} bytes: not CIFAR-10")
        if name in found:
            raise DataError(f"{name} is twice in {path}: altered archive")
        found[name] = data
        if sum(map(len, found.values())) > _GREATEST_BYTES:
            raise DataError(f"the files in {path} have more than {_GREATEST_BYTES} bytes: not CIFAR-10")
    return found


def _files(path: Path, wanted: set[str]) -> Iterator[tuple[str, bytes | None]]:
    for name in sorted(wanted):
        if (path / name).is_file():
            with (path / name).open("rb") as file:
                yield name, _bytes(file, os.fstat(file.fileno()).st_size)


def _bytes(stream: IO[bytes], size: int) -> bytes:
    """A file that is said to have that size, or the beginning of one that is too large; reading takes what it asks."""
    return stream.read(min(size, GREATEST_FILE_BYTES) + 1)


class _Member(tarfile.TarInfo):
    """A member of a tar archive; a header that is longer than any should be is not read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        """Read the fixed part of a header."""
        member = super().frombuf(buf, encoding, errors)
        if member.type in _HEADERS and member.size > _GREATEST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {member.size} bytes")
        return member


_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


def _tar_members(path: Path) -> Iterator[tuple[str, bytes | None]]:
    with tarfile.open(path, "r:*", tarinfo=_Member) as archive:
        for member in archive:
            if PurePosixPath(member.name).stem not in PARTS:
                yield member.name, None
                continue
            stream = archive.extractfile(member) if member.isreg() else None
            yield member.name, None if stream is None else _bytes(stream, member.size)
        # The checksum of a compressed archive is behind its end mark, and is compared when it is reached.
        while archive.fileobj is not None and archive.fileobj.read(2**20):
            pass


def _zip_members(path: Path) -> Iterator[tuple[str, bytes | None]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if PurePosixPath(member.filename).stem not in PARTS or member.is_dir():
                yield member.filename, None
                continue
            kind = member.external_attr >> 28  # the file type of Unix, 0 when written elsewhere
            with archive.open(member) as stream:
                yield member.filename, _bytes(stream, member.file_size) if kind in (0, 0o10) else None


# What the bytes mean ---------------------------------------------------------------------------------------------


def _binary(part: str, data: bytes) -> tuple[Pixels, Labels]:
    name = f"{part}.bin"
    if not data or len(data) % RECORD_BYTES:
        whole = -(-max(len(data), 1) // RECORD_BYTES)
        raise DataError(
            f"{name} is truncated: {whole} records of {RECORD_BYTES} bytes are {whole * RECORD_BYTES} bytes, "
            f"found {len(data)}"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD_BYTES)
    return _checked(name, records[:, 1:], records[:, 0].astype(np.int64))


def _python(part: str, data: bytes) -> tuple[Pixels, Labels]:
    batch = _unpickle(part, data)
    if not isinstance(batch, dict) or b"data" not in batch or b"labels" not in batch:
        raise DataError(f"{part} is altered: a dictionary with 'data' and 'labels' was expected")
    pixels, labels = batch[b"data"], batch[b"labels"]
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label <= 9 for label in labels):
        raise DataError(f"{part} is altered: the labels must be a list of whole numbers from 0 to 9")
    if not isinstance(pixels, _Array):
        raise DataError(f"{part} is altered: 'data' must be an array, found {type(pixels).__name__}")
    array = pixels.pixels(part, len(labels))
    if (
        len(labels) == _PUBLISHED_IMAGES
        and hashlib.md5(data, usedforsecurity=False).hexdigest() != _PUBLISHED_MD5[part]
    ):
        raise DataError(f"{part} is altered: its MD5 sum is not the published {_PUBLISHED_MD5[part]}")
    return _checked(part, array, np.array(labels, dtype=np.int64))


def _checked(name: str, pixels: Pixels, labels: Labels) -> tuple[Pixels, Labels]:
    wrong = np.flatnonzero(labels > 9)
    if wrong.size:
        raise DataError(f"{name} is altered: image {wrong[0]} has label {labels[wrong[0]]}, the greatest is 9")
    return np.ascontiguousarray(pixels).reshape(-1, 3, 32, 32), labels


# Pickles without their powers ------------------------------------------------------------------------------------


def _unpickle(part: str, data: bytes) -> Any:
    try:
        return _Restricted(data).load()
    except Exception as fault:  # broken pickles raise nearly anything
        reason = str(fault) or type(fault).__name__
        raise DataError(f"{part} is truncated or altered: {reason}, found {len(data)} bytes") from fault


class _Dtype:
    """Stands for ``numpy.dtype`` in a pickle: keeps its code and does nothing."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, which single bytes have not."""


class _Array:
    """Stands for ``numpy.ndarray`` in a pickle: keeps what the file says about it."""

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def pixels(self, part: str, images: int) -> Pixels:
        """The array, if it is (images, 3072) bytes in C order; DataError otherwise."""
        match self.state:
            case (_, (int() as rows, int() as columns), _Dtype(code=code), fortran, bytes() as raw):
                pass
            case _:
                raise DataError(f"{part} is altered: 'data' is not a two-dimensional array of bytes")
        if code not in ("u1", b"u1") or fortran or columns != PIXEL_BYTES or rows != images or images == 0:
            raise DataError(
                f"{part} is altered: 'data' must be {images} x {PIXEL_BYTES} bytes (type u1) for its {images} labels, "
                f"found {rows} x {columns} of type {code!r}"
            )
        if len(raw) != rows * columns:
            raise DataError(f"{part} is truncated: expected {rows * columns} bytes of pixels, found {len(raw)}")
        return np.frombuffer(raw, np.uint8).reshape(rows, columns)


def _latin1(text: object, encoding: object) -> bytes:
    """Stands for ``_codecs.encode``, by which Python 3 writes bytes in old pickle protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}, CIFAR-10 has only latin1")
    return text.encode("latin1")


class _Counted(dict[int, Any]):
    """What an unpickler does at each operation, for so many of them."""

    def __init__(self, operations: Mapping[int, Any], most: int) -> None:
        super().__init__(operations)
        self._left = most

    def __getitem__(self, operation: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise pickle.UnpicklingError("it has more operations than pixels need")
        return super().__getitem__(operation)


class _Restricted(pickle._Unpickler):
    """An unpickler that finds stand-ins for numpy's array, its type and latin1, and nothing else.

    It is the one written in Python: the other takes memory for its memo as an index in the file says.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        most = _OPERATIONS + len(data) // _BYTES_PER_OPERATION
        self.dispatch = _Counted(pickle._Unpickler.dispatch, most)  # type: ignore[misc]  # in place of the class's own

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in; UnpicklingError for every other name."""
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _Array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _Array if name == "ndarray" else _Dtype
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: _latin1(text, encoding)  # one of its own: pickles can set attributes
        raise pickle.UnpicklingError(f"it names {module}.{name}, which CIFAR-10 does not")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Never: CIFAR-10 refers to nothing outside the file."""
        raise pickle.UnpicklingError(f"it refers to {pid!r} outside the file")
