"""Segments between nodes: fetched once per node, verified by checksum, refused to strangers."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.flight as pf
import pytest

from weft.dataflow.batch import Batch
from weft.dataflow.buffer.flight import Deletions, Peers, SegmentServer, _SegmentClient, make_certificate
from weft.dataflow.buffer.segments import (
    Segment,
    SegmentReader,
    SegmentStore,
    SegmentWriter,
    fetched_path,
)
from weft.dataflow.errors import DamagedSegment, UserError

TOKEN = "secret"
READ = """
import json, sys
from pathlib import Path
from weft.dataflow.buffer.flight import Peers
from weft.dataflow.buffer.segments import Segment, SegmentReader
folder, location, segment = sys.argv[1:]
reader = SegmentReader(Path(folder), "n1", fetch=Peers({"n0": location}, "secret", timeout_s=60).fetch)
print("ready", flush=True)
sys.stdin.readline()
print(sum(reader.read(Segment.from_json(json.loads(segment))).numpy("mine")))
"""


def some(n: int = 1000) -> Batch:
    return Batch.of(mine=list(range(n)))


class CountingServer(SegmentServer):
    """Counts its outgoing messages."""

    num_fetches = 0

    def do_get(self, context: Any, ticket: pf.Ticket) -> pf.FlightDataStream:
        stream = super().do_get(context, ticket)
        with COUNTING:
            self.num_fetches += 1
        return stream


COUNTING = threading.Lock()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CountingServer]:
    (tmp_path / "n0").mkdir()
    server = CountingServer(tmp_path / "n0", "n0", token=TOKEN)
    yield server
    server.close()


@pytest.fixture
def segment(server: SegmentServer) -> Segment:
    return SegmentWriter(server.folder, "n0", "w").append(some())


def reader_of(
    server: SegmentServer, tmp_path: Path, node: str = "n1", token: str = TOKEN
) -> SegmentReader:
    (tmp_path / node).mkdir(exist_ok=True)
    return SegmentReader(
        tmp_path / node, node, fetch=Peers({"n0": server.location}, token, timeout_s=60).fetch
    )


def client_of(
    location: str, timeout_s: float = 60, token: str = TOKEN, certificate: bytes | None = None
) -> _SegmentClient:
    return _SegmentClient(location, token, certificate, timeout_s=timeout_s)


# Fetching


def test_a_segment_of_another_node_is_read_and_fetched_once(server, segment, tmp_path):
    first, second = (reader_of(server, tmp_path) for _ in range(2))
    assert first.read(segment) == first.read(segment) == second.read(segment) == some()
    assert server.num_fetches == 1
    with pa.OSFile(str(fetched_path(tmp_path / "n1", segment))) as file:
        assert pa.ipc.open_stream(file).read_all().num_rows == 1000, "the copy is itself an Arrow stream"


def test_each_node_fetches_for_itself(server, segment, tmp_path):
    assert [reader_of(server, tmp_path, node).read(segment) for node in ("n1", "n2", "n1")] == [
        some()
    ] * 3
    assert server.num_fetches == 2


def test_a_message_of_several_pieces_arrives_whole(server, tmp_path):
    batch = some(5 << 20)  # 40 MiB, in pieces of 16 MiB
    segment = SegmentWriter(server.folder, "n0", "large").append(batch)
    assert reader_of(server, tmp_path).read(segment) == batch


def test_a_batch_without_rows_arrives(server, tmp_path):
    segment = SegmentWriter(server.folder, "n0", "empty").append(some(0))
    assert reader_of(server, tmp_path).read(segment).columns == ("mine",)


def test_processes_of_a_node_that_want_the_same_message_fetch_it_once(server, segment, tmp_path):
    (tmp_path / "n1").mkdir()
    command = [
        sys.executable,
        "-c",
        READ,
        str(tmp_path / "n1"),
        server.location,
        json.dumps(segment.to_json()),
    ]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:  # imports are done: start all at once
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120)[0] for process in processes] == ["499500\n"] * 4
    assert server.num_fetches == 1


def test_a_damaged_copy_is_fetched_again_once(server, segment, tmp_path):
    reader_of(server, tmp_path).read(segment)
    copy = fetched_path(tmp_path / "n1", segment)
    for spoil in (
        lambda good: good[:-100],
        lambda good: good[:-100] + b"x" + good[-99:],
        lambda good: b"",
    ):
        copy.write_bytes(spoil(copy.read_bytes()))
        assert reader_of(server, tmp_path).read(segment) == some()
    assert server.num_fetches == 4


def test_damage_at_the_node_of_a_message_is_named_and_nothing_is_kept(server, segment, tmp_path):
    path = server.folder / segment.file
    with path.open("r+b") as file:
        file.seek(segment.offset + 300)
        file.write(b"spoilt")
    with pytest.raises(DamagedSegment, match=r"its node says: .*the checksum differs") as caught:
        reader_of(server, tmp_path).read(segment)
    assert caught.value.segment == segment
    path.unlink()
    other = Segment("n0", "w.0.000009.arrows", 0, 8, 0)
    with pytest.raises(DamagedSegment, match="the file is missing"):
        reader_of(server, tmp_path).read(other)
    assert not list((tmp_path / "n1" / "fetched" / "n0").glob("*/*[0-9]"))


def test_a_message_that_its_node_found_damaged_is_not_fetched_again(tmp_path):
    fetched: list[Segment] = []

    def fetch(segment: Segment, path: Path) -> None:
        fetched.append(segment)
        raise DamagedSegment(segment, path, "its node says so")

    segment = Segment("n0", "w.0.000000.arrows", 0, 8, 0)
    with pytest.raises(DamagedSegment, match="its node says so"):
        SegmentReader(tmp_path, "n1", fetch=fetch).read(segment)
    assert fetched == [segment]


def test_corruption_in_transit_is_found(server, segment, tmp_path):
    """The receiver verifies the checksum of the reference itself."""
    lie = Segment.from_json([*segment.to_json()[:4], segment.checksum ^ 1])
    copy = fetched_path(tmp_path / "n1", lie)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(client_of(server.location).fetch(segment))
    with pytest.raises(DamagedSegment, match="the checksum differs"):
        reader_of(server, tmp_path).read(lie)


def test_a_node_that_is_no_peer_is_named_with_the_nearest(tmp_path):
    reader = SegmentReader(
        tmp_path, "node-a", fetch=Peers({"node-b": "grpc://127.0.0.1:1"}, TOKEN).fetch
    )
    with pytest.raises(
        UserError, match="is on node 'nodeb', which is not a peer; did you mean 'node-b'"
    ):
        reader.read(Segment("nodeb", "w.0.000000.arrows", 0, 8, 0))
    with pytest.raises(UserError, match="which is not a peer; there are node-b"):
        reader.read(Segment("xyz", "w.0.000000.arrows", 0, 8, 0))
    with pytest.raises(
        UserError, match="is on node 'node-b'; this reader is on 'node-a' and has no peers"
    ):
        SegmentReader(tmp_path, "node-a").read(Segment("node-b", "w.0.000000.arrows", 0, 8, 0))


# Deleting


def test_deleting_a_file_deletes_the_copies_of_its_messages_on_every_node(server, tmp_path):
    writer = SegmentWriter(server.folder, "n0", "w", file_bytes=20_000)
    segments = [writer.append(some()) for _ in range(4)]
    away = reader_of(server, tmp_path)
    assert [away.read(s) for s in segments] == [some()] * 4
    other = SegmentServer(tmp_path / "n1", "n1", token=TOKEN)
    same_name = SegmentWriter(tmp_path / "n1", "n1", "w").append(some(3))
    try:
        deletions = Deletions(Peers({"n0": server.location, "n1": other.location}, TOKEN))
        store = SegmentStore(server.folder, "n0", deletions)
        for s in segments:
            store.published(s)
        store.freed(segments[:2])
        deletions.close(60)
    finally:
        other.close()
    copies = tmp_path / "n1" / "fetched" / "n0"
    assert [path.name for path in copies.iterdir()] == ["w.0.000001.arrows"]
    assert not (server.folder / segments[0].file).exists()
    assert SegmentReader(tmp_path / "n1", "n1").read(same_name) == some(3), (
        "its own file of that name stays"
    )
    assert [away.read(s) for s in segments[2:]] == [some()] * 2


def test_the_store_of_the_driver_deletes_a_file_on_another_node(server, segment, tmp_path):
    deletions = Deletions(Peers({"n0": server.location}, TOKEN))
    store = SegmentStore(tmp_path / "driver", "n9", deletions)
    store.published(segment)
    store.freed([segment])
    assert (server.folder / segment.file).exists()
    store.writer_ended("w", "n0")
    deletions.close(60)
    assert not (server.folder / segment.file).exists()


@pytest.fixture
def silent() -> Iterator[str]:
    """A peer that accepts a connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"grpc://127.0.0.1:{listening.getsockname()[1]}"


