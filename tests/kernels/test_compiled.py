"""Compiled functions as Python calls them: every kind of parameter and result, and what is refused.

Calls out of compiled computations: gradients go to their places as NumPy would put them, and the version is told.
What another user could have written is not read: links, groups, owners, at any depth, before and after a check.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elementwise
import numpy as np
import pytest

from syncline.kernels import xla
from syncline.kernels.aot.compiled import Parameter, Signature
from syncline.kernels.passes import CODES
from syncline.kernels.private import NotPrivateError, check_contents, path_of, private_folder, read_file


def test_a_signature_says_what_is_taken_and_returned() -> None:
    found = Signature.parse("(float32[], int64[,], bool, float64) -> int64, int64")
    assert found.parameters == (Parameter("float32", 1), Parameter("int64", 2), Parameter("bool"), Parameter("float64"))
    assert found.results == ("int64", "int64")
    assert found.layout == "qq" + "qqq" + "?7x" + "d"
    assert found.size == 2 + 3 + 1 + 1 + 2
    assert Signature.parse(str(found)) == found
    assert Signature.parse("()") == Signature((), ())


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize("whole", [int, np.int64, np.uint32])
def test_every_kind_of_parameter_and_result(size: int, whole: Any) -> None:
    numbers, table = np.arange(size, dtype=np.float32), np.zeros((2, 3), np.int64)
    mask, flag = elementwise.everything(numbers, np.float32(0.1), whole(0xFFFFFFFF), True, table)
    assert (mask, flag) == (0xFFFFFFFF, 1)
    np.testing.assert_array_equal(numbers, np.arange(size, dtype=np.float32) * np.float32(0.1))
    np.testing.assert_array_equal(table, [[0, 1, 2], [10, 11, 12]])
    assert elementwise.total(np.array([0.5, 0.25], np.float32)) == 0.75
    assert elementwise.odd(3) is True
    assert elementwise.odd(4) is False
    assert elementwise.chances(0, 0, numbers) is None


GOOD = (np.zeros(3, np.float32), 1.0, 1, False, np.zeros((2, 2), np.int64))
READ_ONLY_FLAG = np.zeros(3, np.float32)
READ_ONLY_FLAG.flags.writeable = False


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, np.zeros(3, np.float64)),
        (0, np.zeros(3, ">f4")),
        (0, np.zeros((3, 1), np.float32)),
        (0, np.zeros(6, np.float32)[::2]),
        (0, READ_ONLY_FLAG),
        (0, [0.0]),
        (0, None),
        (1, "1"),
        (2, 1.5),
        (2, 1 << 63),
        (0, np.zeros(13, np.uint8)[1:].view(np.float32)),
        (4, np.zeros(4, np.int64)),
        (4, np.zeros((2, 4), np.int64)[:, :2]),
        (4, np.zeros((2, 2), np.int64).T[::-1]),
    ],
)
def test_anything_else_is_refused_before_it_is_run(place: int, value: Any) -> None:
    given = [*GOOD[:place], value, *GOOD[place + 1 :]]
    with pytest.raises(TypeError):
        elementwise.everything(*given)


def test_so_is_another_number_of_parameters() -> None:
    for given in (GOOD[:-1], (*GOOD, 1)):
        with pytest.raises(TypeError, match="everything takes"):
            elementwise.everything(*given)


def test_a_bound_function_reads_its_arrays_where_they_lie_and_keeps_them() -> None:
    seen = np.zeros(4, np.uint32)

    def bound_to(code: int) -> Any:
        return elementwise.widen_e4m3s.bind(np.full(4, code, np.uint32), seen)

    calls = [bound_to(code) for code in (0x38, 0x40)]
    gc.collect()
    assert [np.full(4, 7, np.uint32).sum() for _ in range(20)] == [28] * 20  # where freed arrays would have been
    for call, value in zip(calls, (1.0, 2.0), strict=True):
        call()
        np.testing.assert_array_equal(seen.view(np.float32), [value] * 4)


def test_what_cannot_be_bound_is_refused() -> None:
    numbers = np.zeros(4, np.uint32)
    for given in ([], [numbers], [numbers] * 3):
        with pytest.raises(TypeError, match="cannot be bound"):
            elementwise.widen_e4m3s.bind(*given)
    with pytest.raises(TypeError, match="cannot be bound"):
        elementwise.everything.bind(*GOOD)
    with pytest.raises(TypeError, match="0 parameters are not bound, got 1"):
        elementwise.widen_e4m3s.bind(numbers, numbers)(1)


def test_types_that_are_equal_without_being_the_same_are_taken() -> None:
    other = np.dtype(np.float32).newbyteorder("<")
    numbers = np.array([0.5, 0.25], other)
    assert elementwise.total(numbers) == 0.75
    assert elementwise.total(np.frombuffer(bytearray(8), other)) == 0


@pytest.mark.parametrize("flag", [True, 1, np.bool_(True), 7])
def test_a_truth_value_is_one(flag: Any) -> None:
    assert elementwise.everything(*GOOD[:3], flag, GOOD[4])[1] == 1


Array = Any


def pointers(*arrays: Array) -> Array:
    return np.array([array.ctypes.data for array in arrays], np.int64)


class Frame:
    """What XLA hands over, word by word; everything it points to is kept."""

    def __init__(self, stage: int, number: int, arguments: list[Array], results: list[Array]) -> None:
        self.words = np.zeros(21, np.int64)
        value = np.array([number], np.int64)
        scalar = np.array([0, value.ctypes.data], np.int64)
        attributes = pointers(scalar)
        sides = []
        for arrays in (arguments, results):
            buffers = [np.array([0, 0, 0, array.ctypes.data], np.int64) for array in arrays]
            sides.append((pointers(*buffers), buffers))
        self.words[[4, 9, 14, 20]] = stage, sides[0][0].ctypes.data, sides[1][0].ctypes.data, attributes.ctypes.data
        self.keep = value, scalar, attributes, sides, arguments, results


def table(places: list[Array], bell: int = -1, share: float = 1.0) -> Array:
    """Of one call with these places, which are also what is taken at the end."""
    row = [len(places)]
    for place in places:
        row += [CODES[str(place.dtype)], place.ctypes.data, place.size, place.nbytes]
    made = np.zeros(xla.ROWS + 1 + len(row), np.int64)
    made[xla.BELL], made[xla.ONE] = bell, 1
    made[xla.ASLEEP] = bell >= 0
    made[xla.SHARE : xla.SHARE + 1].view(np.float64)[0] = share
    made[xla.TAKES] = made[xla.ROWS] = xla.ROWS + 1
    made[xla.ROWS + 1 :] = row
    return made


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("share", [1.0, 0.5, 1 / 3])
def test_gradients_are_multiplied_as_numpy_does(dtype: str, share: float) -> None:
    draw = np.random.default_rng(0)
    gradients = [(draw.standard_normal(size) * 50).astype(dtype) for size in (1, 37, 0, 1000)]
    places = [np.empty_like(gradient) for gradient in gradients]
    bell = os.eventfd(0)
    made, handed = table(places, bell, share), np.zeros(2, np.int64)
    token = np.array([7, made.ctypes.data], np.int64)
    frame = Frame(3, 0, [token, *gradients], [handed])
    assert xla.put.code(frame.words.ctypes.data) == 0
    for place, gradient in zip(places, gradients, strict=True):
        assert np.array_equal(place, np.multiply(gradient, share))
    assert handed.tolist() == token.tolist()
    assert (made[xla.DONE], os.eventfd_read(bell)) == (1, 1)
    os.close(bell)
    back = [np.zeros_like(place) for place in places]
    end = Frame(3, 0, [token], [handed, *back])
    assert xla.take.code(end.words.ctypes.data) == 0
    assert all(np.array_equal(one, other) for one, other in zip(back, places, strict=True))


@pytest.mark.parametrize("call", [xla.put, xla.take])
def test_the_version_is_told_and_other_stages_touch_nothing(call: Any) -> None:
    place, gradient, token = np.zeros(3), np.ones(3), np.zeros(2, np.int64)
    made = table([place])
    token[1] = made.ctypes.data
    frame = Frame(0, 0, [token, gradient], [np.zeros(2, np.int64), place])
    assert call.code(frame.words.ctypes.data) == 0
    assert not place.any()
    asked = np.zeros(8, np.int64)  # the description that XLA wants to have filled
    other, extension = np.zeros(4, np.int64), np.zeros(4, np.int64)
    extension[1], extension[3] = 1, asked.ctypes.data
    other[2] = extension.ctypes.data
    frame.words[1] = other.ctypes.data
    asked[3] = -1
    assert call.code(frame.words.ctypes.data) == 0
    assert asked[3:4].view(np.int32).tolist() == [xla.MAJOR, xla.MINOR]


SOMEBODY = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def link(path: Path) -> None:
    """A link to the very same, elsewhere."""
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (link, "is a link"),
    "group": (lambda path: path.chmod(0o770), "can be written to by its group"),
    "others": (lambda path: path.chmod(0o707), "can be written to by everybody"),
    "sticky": (lambda path: path.chmod(0o1777), "can be written to by everybody"),
    "setgid": (lambda path: path.chmod(0o2770), "can be written to by its group"),
}
if os.geteuid() == 0:
    SPOILT["owner"] = lambda path: os.chown(path, SOMEBODY, -1), f"belongs to another user \\(uid {SOMEBODY}\\)"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """``a/b`` with a folder and files in it."""
    inner = tmp_path / "a" / "b" / "inner"
    inner.mkdir(parents=True)
    (inner / "code").write_bytes(b"machine code")
    (tmp_path / "a" / "b" / "table").write_bytes(b"a table")
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o700)
    return tmp_path


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with private_folder(tmp_path / "cache", "a", "b") as fd:
            assert os.path.samestat(os.fstat(fd), (tmp_path / "cache" / "a" / "b").stat())
    finally:
        os.umask(before)
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("where", ["a", "a/b"])
def test_a_folder_of_the_path_that_others_may_have_changed_is_refused(cache: Path, where: str, how: str) -> None:
    spoil, said = SPOILT[how]
    spoil(cache / where)
    with pytest.raises(NotPrivateError, match=f"{cache / where} {said}"), private_folder(cache, "a", "b"):
        pass


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("where", ["table", "inner", "inner/code"])
def test_so_is_what_lies_in_it(cache: Path, where: str, how: str) -> None:
    spoil, said = SPOILT[how]
    with private_folder(cache, "a", "b") as fd:
        check_contents(fd, cache / "a" / "b")
        assert read_file(fd, "table", cache / "a" / "b") == b"a table"
        spoil(cache / "a" / "b" / where)
        with pytest.raises(NotPrivateError, match=f"{where} {said}"):
            check_contents(fd, cache / "a" / "b")
        if where == "table":
            with pytest.raises(NotPrivateError, match=said):
                read_file(fd, "table", cache / "a" / "b")


def test_what_is_no_file_keeps_nobody_waiting(cache: Path) -> None:
    os.mkfifo(cache / "a" / "b" / "pipe", 0o600)
    with private_folder(cache, "a", "b") as fd:
        with pytest.raises(NotPrivateError, match="pipe is neither a file nor a folder"):
            check_contents(fd, cache / "a" / "b")
        with pytest.raises(NotPrivateError, match="neither a file nor a folder"):
            read_file(fd, "pipe", cache / "a" / "b")


def test_a_folder_that_is_replaced_after_the_check_is_not_the_one_that_is_used(cache: Path) -> None:
    with private_folder(cache, "a", "b") as fd:
        (cache / "a" / "b").rename(cache / "a" / "was b")
        (cache / "a" / "b").mkdir(mode=0o777)
        (cache / "a" / "b" / "table").write_bytes(b"another's")
        assert read_file(fd, "table", cache / "a" / "b") == b"a table"
        assert (path_of(fd) / "table").read_bytes() == b"a table"


def test_the_way_to_the_cache_may_be_a_link(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Homes and caches lie on other disks; who replaces that link has no folder that passes to put behind it."""
    root = tmp_path_factory.mktemp("home") / "cache"
    root.symlink_to(cache)
    with private_folder(root, "a", "b") as fd:
        assert read_file(fd, "table", root) == b"a table"


@as_root
def test_roots_files_are_trusted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.kernels.private.os.geteuid", lambda: SOMEBODY)
    with private_folder(cache, "a", "b") as fd:
        check_contents(fd, cache / "a" / "b")
