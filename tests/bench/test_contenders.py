"""Texts of a comparison: strategies and peers, told apart and checked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from syncline.errors import StrategyError, SynclineError, UsageError
from syncline.registry import entries
from syncline.strategy.words import PRESETS
from syncline_bench.contenders import Contender, contender_of, peer_of, trainers


def test_peers_that_train_are_found_and_documented() -> None:
    assert "ddp" in trainers()
    assert all(entry.summary for entry in entries("peers"))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("ddp", "ddp"),
        (" ddp() ", "ddp"),
        ("ddp(bucket=25MiB)", "ddp"),
        ("ddp(bucket=5242880)", "ddp(bucket=5MiB)"),
        ("ddp(hook=fp16, bucket=1MB)", "ddp(bucket=1MB, hook=fp16)"),
        ("ring", "ring"),
        ("ring transport=tcp", "ring transport=tcp"),
        ("schedule=wait_free", "schedule=wait_free"),
        ("", "auto"),
        ("native", "native"),
        ("native transport=torch", "native transport=torch"),
    ],
)
def test_every_contender_has_one_text(text: str, canonical: str) -> None:
    found = contender_of(text, 2, one_host=True)
    assert (found.text, found.requested) == (canonical, text.strip())
    assert contender_of(canonical, 2, one_host=True) == found


def test_strategies_bring_their_servers_and_peers_have_none() -> None:
    assert contender_of("ps(servers=2)", 2, one_host=False) == Contender("ps(servers=2)", servers=2)
    assert contender_of("ddp", 2, one_host=False) == Contender("ddp")
    assert peer_of("ring") is None


def test_a_preset_is_its_strategy_under_its_name() -> None:
    found = contender_of("mxnet", 2, one_host=True)
    assert (found.text, found.servers) == (PRESETS["mxnet"].text, 1)
    assert (found.name, found.preset) == ("mxnet", PRESETS["mxnet"])
    named = contender_of(found.text, 2, one_host=True)
    assert (named.name, named.preset) == (found.text, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ddp(buckets=5MiB)", "did you mean 'bucket'"),
        ("ddp(bucket=none)", "a number with a unit"),
        ("ddp(bucket=0)", "1 byte or more"),
        ("ddp(hook=fp8)", "none or fp16 or bf16 or powersgd, got 'fp8'"),
        ("ddp(5MiB)", r"as in ddp\(bucket=5MiB\)"),
        ("ddp transport=tcp", "expected one name"),
        ("dpd", "did you mean the peer 'ddp'"),
        ("rnig", "did you mean 'ring'"),
    ],
)
def test_mistakes_are_refused_with_the_remedy(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        contender_of(text, 2, one_host=True)


def test_what_cannot_leave_one_host_is_refused_in_a_lab() -> None:
    with pytest.raises(StrategyError, match="cannot reach other hosts"):
        contender_of("ring transport=shm", 2, one_host=False)
    with pytest.raises(SynclineError, match="servers"):
        contender_of("ps(servers=3, on=workers)", 2, one_host=False)


@pytest.mark.slow
@pytest.mark.parametrize(("last", "status"), [("", 0), ("1 / 0", 1)])
def test_a_process_that_has_left_gloo_calls_exit_functions_and_tells_how_it_ended(last: str, status: int) -> None:
    pytest.importorskip("torch")
    script = f"""
import atexit
from syncline_bench.peers.ddp import DDP
atexit.register(print, "called")
member = DDP().join()
member.barrier()
member.shutdown()
{last}
"""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=os.environ | place, check=False
    )
    assert (done.stdout, done.returncode) == ("called\n", status), done.stderr