def test_a_hanging_dead_or_refusing_peer_blocks_no_deletion(server, segment, silent, tmp_path, caplog):
    other = SegmentServer(tmp_path / "n0", "n0", token="another's")
    peers = {
        "silent": silent,
        "gone": "grpc://127.0.0.1:1",
        "refuses": other.location,
        "n0": server.location,
    }
    deletions = Deletions(
        Peers(peers, TOKEN), timeout_s=0.2, pause_s=0.01
    )  # waited out: each is asked again and again
    deletions("n0", segment.file)
    wanted = [
        f"deleting file {segment.file} of node 'n0' at grpc://127.0.0.1:1: cannot be reached",
        "the token is missing, or is not this run's",
    ]
    deadline = time.monotonic() + 60
    while (server.folder / segment.file).exists() or not all(text in caplog.text for text in wanted):
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)
    deletions.close(60)
    other.close()


class FailsOnce(SegmentServer):
    """Counts the files per message, and fails the first one after a delay."""

    told: ClassVar[list[int]] = []
    answers = threading.Event()

    def do_action(self, context: Any, action: pf.Action) -> list[bytes]:
        self.told.append(len(json.loads(action.body.to_pybytes())))
        if len(self.told) == 1:
            self.answers.wait(60)
            raise OSError("not now")
        return super().do_action(context, action)


