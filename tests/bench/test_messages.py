from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from syncline.errors import SynclineError
from syncline_bench import messages
from syncline_bench.messages import Connection, Job, Mailbox, Message


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def receive_all(mailbox: Mailbox) -> list[tuple[int, Message]]:
    found: list[tuple[int, Message]] = []
    while mailbox.open:
        found += mailbox.receive(10.0)
    return found


def test_a_job_survives_the_command_line() -> None:
    job = Job("digits", "ps(servers=1) 'quoted' \n\"lines\"", 64, 100, 3)
    assert Job.from_json(job.to_json()) == job


def test_messages_arrive_whole_in_order_with_their_sender() -> None:
    long = "x" * 1_000_000
    with Mailbox(2) as mailbox:
        senders = [Connection(address) for address in mailbox.addresses]

        def talk(sender: Connection) -> None:
            for index in range(3):
                sender.send("progress", index=index, text=long)
            sender.close()

        threads = [threading.Thread(target=talk, args=(sender,)) for sender in senders]
        for thread in threads:
            thread.start()
        found = receive_all(mailbox)
        for thread in threads:
            thread.join()
    for rank in (0, 1):
        mine = [message for sender, message in found if sender == rank]
        assert [message["index"] for message in mine] == [0, 1, 2]
        assert all(message["kind"] == "progress" and message["text"] == long for message in mine)


def test_numbers_that_json_does_not_have_become_null() -> None:
    with Mailbox(1) as mailbox:
        sender = Connection(mailbox.addresses[0])
        sender.send("progress", loss=float("nan"), nested=[{"a": float("-inf")}])
        sender.close()
        ((_, message),) = receive_all(mailbox)
    assert message == {"kind": "progress", "loss": None, "nested": [{"a": None}]}


@pytest.mark.parametrize("line", [b"hello", b"[1]", b'{"no": "kind"}', b"\xff\xfe"])
def test_a_report_that_cannot_be_read_names_its_sender(line: bytes) -> None:
    with Mailbox(2) as mailbox:
        Path(mailbox.addresses[1].split()[0]).write_bytes(line + b"\n")
        with pytest.raises(SynclineError, match="process 1 sent a report that cannot be read"):
            mailbox.receive(10.0)


def test_a_report_is_as_long_as_it_may_be_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose end has not come: no sender fills the starter's memory."""
    line = b'{"kind": "result"}'
    monkeypatch.setattr(messages, "LINE_BYTES", len(line))
    for sent in (line + b" \n", line + b" "):
        with Mailbox(1) as mailbox:
            up = Path(mailbox.addresses[0].split()[0])
            up.write_bytes(line + b"\n")
            assert mailbox.receive(10.0) == [(0, {"kind": "result"})]
            up.write_bytes(sent)
            with pytest.raises(SynclineError, match=f"process 0 sent a report of more than {len(line)} bytes"):
                mailbox.receive(10.0)


def test_nothing_stays_open() -> None:
    before = open_files()
    with Mailbox(3) as mailbox:
        mailbox.receive(0.0)
    assert open_files() == before
    assert not mailbox.open


def test_half_a_line_at_the_end_is_dropped() -> None:
    with Mailbox(1) as mailbox:
        Path(mailbox.addresses[0].split()[0]).write_bytes(b'{"kind": "here"}\n{"kind": "result"}\n{"kind": "res')
        assert receive_all(mailbox) == [(0, {"kind": "result"})]


def test_the_end_of_a_line_is_that_of_its_process_and_orders_come_down_it() -> None:
    with Mailbox(2) as mailbox:
        connections = [Connection(address) for address in mailbox.addresses]
        connections[1].send("hello", at=1)
        assert mailbox.receive(5.0) == [(1, {"kind": "hello", "at": 1})]
        mailbox.receive(0.0)
        mailbox.tell({"do": "this"})
        assert [connection.hear() for connection in connections] == [{"do": "this"}] * 2
        connections[1].close()
        assert mailbox.receive(5.0) == []
        assert (mailbox.ended, mailbox.open) == ([1], True)
        mailbox.tell({"do": "that"})  # to who is there
        assert connections[0].hear() == {"do": "that"}
        mailbox.close_orders()
        assert connections[0].hear() is None
        connections[0].close()
        mailbox.receive(5.0)
        assert (mailbox.ended, mailbox.open) == ([1, 0], False)


def test_a_process_ends_with_its_starter_and_hears_orders_until_then(tmp_path: Path) -> None:
    """Even while it waits for something else; what the starter has said is not read away."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import signal, sys\n"
        "from syncline_bench.messages import Connection\n"
        "line = Connection(sys.argv[1])\n"
        "line.end_with_starter()\n"
        "line.send('ready')\n"
        "line.send('heard', order=line.hear())\n"
        "signal.pause()\n"
    )
    with contextlib.ExitStack() as ending:
        with Mailbox(1) as mailbox:
            process = ending.enter_context(subprocess.Popen([sys.executable, str(program), mailbox.addresses[0]]))
            ending.callback(process.kill)
            due = time.monotonic() + 30

            def heard() -> list[tuple[int, Message]]:
                found: list[tuple[int, Message]] = []
                while not found and time.monotonic() < due:
                    found = mailbox.receive(0.1)
                return found

            assert heard() == [(0, {"kind": "ready"})]
            mailbox.tell({"number": 7})
            assert heard() == [(0, {"kind": "heard", "order": {"number": 7}})]
            assert process.poll() is None
        assert process.wait(30) == 1
