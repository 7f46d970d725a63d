"""``syncline top``: the table, its end, and what a stranger's port may answer."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from syncline.errors import UsageError
from syncline_bench import top
from syncline_bench.top import Address, Seen, Watch, asked, read

HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n"


def answer(rank: str = "0", steps: int = 7, *, ports: str = "9400-9401", more: str = "") -> str:
    return (
        f'syncline_info{{ports="{ports}",rank="{rank}",strategy="ring transport=shm",workers="2"}} 1.0\n'
        f'syncline_steps_total{{rank="{rank}"}} {steps}.0\n'
        f'syncline_step_seconds_count{{rank="{rank}"}} {steps - 1}.0\n'
        f'syncline_step_seconds_sum{{rank="{rank}"}} {(steps - 1) * 0.0125}\n'
        f'syncline_blocked_seconds_total{{rank="{rank}"}} 0.5\n'
        f'syncline_sent_bytes_total{{peer="1",rank="{rank}"}} 1e6\n{more}'
    )


def drawn(watch: Watch, width: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(watch.table())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def asking(*answers: Callable[[Address], Seen | str]) -> Callable[[Address], Seen | str]:
    """Answers each refresh in turn, and the last one ever after."""
    turns: dict[Address, int] = {}

    def ask(address: Address) -> Seen | str:
        turn = turns[address] = turns.get(address, -1) + 1
        return answers[min(turn, len(answers) - 1)](address)

    return ask


def of_rank(steps: int) -> Callable[[Address], Seen]:
    return lambda address: read(answer(str(address.port - 9400), steps))


def test_the_address_of_the_first_rank_shows_all_of_its_host_in_60_columns() -> None:
    watch = Watch([Address("127.0.0.1", 9400)], asking(of_rank(7), of_rank(107)))
    for _ in range(2):
        watch.refresh()
    text = drawn(watch)
    assert text.splitlines()[0] == "2 workers, ring transport=shm"
    assert max(map(len, text.splitlines())) <= 60
    assert text.splitlines()[1].split() == ["rank", "step", "ms", "comm", "%", "sent", "MB/s"]
    for rank, line in enumerate(text.splitlines()[2:]):
        assert line.split()[:3] == [str(rank), "107", "12.5"]
    assert len(text.splitlines()) == 4


def test_columns_of_staleness_and_errors_are_there_if_a_rank_has_them() -> None:
    more = (
        'syncline_staleness_steps_count{rank="0"} 4.0\nsyncline_staleness_steps_sum{rank="0"} 6.0\n'
        'syncline_version_lag_count{rank="0"} 4.0\nsyncline_version_lag_sum{rank="0"} 0.0\n'
        'syncline_compression_error{rank="0"} 0.125\nsyncline_repairs_total{rank="0"} 2.0\n'
    )
    plain = lambda _: read(answer(ports="0-0"))  # noqa: E731
    watch = Watch([Address("h", 9400)], asking(plain, lambda _: read(answer(ports="0-0", steps=9, more=more))))
    for _ in range(2):
        watch.refresh()
    text = drawn(watch)
    assert text.splitlines()[1].split()[-3:] == ["stale", "error", "repairs"]
    assert text.splitlines()[2].split()[-3:] == ["1.5", "0.125", "2"]
    assert max(map(len, text.splitlines())) <= 60


def test_it_ends_when_the_run_does_and_names_a_rank_that_does_not_answer() -> None:
    gone = lambda _: "Connection refused"  # noqa: E731
    watch = Watch([Address("h", 9400)], asking(of_rank(7), gone))
    watch.refresh()
    watch.check_any()
    while not watch.over:
        watch.refresh()
        assert "no answer" in drawn(watch)
    assert watch._silent == top._GONE


def test_runs_of_this_user_are_found_and_their_end_is_seen() -> None:
    known = ["127.0.0.1:9400", "127.0.0.1:9401"]
    watch = Watch([], asking(of_rank(7)), lambda: known)
    watch.refresh()
    assert len(drawn(watch).splitlines()) == 4
    known.clear()
    watch.refresh()
    assert watch.over


def test_without_any_run_it_says_how_to_start_one() -> None:
    watch = Watch([], found=list)
    watch.refresh()
    with pytest.raises(UsageError, match="no run answers on this machine: start it with syncline run --metrics"):
        watch.check_any()
    with pytest.raises(UsageError, match="not the address of a run's metrics"):
        top.run(["localhost"])


@contextmanager
def stranger(talk: Callable[[socket.socket], None]) -> Iterator[Address]:
    """A port at which somebody else answers."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            sock, _ = door.accept()
            with sock:
                sock.recv(4096)
                try:
                    talk(sock)
                except OSError:
                    return  # the reader has left

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address(*door.getsockname())
        thread.join(20)
        assert not thread.is_alive()


def endless(sock: socket.socket) -> None:
    sock.sendall(HEAD)
    while True:
        sock.sendall(b"syncline_steps_total 1\n" * 1000)


def silent(sock: socket.socket) -> None:
    sock.sendall(b"H")
    sock.recv(1)


@pytest.mark.parametrize(
    ("talk", "said"),
    [
        (endless, "too long"),
        (silent, "timed out|no whole answer within"),
        (lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"), "something else"),
        (lambda sock: sock.sendall(HEAD + b"process_cpu_seconds_total 1.0\n"), "something else"),
        (lambda sock: sock.sendall(HEAD + b'syncline_info{rank="0"} one\n'), "could not convert"),
        (lambda sock: sock.sendall(HEAD + b"\xff\xfe" * 100), "something else"),
    ],
)
def test_a_strangers_answer_is_bounded(talk: Callable[[socket.socket], None], said: str) -> None:
    with stranger(talk) as address:
        found = asked(address, 0.2)
    assert isinstance(found, str)
    assert any(one in found for one in said.split("|")), found


def test_control_characters_of_a_stranger_do_not_reach_the_terminal() -> None:
    seen = read(answer("0\x1b]0;title\x07", ports="1-99999999999"))
    watch = Watch([Address("h", 9400)], lambda _: seen)
    for _ in range(2):
        watch.refresh()
    text = drawn(watch)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert len(text.splitlines()) == 3  # no range of ports that long is asked


def test_numbers_of_a_stranger_that_are_no_counts_are_left_out() -> None:
    lines = 'syncline_steps_total{rank="0"} NaN\nsyncline_step_seconds_sum{rank="0"} +Inf\n'
    assert read(answer(more=lines)).stats.steps == 7


def test_ctrl_c_ends_it_without_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", interrupted)
    monkeypatch.setattr(top, "asked", of_rank(7))
    top.run(["127.0.0.1:9400"])
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_one_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top.time, "sleep", lambda _: None)
    monkeypatch.setattr(top, "asked", asking(of_rank(7), of_rank(9)))
    top.run(["127.0.0.1:9400"])
    assert capsys.readouterr().out.count("2 workers") == 1