def test_a_returning_peer_gets_all_deletions_in_one_message(tmp_path):
    server = FailsOnce(tmp_path / "n0", "n0", token=TOKEN)
    told = FailsOnce.told = []
    writer = SegmentWriter(server.folder, "n0", "w", file_bytes=10_000)
    segments = [writer.append(some()) for _ in range(50)]
    writer.close()
    deletions = Deletions(
        Peers({"n0": server.location}, TOKEN), timeout_s=60, pause_s=0.01
    )  # waited out
    deletions("n0", segments[0].file)
    deadline = time.monotonic() + 60
    while not told and time.monotonic() < deadline:
        time.sleep(0.001)
    for s in segments[1:]:
        deletions("n0", s.file)  # the peer has not answered, but this does not block
    server.answers.set()
    deletions.close(60)
    server.close()
    assert not list(server.folder.glob("w.*")) and told[0] == 1 and told[-1] > 1


# Strangers


@pytest.mark.parametrize("token", ["", "Secret", "secret "])
def test_without_the_token_nothing_is_answered(server, segment, tmp_path, token):
    with pytest.raises(
        pf.FlightUnauthenticatedError, match="the token is missing, or is not this run's"
    ):
        reader_of(server, tmp_path, token=token).read(segment)
    with pytest.raises(pf.FlightUnauthenticatedError):
        client_of(server.location, token=token).delete([("n0", segment.file)])
    with pf.FlightClient(server.location) as client, pytest.raises(pf.FlightUnauthenticatedError):
        client.do_get(pf.Ticket(json.dumps(segment.to_json()).encode())).read_all()
    assert server.num_fetches == 0
    assert (server.folder / segment.file).exists()


def test_a_server_without_a_token_is_refused(tmp_path):
    with pytest.raises(ValueError, match="token is empty"):
        SegmentServer(tmp_path, "n0", token="")


