"""Messages between processes: whatever a process writes, its owner reads whole messages and never blocks."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ascent.processes.channel import (
    Channel,
    ChannelClosedError,
    PolledChannel,
    describe_exit,
    pickle_line,
    poll_channels,
    unpickle_line,
)


@pytest.fixture
def ends() -> Iterator[tuple[PolledChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield PolledChannel(ours, max_bytes=1 << 20), theirs


def test_values_are_read_one_after_the_other(ends: tuple[PolledChannel, socket.socket]) -> None:
    theirs, ours = ends[0].socket, ends[1]
    theirs.setblocking(True)
    channel = Channel(ours)
    channel.write({"a": [1, "ü"]}, b"t")
    assert theirs.recv(99) == b't{"a": [1, "\\u00fc"]}\n'
    theirs.sendall(b'{"a": 1}\n[2')
    assert channel.read() == {"a": 1}
    theirs.sendall(b", 3]\nraw\n")
    assert channel.read() == [2, 3]
    assert channel.read_bytes() == b"raw"
    theirs.sendall(pickle_line({"b": (1, 2)}) + b"\n")
    assert unpickle_line(channel.read_bytes()) == {"b": (1, 2)}
    theirs.sendall(b"cut off")
    theirs.close()
    with pytest.raises(ChannelClosedError):
        channel.read()


def test_a_full_socket_is_sent_the_rest_when_there_is_room(ends: tuple[PolledChannel, socket.socket]) -> None:
    channel, theirs = ends
    content = bytes(1 << 22)
    channel.send(content)
    assert channel.is_full
    received = len(theirs.recv(1 << 16))
    while received <= len(content):
        assert poll_channels([channel], 5.0) == []
        received += len(theirs.recv(1 << 20))
    assert received == len(content) + 1 and not channel.is_full


def test_messages_are_objects_and_a_closed_channel_has_ended(ends: tuple[PolledChannel, socket.socket]) -> None:
    channel, theirs = ends
    assert channel.is_silent and poll_channels([channel], 0.0) == []
    theirs.sendall(b'{"a": 1}\n[1]\n\n' + b"[" * 100_000 + b'\n{"b"')
    assert poll_channels([channel], 5.0) == [channel] and not channel.is_silent
    assert channel.receive_objects() == [{"a": 1}, {}, {}]
    assert channel.unread == b'{"b"' and not channel.ended and not channel.is_too_long
    theirs.close()
    assert channel.receive_objects() == [] and channel.ended == "it closed its pipe"


def test_a_report_of_the_exit_follows_whatever_was_written_before(ends: tuple[PolledChannel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(b'{"a": 1}\n{"half')
    Channel(theirs).report_exit(-11)
    theirs.close()
    assert channel.receive() == [b'{"a": 1}', b'{"half'] and channel.ended == "SIGSEGV"
    Channel(theirs).report_exit(0)  # a closed channel is no error


def test_a_message_that_never_ends_is_too_long(ends: tuple[PolledChannel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.setblocking(False)
    while not channel.is_too_long:
        theirs.send(bytes(1 << 16))
        assert channel.receive() == []
    assert len(channel.unread) <= channel.max_bytes + (1 << 16)


def test_an_exit_is_described() -> None:
    assert [describe_exit(code) for code in (0, 3, -9, -50, None)] == [
        "exit status 0",
        "exit status 3",
        "SIGKILL",
        "signal 50",
        "it closed its pipe",
    ]
