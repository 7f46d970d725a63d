"""The compositions of torch operations that codecs are measured beside do what they are named after."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from syncline_bench.codecs.compositions import MAKERS, Composition, Peer, composition_of, one_thread  # noqa: E402

N = 90 * 90  # what is seen as a matrix is a square one
ARGUMENTS = {
    "qsgd": {"levels": 127},
    "topk": {"ratio": 0.05},
    "gtopk": {"ratio": 0.05},
    "threshold": {"ratio": 0.05},
    "randomk": {"ratio": 0.05},
    "powersgd": {"rank": 4},
}
UNBIASED = ("qsgd", "natural", "ternary")
EXACT = {"fp16": 2**-11, "bf16": 2**-8, "fp8": 2**-4}
"""Greatest relative error of an element that is not tiny."""


def gradient(seed: int = 0) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def made(name: str, **changes: object) -> Composition:
    composition = MAKERS[name](**{**ARGUMENTS.get(name, {}), **changes})
    if composition is None:
        pytest.skip("this torch has no such type")
    return composition


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_decompressed_resembles_the_gradient(name: str) -> None:
    composition, x = made(name), gradient()
    found = composition.decompress(composition.compress(x))
    assert found.shape == x.shape
    assert found.dtype == torch.float32
    assert torch.dot(found, x) > 0
    if name not in ("ternary", "qsgd"):
        assert (found - x).norm() < x.norm()


@pytest.mark.parametrize("name", EXACT)
def test_casts_are_as_exact_as_their_type(name: str) -> None:
    composition, x = made(name), gradient()
    found = composition.decompress(composition.compress(x))
    large = x.abs() > 0.1
    assert ((found - x).abs() / x.abs())[large].max() <= EXACT[name] * 1.01


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])
def test_equal_steps_are_off_by_half_a_step_at_most(name: str, levels: int) -> None:
    composition, x = made(name), gradient()
    error = (composition.decompress(composition.compress(x)) - x).abs().max()
    assert error <= x.abs().max() / levels / 2 * 1.001


@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_of_stochastic_ones_is_the_gradient(name: str) -> None:
    composition, x = made(name), gradient()
    torch.manual_seed(1)
    draws = torch.stack([composition.decompress(composition.compress(x)) for _ in range(200)])
    spread = draws.std(0).clamp(min=1e-6) / 200**0.5
    assert ((draws.mean(0) - x).abs() / spread).median() < 1.5


def test_exact_selections_keep_the_largest_and_a_threshold_about_as_many() -> None:
    x = gradient()
    topk, threshold = made("topk"), made("threshold", ratio=0.05)
    values, _, _ = topk.compress(x)
    assert values.abs().min() == x.abs().sort(descending=True).values[int(0.05 * N) - 1]
    torch.manual_seed(1)
    kept = threshold.compress(x)[0]
    assert 0.02 * N < kept.numel() < 0.2 * N


def test_one_bit_has_two_means_and_sign_one_scale() -> None:
    x = gradient()
    onebit, sign, vote = made("onebit"), made("sign"), made("sign", vote="on")
    found = onebit.decompress(onebit.compress(x))
    assert found[x < 0].mean() == pytest.approx(float(x[x < 0].mean()), rel=1e-4)
    assert len(found.unique()) == 2
    assert sign.decompress(sign.compress(x)).abs().mean() == pytest.approx(float(x.abs().mean()), rel=1e-4)
    assert set(vote.decompress(vote.compress(x)).unique().tolist()) == {-1.0, 1.0}


def test_low_rank_gets_better_with_warm_starts_and_recovers_low_rank() -> None:
    composition = made("powersgd", rank=2)
    side = 64
    x = (torch.randn(side, 2) @ torch.randn(2, side)).flatten()
    found = composition.decompress(composition.compress(x))
    assert torch.allclose(found, x, atol=1e-3)


def test_a_peer_with_feedback_loses_nothing() -> None:
    composition = made("int4")
    peer = Peer(composition, N, feedback=True)
    x = gradient()
    (seconds,) = peer(x.numpy())
    assert seconds > 0
    residual = peer._residual
    assert residual is not None
    sent = composition.decompress(composition.compress(x))
    assert torch.allclose(sent + residual, x, atol=1e-5)


def test_texts_find_their_composition() -> None:
    assert composition_of("int8") is not None
    assert composition_of("int8(block=64)") is not None
    assert composition_of("none") is None


def test_one_thread_is_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