@pytest.mark.parametrize(
    ("node", "file"),
    [
        ("n0", "../secret.0.000000.arrows"),
        ("n0", "/etc/passwd"),
        ("n0", "sub/w.0.000000.arrows"),
        ("n0", "free/w.0.000000.arrows"),
        ("n0", "w.0.000000.arrows\n"),
        ("n0", "*"),
        ("n0", 7),
        ("..", "w.0.000000.arrows"),
        ("../n0", "w.0.000000.arrows"),
    ],
)
def test_nothing_outside_the_folder_is_read_or_deleted(server, segment, tmp_path, node, file):
    outside = tmp_path / "secret.0.000000.arrows"
    outside.write_bytes((server.folder / segment.file).read_bytes())
    client = client_of(server.location)
    for attempt in (
        lambda: client.fetch(Segment(node, file, *segment.to_json()[2:])),
        lambda: client.delete([("n0", segment.file), (node, file)]),
    ):
        with pytest.raises(pf.FlightServerError, match=r"a segment's file is named|a node's name is"):
            attempt()
    assert outside.exists()
    assert (server.folder / segment.file).exists()


@pytest.fixture
def encrypting(tmp_path: Path) -> Iterator[tuple[CountingServer, bytes]]:
    own = make_certificate()
    server = CountingServer(tmp_path / "n0", "n0", token=TOKEN, certificate=own)
    yield server, own.certificate
    server.close()


def test_between_hosts_messages_travel_encrypted_and_are_read_and_deleted(encrypting, tmp_path):
    server, certificate = encrypting
    segment = SegmentWriter(server.folder, "n0", "w").append(some())
    peers = Peers({"n0": server.location}, TOKEN, {server.location: certificate}, timeout_s=60)
    assert server.location.startswith("grpc+tls://")
    reader = SegmentReader(tmp_path / "n1", "n1", fetch=peers.fetch)
    assert reader.read(segment) == some()
    deletions = Deletions(peers, timeout_s=60)
    deletions("n0", segment.file)
    deletions.close(60)
    assert not (server.folder / segment.file).exists()


def test_peers_without_the_certificate_read_nothing_and_get_no_token(encrypting, tmp_path):
    server, _ = encrypting
    segment = SegmentWriter(server.folder, "n0", "w").append(some())
    plain = server.location.replace("grpc+tls", "grpc")
    for location, certificate in (
        (server.location, make_certificate().certificate),
        (server.location, None),
        (plain, None),
    ):
        with pytest.raises((TimeoutError, pf.FlightError)):
            client_of(location, 2, certificate=certificate).fetch(segment)
    assert server.num_fetches == 0


def test_it_listens_on_this_machine_alone(server):
    assert server.location == f"grpc://127.0.0.1:{server.port}"
    # /proc/net/tcp and tcp6 list sockets with hexadecimal addresses; state 0A is listening. gRPC
    # uses tcp6 sockets bound to ::ffff:127.0.0.1.
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    listening = {
        row[1].lower() for row in rows if row[3] == "0A" and row[1].endswith(f":{server.port:04X}")
    }
    assert listening <= {
        f"{mapped}0100007f:{server.port:04x}" for mapped in ("", "0000000000000000ffff0000")
    }
    assert listening


# Deadlines


def test_a_server_that_was_closed_is_named(server, segment, tmp_path):
    server.close()
    with pytest.raises(
        TimeoutError,
        match=f"fetching file {segment.file} of node 'n0' from {server.location}: cannot be reached",
    ):
        reader_of(server, tmp_path).read(segment)


class GoneServer(SegmentServer):
    """Counts requests, and answers like an unreachable server."""

    asked = 0

    def do_action(self, context: Any, action: pf.Action) -> list[bytes]:
        self.asked += 1
        raise pf.FlightUnavailableError("gone")


