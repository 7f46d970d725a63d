from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from syncline.bench.messages import Job, Mailbox, Message, Sender
from syncline.errors import SynclineError


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def receive_all(mailbox: Mailbox) -> list[tuple[int, Message]]:
    found: list[tuple[int, Message]] = []
    while mailbox.open:
        found += mailbox.receive(10.0)
    return found


def test_a_job_survives_the_command_line() -> None:
    job = Job("digits", "ps(servers=1) 'quoted' \n\"lines\"", 64, 100, 3, (7, 8))
    assert Job.from_json(job.to_json()) == job


def test_messages_arrive_whole_in_order_with_their_sender() -> None:
    long = "x" * 1_000_000
    with Mailbox(2) as mailbox:
        senders = [Sender(os.dup(fd)) for fd in mailbox.fds]
        mailbox.release()

        def talk(sender: Sender) -> None:
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
        sender = Sender(os.dup(mailbox.fds[0]))
        sender.send("progress", loss=float("nan"), nested=[{"a": float("-inf")}])
        sender.close()
        mailbox.release()
        ((_, message),) = receive_all(mailbox)
    assert message == {"kind": "progress", "loss": None, "nested": [{"a": None}]}


@pytest.mark.parametrize("line", [b"hello", b"[1]", b'{"no": "kind"}', b"\xff\xfe"])
def test_a_report_that_cannot_be_read_names_its_sender(line: bytes) -> None:
    with Mailbox(2) as mailbox:
        os.write(mailbox.fds[1], line + b"\n")
        with pytest.raises(SynclineError, match="process 1 sent a report that cannot be read"):
            mailbox.receive(10.0)


def test_nothing_stays_open() -> None:
    before = open_files()
    with Mailbox(3) as mailbox:
        mailbox.receive(0.0)
    assert open_files() == before
    assert not mailbox.open


def test_half_a_line_at_the_end_is_dropped() -> None:
    with Mailbox(1) as mailbox:
        os.write(mailbox.fds[0], b'{"kind": "result"}\n{"kind": "res')
        mailbox.release()
        assert receive_all(mailbox) == [(0, {"kind": "result"})]


def test_a_process_that_inherits_nothing_opens_its_pipe_in_proc() -> None:
    with Mailbox(2) as mailbox:
        senders = [Sender(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_WRONLY)) for fd in mailbox.fds]
        senders[1].send("hello", at=1)
        assert mailbox.receive(5.0) == [(1, {"kind": "hello", "at": 1})]
        senders[1].close()
        assert mailbox.receive(0.0) == []  # not the end, while it is open here
        mailbox.release(1)
        assert mailbox.receive(5.0) == []
        assert mailbox.ended == [1]
        assert mailbox.open
        mailbox.release()
        senders[0].close()
        mailbox.receive(5.0)
        assert (mailbox.ended, mailbox.open) == ([1, 0], False)
