"""How a served meeting ends: it waits for those who are to read why, for nobody else, and not for ever."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from plays import member
from served import Serve, Served
from strangers import LIMIT_S, SECRET


def test_after_a_fault_it_goes_on_until_all_have_read_it(serve: Serve) -> None:
    """A minute would outlast this test: it ends with the last one."""
    served = serve(3)
    served.client(0).give_up("no such interface")
    served.server.close(60.0)
    for rank in (1, 2):
        text = str(served.come(rank))
        assert text.startswith("rank 0 (from 127.0.0.1:")
        assert text.endswith("): no such interface")
    served.server.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(served.where, LIMIT_S)


def test_after_a_fault_it_goes_where_nobody_else_is_coming(serve: Serve) -> None:
    served = serve(3)
    served.client(0).give_up("no such interface")
    served.server.close()
    served.server.join()


def test_one_that_does_not_read_the_fault_is_not_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.wire.meeting_sockets._READ_S", 0.05)
    served = serve(3)
    served.prove(1)
    served.client(0).give_up("no such interface")
    served.server.close()
    served.server.join()


def test_one_that_was_let_in_before_all_were_through_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has proved itself, and says nothing and stays."""
    monkeypatch.setattr("syncline.wire.meeting_sockets._READ_S", 0.05)
    served = serve(1)
    client = served.client(0)
    client.enter()
    client.call_roll(member(0, 1), "a run", SECRET)
    stays, there = socket.socketpair()
    served.server._new.append((0, there, "a test"))
    client.through()
    served.server.close()
    served.server._thread.join(LIMIT_S)
    try:
        assert not served.server._thread.is_alive()
    finally:
        stays.close()


def test_an_end_that_is_asked_for_again_writes_to_no_other_file(serve: Serve) -> None:
    """The bell's descriptor is free when the thread has ended."""
    served = serve(1)
    served.server.close()
    served.server.join()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        served.server._bell = other
        served.server.close()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)


def test_its_own_time_is_limited_too(serve: Serve) -> None:
    served = serve(2, limit_s=0.1)
    assert "the time for this start is over" in str(served.come(0))


def test_the_interpreter_waits_for_it() -> None:
    """Those who come late shall read why."""
    served = Served(1)
    thread = next(thread for thread in threading.enumerate() if thread.name == "syncline-meeting")
    assert not thread.daemon
    served.close()