def test_a_node_that_cannot_be_reached_is_asked_once_about_its_segments(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.dataflow.buffer.flight.VERIFIED_AT_ONCE", 2)
    listed = [Segment("n0", f"w.0.{number:06d}.arrows", 0, 8, 0) for number in range(5)]
    with (
        GoneServer(tmp_path / "n0", "n0", token=TOKEN) as gone,
        SegmentServer(tmp_path / "n1", "n1", token=TOKEN) as there,
    ):
        found = Peers({"n0": gone.location, "n1": there.location}, TOKEN).unreadable(
            [*listed, Segment("n1", "w.0.000000.arrows", 0, 8, 0)]
        )
        assert gone.asked == 1
    assert [*found][:5] == listed and all("cannot be reached" in found[segment] for segment in listed)
    assert "missing" in found[Segment("n1", "w.0.000000.arrows", 0, 8, 0)]


def test_a_server_that_never_answers_is_given_up_at_the_deadline(segment, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        location = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        peers = Peers({"n0": location}, TOKEN, timeout_s=0.3)  # waited out
        reader = SegmentReader(tmp_path, "n1", fetch=peers.fetch)
        with pytest.raises(TimeoutError, match=f"from {location}: "):
            reader.read(segment)


def test_a_server_that_is_killed_is_named_within_the_deadline(segment, server, tmp_path):
    program = """
import sys
from pathlib import Path
from weft.dataflow.buffer.flight import SegmentServer
server = SegmentServer(Path(sys.argv[1]), "n0", token="secret")
print(server.location, flush=True)
server.wait()
"""
    command = [sys.executable, "-c", program, str(server.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        location = process.stdout.readline().strip()
        assert client_of(location).fetch(segment)
        process.kill()
    with pytest.raises(TimeoutError, match=location):
        client_of(location, 2).fetch(segment)  # waited out


# Two hosts, simulated on one machine


@pytest.mark.thorough
def test_a_consumer_in_another_network_reads_over_the_wire(tmp_path):
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and `ip`")
    tag = f"{os.getpid() % 100_000:05d}"
    here, there = f"weft-a{tag}", f"weft-b{tag}"

    def ip(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    if ip("netns", "add", here).returncode:
        pytest.skip("network namespaces are not allowed here")
    serve = """
import json, sys
from pathlib import Path
from weft.dataflow.batch import Batch
from weft.dataflow.buffer.flight import SegmentServer
from weft.dataflow.buffer.segments import SegmentWriter
folder = Path(sys.argv[1])
segment = SegmentWriter(folder, "n0", "w").append(Batch.of(mine=list(range(1000))))
server = SegmentServer(folder, "n0", host="10.231.7.1", token="secret")
print(json.dumps([server.location, segment.to_json()]), flush=True)
sys.stdin.readline()
"""
    process = None
    try:
        for words in (
            f"netns add {there}",
            f"link add va{tag} netns {here} type veth peer name vb{tag} netns {there}",
            f"-n {here} addr add 10.231.7.1/24 dev va{tag}",
            f"-n {there} addr add 10.231.7.2/24 dev vb{tag}",
            f"-n {here} link set va{tag} up",
            f"-n {there} link set vb{tag} up",
        ):
            if (done := ip(*words.split())).returncode:
                pytest.skip(f"ip {words}: {done.stderr}")
        command = ["ip", "netns", "exec", here, sys.executable, "-c", serve, str(tmp_path / "n0")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        location, segment = json.loads(process.stdout.readline())
        read = [sys.executable, "-c", READ, str(tmp_path / "n1"), location, json.dumps(segment)]
        done = subprocess.run(
            ["ip", "netns", "exec", there, *read], input="\n", capture_output=True, text=True
        )
        assert done.stdout == "ready\n499500\n", done.stderr
        ip("-n", here, "link", "set", f"va{tag}", "down")  # cut the wire
        cut = Segment.from_json([*segment[:2], segment[2] + 8, *segment[3:]])
        read = [
            sys.executable,
            "-c",
            READ.replace("timeout_s=60", "timeout_s=1"),
            *read[3:5],
            json.dumps(cut.to_json()),
        ]
        done = subprocess.run(
            ["ip", "netns", "exec", there, *read], input="\n", capture_output=True, text=True
        )
        assert f"TimeoutError: fetching file {cut.file} of node 'n0' from {location}" in done.stderr
    finally:
        if process is not None:
            process.communicate("\n", timeout=60)
        for name in (here, there):
            ip("netns", "del", name)
