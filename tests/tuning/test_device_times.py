"""Times of codecs on a GPU: the arithmetic everywhere, the measuring where there is a GPU."""

from __future__ import annotations

import pytest

from syncline.codecs.feedback import Feedback
from syncline.codecs.linear import Int8
from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.tuning.device_times import DeviceTimes, measure_on_gpu

torch = pytest.importorskip("torch")

with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_a_codec_that_moves_as_many_bytes_as_a_copy_in_its_time_has_a_share_of_one() -> None:
    plain = DeviceTimes("gpu", False, 1000, 4000, 1e-6, 1.5e-6, 1e-6)
    assert plain.encode_share == pytest.approx(1)
    assert plain.decode_share == pytest.approx(1)
    fed_back = DeviceTimes("gpu", True, 1000, 4000, 2e-6, 1e-6, 1e-6)
    assert fed_back.encode_share == pytest.approx(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_without_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        measure_on_gpu(Int8(), 1024)


@with_gpu
def test_both_directions_are_measured() -> None:
    found = measure_on_gpu(Feedback(Int8()), 1 << 20, repetitions=3)
    assert found.feedback
    assert found.nbytes == Int8().wire_bytes(Spec("", (1 << 20,)))[0]
    assert min(found.encode_s, found.decode_s, found.copy_s) > 0


@with_gpu
def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        measure_on_gpu(Int8(), 0)
