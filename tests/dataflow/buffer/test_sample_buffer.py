"""The sample buffer: a run may be ended at any moment, in any way, and goes on."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dataflow.batch import Batch
from weft.dataflow.buffer.disk import Disk
from weft.dataflow.buffer.ledger import Ledger
from weft.dataflow.buffer.ledger_state import save
from weft.dataflow.buffer.ledger_view import table
from weft.dataflow.buffer.log import LogReader, Position
from weft.dataflow.buffer.rows import Lease, Published, Staleness
from weft.dataflow.buffer.sample_buffer import LOG, BufferConfig, SampleBuffer, checkpoints, expected_rows, restore
from weft.dataflow.buffer.segments import Segment, SegmentReader, SegmentWriter
from weft.dataflow.config import Config
from weft.dataflow.errors import DamagedSegment, UserError
from weft.dataflow.graph import Graph
from weft.dataflow.handle import Handle
from weft.dataflow.node import SOURCE
from weft.dataflow.operation import Declaration, Shape
from weft.dataflow.source import TableSource
from weft.dataflow.takes import Quorum, TrainingBatch
from weft.dataflow.tracing import SymbolicRows, Trace
from weft.workers.worker import Worker

PROMPTS = TableSource("prompts", pa.table({"prompt": ["a"]}))


class Trainer(Worker):
    Config = Config


def function(rows: object) -> None: ...
def method(self: object, rows: object) -> None: ...
def samples_of(rows: object, n: int) -> None: ...
def first_of_each_group(rows: object, n: int, deadline_s: float | None = None) -> None: ...


def train_graph(samples: int = 3, *, scorer: str = "score", quorum: bool = True) -> Graph:
    """generate, score, the first samples of each group, keep, advantages, update."""
    drawn = Trace("train", PROMPTS)
    rows = SymbolicRows(drawn, SOURCE, {"prompt": ""})
    generate = Declaration("generate", Shape.EXPAND, reads=("prompt",), writes=("response",))
    rows = drawn.add(rows, None, samples_of, generate, (), {"n": samples})
    rows = drawn.add(rows, None, function, Declaration(scorer, reads=("response",), writes=("reward",)), (), {})
    if quorum:
        first = Declaration("first", Shape.FILTER, reads=("reward",), takes=Quorum)
        rows = drawn.add(rows, None, first_of_each_group, first, (), {"n": 2, "deadline_s": 2.0})
        rows = drawn.add(rows, None, function, Declaration("keep", Shape.FILTER, reads=("reward",)), (), {})
    advantages = Declaration("advantages", Shape.GROUP, reads=("reward",), writes=("advantage",))
    rows = drawn.add(rows, None, function, advantages, (), {})
    update = Declaration("update", reads=("advantage",), takes=TrainingBatch())
    drawn.add(rows, Handle(Trainer, Config(), "trainer"), method, update, (), {})
    return drawn.finish()


def eval_graph() -> Graph:
    drawn = Trace("eval", PROMPTS)
    rows = SymbolicRows(drawn, SOURCE, {"prompt": ""})
    generate = Declaration("generate", Shape.EXPAND, reads=("prompt",), writes=("response",))
    rows = drawn.add(rows, None, samples_of, generate, (), {"n": 1})
    drawn.add(rows, None, function, Declaration("score", reads=("response",), writes=("reward",)), (), {})
    return drawn.finish()


GRAPHS = {"train": train_graph(), "eval": eval_graph()}


# A run that is ended by force


class Crash(BaseException):
    """The process is killed, or the power is gone: nobody catches it."""


@dataclass
class FragileDisk(Disk):
    """Crashes before or after its n-th operation, or in the middle of it; on `lose_power` it forgets what was not synced.

    It only remembers what was synced: the real disk is spared the work.
    """

    crash_at: int | None = None
    when: str | float = "before"
    """"before", "after", or how much of a write is done."""
    operations: list[str] = field(default_factory=list)
    dead: bool = False
    paths: dict[int, Path] = field(default_factory=dict)
    synced: dict[Path, int] = field(default_factory=dict)
    renames: list[tuple[Path, Path, bytes | None]] = field(default_factory=list)
    """Those that may be undone, with what was there before."""
    cut: dict[Path, bytes] = field(default_factory=dict)
    """What was in files whose truncation may be undone."""

    def _reach(self, what: str) -> str | float | None:
        if self.dead:
            raise Crash
        self.operations.append(what)
        if len(self.operations) - 1 != self.crash_at:
            return None
        self.dead = True
        if self.when == "before":
            raise Crash
        return self.when

    def open(self, path: Path) -> int:
        when = self._reach("open")
        size = path.stat().st_size if path.exists() else 0
        descriptor = super().open(path)
        self.paths[descriptor] = path
        self.synced.setdefault(path, size)
        self._end(when)
        return descriptor

    def write(self, descriptor: int, data: bytes) -> None:
        when = self._reach("write")
        self.cut.pop(self.paths[descriptor], None)
        super().write(descriptor, data[: int(when * len(data))] if isinstance(when, float) else data)
        self._end(when)

    def sync(self, descriptor: int) -> None:
        when = self._reach("sync")
        path = self.paths[descriptor]
        self.synced[path] = path.stat().st_size
        self.cut.pop(path, None)
        self._end(when)

    def truncate(self, descriptor: int, size: int) -> None:
        when = self._reach("truncate")
        path = self.paths[descriptor]
        if path.stat().st_size > size:
            self.cut[path] = path.read_bytes()
        super().truncate(descriptor, size)
        self.synced[path] = min(self.synced[path], size)
        self._end(when)

    def rename(self, source: Path, target: Path) -> None:
        when = self._reach("rename")
        before = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        self.synced[target] = self.synced.pop(source)
        self.paths = {d: target if path == source else path for d, path in self.paths.items()}
        self.renames.append((source, target, before))
        self._end(when)

    def sync_folder(self, folder: Path) -> None:
        when = self._reach("sync_folder")
        self.renames.clear()
        self._end(when)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        del self.paths[descriptor]

    def _end(self, when: str | float | None) -> None:
        if when is not None:
            raise Crash

    def bury(self) -> None:
        """What the kernel does for a process that is gone."""
        for descriptor in list(self.paths):
            self.close(descriptor)

    def lose_power(self, chance: random.Random) -> None:
        self.bury()
        for source, target, before in reversed(self.renames):
            if chance.random() < 0.5 and target.exists():
                target.rename(source)
                self.synced[source] = self.synced.pop(target)
                if before is not None:
                    target.write_bytes(before)
        for path, content in self.cut.items():
            if chance.random() < 0.5:
                path.write_bytes(content)
                self.synced[path] = len(content)
        for path, size in self.synced.items():
            if path.exists() and (now := path.stat().st_size) > size:
                with path.open("r+b") as file:
                    file.truncate(chance.randint(size, now))


@dataclass
class Driver:
    """Does whatever can be done, by chance: the same from the same state."""

    buffer: SampleBuffer
    chance: random.Random
    clock: list[float]
    name: str
    prompts: int = 7
    committed: int = 0
    """Bytes of the log for which `commit` has returned."""
    snapshots: dict[int, str] | None = None
    """Position -> what the ledgers were there, when they are wanted."""

    def __post_init__(self) -> None:
        self.seen()

    def seen(self) -> None:
        if self.snapshots is not None:
            self.snapshots[self.buffer.log.position.offset] = state_of(self.buffer)

    @property
    def ledger(self) -> Ledger:
        return self.buffer.ledgers[self.chance.choice(["train", "train", "eval"])]

    def step(self) -> None:
        moves = [self.issue, self.claim, self.claim, self.claim, self.publish, self.finish, self.finish]
        seldom = [self.release, self.wait, self.checkpoint]
        self.chance.choice([*moves, *moves, self.commit, self.commit, *seldom])()
        self.seen()

    def issue(self) -> None:
        ledger = self.ledger
        issued = self.buffer.notes.get(ledger.name, 0)
        if issued < self.prompts and ledger.groups_in_flight < 4:
            ledger.issue([issued], [2], round=issued // 2)
            self.seen()
            self.buffer.note(ledger.name, issued + 1)

    def claim(self) -> None:
        ledger = self.ledger
        n = self.chance.choice(ledger.graph.nodes)
        staleness = Staleness(self.buffer.notes.get("version", 0), 1, "requeue") if n.operation.updates else None
        ledger.claim(n, max_rows=2, max_groups=1, deadline_s=3.0, staleness=staleness)

    def publish(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            lease = self.chance.choice(ledger.leases)
            self.give(ledger, lease, [i for i in lease.open if self.chance.random() < 0.6])

    def give(self, ledger: Ledger, lease: Lease, held: list[int]) -> None:
        offset = self.buffer.log.position.offset
        into = Segment(self.buffer.node, f"{self.name}.0.{offset // 4000:06d}.arrows", offset, 10, 0)
        where = into if lease.node.writes else None
        if lease.node.makes_level is None:
            published = Published(np.array(held, np.int64), np.ones(len(held), np.int64))
            self.buffer.publish(ledger, lease, published, where)
            return
        each = lease.node.arguments["n"]
        ids = [lease.first_children[lease.ids.tolist().index(p)] + k for p in held for k in range(each)]
        versions = np.full(len(ids), self.buffer.notes.get("version", 0))
        parents = np.repeat(np.array(held, np.int64), each)
        made = Published(np.array(ids, np.int64), np.ones(len(ids), np.int64), versions, parents, np.unique(parents))
        self.buffer.publish(ledger, lease, made, where)

    def finish(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            lease = self.chance.choice(ledger.leases)
            if lease.open and lease.node.operation.shape is not Shape.FILTER:
                self.give(ledger, lease, list(lease.open))
                self.seen()
            ledger.finish(lease)
            if lease.node.operation.updates:
                self.seen()
                self.buffer.note("version", self.buffer.notes.get("version", 0) + 1)

    def release(self) -> None:
        ledger = self.ledger
        if ledger.leases:
            ledger.release(self.chance.choice(ledger.leases))

    def wait(self) -> None:
        self.clock[0] += 0.7
        for ledger in self.buffer.ledgers.values():
            ledger.expire()

    def commit(self) -> None:
        end = self.buffer.log.position.offset
        self.buffer.commit()
        self.committed = end

    def checkpoint(self) -> None:
        end = self.buffer.log.position.offset
        self.buffer.checkpoint()
        self.committed = end

    def run_out(self) -> None:
        for _ in range(20_000):
            issued = all(self.buffer.notes.get(name, 0) >= self.prompts for name in self.buffer.ledgers)
            if issued and not any(ledger.groups_in_flight for ledger in self.buffer.ledgers.values()):
                self.buffer.close()
                return
            self.step()
        raise AssertionError("the run does not come to its end")


def state_of(buffer: Any) -> str:
    """Of a buffer, or of a history: all that must come back."""
    ledgers = {name: list(save(ledger)) for name, ledger in buffer.ledgers.items()}
    return json.dumps([ledgers, buffer.notes, buffer.ids.next_id, buffer.ids.next_group])


def fine(segment: Segment) -> None:
    """In these runs the segments are names alone."""


def start(folder: Path, disk: Disk | None = None, seed: int = 5, **options: Any) -> Driver:
    clock = [0.0]
    config = BufferConfig(sync_interval_s=1.0)
    buffer = SampleBuffer.create(folder, GRAPHS, config=config, disk=disk, clock=lambda: clock[0])
    return Driver(buffer, random.Random(seed), clock, "first", **options)


def go_on(folder: Path, disk: Disk | None = None, name: str = "second", **options: Any) -> Driver:
    clock = [1e6]
    config = BufferConfig(sync_interval_s=1.0)
    buffer = SampleBuffer.recover(
        folder, GRAPHS, config=config, disk=disk, check=fine, clock=lambda: clock[0], **options
    )
    return Driver(buffer, random.Random(name), clock, name)


STEPS = 330


@dataclass
class Reference:
    """The run as it goes when nothing happens to it."""

    folder: Path
    log: bytes
    states: dict[int, str]
    operations: list[str]
    recovery: int = 0

    def points(self, chance: random.Random) -> Iterator[tuple[int, str | float]]:
        for number, what in enumerate(self.operations):
            yield number, "before"
            yield number, "after"
            if what == "write":
                yield number, chance.random()
                yield number, chance.random()

    def crash(self, folder: Path, number: int, when: str | float) -> tuple[FragileDisk, int]:
        """The run, ended there; returns its disk and the bytes of the log that were committed."""
        disk, driver = FragileDisk(number, when), None
        with pytest.raises(Crash):
            driver = start(folder, disk)
            for _ in range(STEPS):
                driver.step()
            driver.buffer.close()
        return disk, driver.committed if driver else 0

    def check(self, folder: Path, at_least: int) -> None:
        """What is on the disk is the state at some moment that is not before what was safe."""
        if not (folder / LOG).exists():
            assert at_least == 0
            return
        history = restore(folder, GRAPHS)
        end = history.end.offset
        assert end >= at_least and (folder / LOG).read_bytes()[:end] == self.log[:end]
        if end in self.states:
            assert state_of(history) == self.states[end]
        else:
            assert end < min(self.states) or not self.between(end)

    def between(self, end: int) -> bool:
        """Every record of this run leads to a state that was looked at, but those of `expire`."""
        reader = LogReader(self.folder / LOG)
        record = next(r for r in reader if reader.end.offset >= end)
        return record["do"] not in ("offer", "release", "graph")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder, disk = tmp_path_factory.mktemp("runs") / "reference", FragileDisk()
    states: dict[int, str] = {}
    driver = start(folder, disk, snapshots=states)
    for _ in range(STEPS):
        driver.step()
    driver.buffer.close()
    assert Counter(disk.operations)["rename"] >= 3
    done = [r["do"] for r in LogReader(folder / LOG)]
    assert {"issue", "claim", "publish", "finish", "release", "note"} <= set(done)
    return Reference(folder, (folder / LOG).read_bytes(), states, disk.operations)


def recovered(folder: Path, disk: Disk | None = None, name: str = "second") -> Driver:
    """The run goes on, if it had begun."""
    if not (folder / LOG).exists():
        clock = [1e6]
        return Driver(
            SampleBuffer.create(folder, GRAPHS, disk=disk, clock=lambda: clock[0]), random.Random(0), clock, name
        )
    driver = go_on(folder, disk, name)
    conserved(driver.buffer)
    assert not any(ledger.leases for ledger in driver.buffer.ledgers.values())
    return driver


def conserved(buffer: SampleBuffer) -> None:
    for ledger in buffer.ledgers.values():
        counts = ledger.counts()
        assert counts["issued"] == sum(v for k, v in counts.items() if k != "issued")


def consumed_once(folder: Path) -> None:
    """By the log alone: no row went through a node twice, and in the end every row has gone through or was dropped."""
    leases: dict[tuple[str, int], dict[str, Any]] = {}
    used: Counter[tuple[str, str, int]] = Counter()
    waits_for_the_end = {n.name for g in GRAPHS.values() for n in g.nodes if n.operation.takes_groups}
    reader = LogReader(folder / LOG)
    for record in reader:
        key = record.get("graph", ""), record.get("lease", 0)
        match record["do"]:
            case "claim":
                assert key not in leases, "a token was given out twice"
                leases[key] = {"node": record["node"], "open": dict.fromkeys(record["ids"]), "staged": []}
            case "publish":
                lease = leases[key]
                held = list(dict.fromkeys(record.get("parents", record["ids"])))
                for id in held:
                    del lease["open"][id]
                if lease["node"] in waits_for_the_end:
                    lease["staged"] += held
                else:
                    used.update((key[0], lease["node"], id) for id in held)
            case "finish":
                lease = leases[key]
                used.update((key[0], lease["node"], id) for id in [*lease["staged"], *lease["open"]])
            case _:
                pass
    assert reader.damage is None and set(used.values()) == {1}


def comes_to_its_end(driver: Driver) -> None:
    driver.run_out()
    for ledger in driver.buffer.ledgers.values():
        counts = ledger.counts()
        assert counts["waiting"] == counts["leased"] == 0 and counts["issued"] == counts["done"] + counts["dropped"]
    consumed_once(driver.buffer.folder)
    again = restore(driver.buffer.folder, GRAPHS)
    assert state_of(again) == state_of(driver.buffer) and not again.damage


def test_a_run_that_is_killed_at_any_moment_goes_on(tmp_path: Path, reference: Reference):
    for k, (number, when) in enumerate(reference.points(random.Random(1))):
        folder = tmp_path / str(k)
        disk, committed = reference.crash(folder, number, when)
        disk.bury()
        reference.check(folder, committed)
        comes_to_its_end(recovered(folder, FragileDisk()))
        shutil.rmtree(folder)


def test_a_run_that_loses_power_at_any_moment_goes_on(tmp_path: Path, reference: Reference):
    chance = random.Random(2)
    for k, (number, when) in enumerate(reference.points(chance)):
        folder = tmp_path / str(k)
        disk, _ = reference.crash(folder, number, when)
        safe = disk.synced.get(folder / LOG, 0)
        disk.lose_power(chance)
        reference.check(folder, safe)
        comes_to_its_end(recovered(folder, FragileDisk()))
        shutil.rmtree(folder)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("every", [39, pytest.param(13, marks=pytest.mark.slow)])
def test_a_run_that_ends_again_while_it_is_recovered_goes_on(
    tmp_path: Path, reference: Reference, every: int, power: bool
):
    chance, crashes = random.Random(3), 0
    for number, when in list(reference.points(chance))[3::every]:
        shutil.rmtree(tmp_path / "once", ignore_errors=True)
        disk, committed = reference.crash(tmp_path / "once", number, when)
        safe = disk.synced.get(tmp_path / "once" / LOG, 0) if power else committed
        if power:
            disk.lose_power(chance)
        disk.bury()
        for again in range(40):
            folder = tmp_path / "twice"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(tmp_path / "once", folder)
            second = FragileDisk(again // 3, ("before", 0.5, "after")[again % 3])
            try:
                recovered(folder, second).buffer.log.close()
            except Crash:
                crashes += 1
            else:
                break
            if power:
                second.lose_power(chance)
            second.bury()
            # Leases were given back and graphs named perhaps, and nothing else: what was safe is there.
            assert not (folder / LOG).exists() or restore(folder, GRAPHS).end.offset >= safe
            third = recovered(folder, FragileDisk())
            assert all(third.buffer.notes.get(k, 0) >= v for k, v in json.loads(notes_at(reference, safe)).items())
            comes_to_its_end(third)
    assert crashes > 2600 / every


def notes_at(reference: Reference, offset: int) -> str:
    known = [at for at in reference.states if at <= offset]
    return json.dumps(json.loads(reference.states[max(known)])[1]) if known else "{}"


def test_what_a_killed_process_wrote_is_safe_from_the_loss_of_power_once_the_next_has_recovered(
    tmp_path: Path, reference: Reference
):
    writes = [k for k, what in enumerate(reference.operations) if what == "write"]
    for number in writes[1:]:
        folder = tmp_path / str(number)
        disk, _ = reference.crash(folder, number, "after")
        disk.bury()
        disk.crash_at, disk.dead = None, False  # the same machine, with what it has not synced yet
        driver = go_on(folder, disk)
        position, size = driver.buffer.checkpoint(), (folder / LOG).stat().st_size
        disk.lose_power(random.Random(number))
        assert (folder / LOG).stat().st_size == size == position.offset
        history = restore(folder, GRAPHS)
        assert history.end == position and len(history.checkpoints) == len(checkpoints(folder)) and not history.damage


# What is damaged, missing, or of another time


def broken_run(folder: Path, seed: int = 5) -> tuple[list[Position], str, str]:
    """A run with two checkpoints and something behind them: the positions, the state at the first and at the end."""
    driver = start(folder, seed=seed)
    positions: list[Position] = []
    first = ""
    for steps in (60, 40, 50):
        for _ in range(steps):
            driver.chance.choice([driver.issue, driver.claim, driver.claim, driver.publish, driver.finish])()
        if len(positions) < 2:
            positions.append(driver.buffer.checkpoint())
        first = first or state_of(driver.buffer)
    driver.buffer.commit(sync=True)
    driver.buffer.log.close()
    return positions, first, state_of(driver.buffer)


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path):
    folder = tmp_path / "run"
    _, _, end = broken_run(folder)
    latest, earlier = checkpoints(folder)
    whole = latest.read_bytes()
    lines = whole.splitlines(keepends=True)
    broken = [b"", whole[:-1], whole[: len(whole) // 2], b"".join(lines[:-1]), b"".join(lines[1:])]
    for byte in range(0, len(whole), 17):
        changed = bytearray(whole)
        changed[byte] ^= 1 << byte % 8
        broken.append(bytes(changed))
    for data in broken:
        latest.write_bytes(data)
        history = restore(folder, GRAPHS)
        assert state_of(history) == end and history.checkpoints == [earlier]
        assert len(history.damage) == 1 and str(latest) in history.damage[0] and "the one" not in history.damage[0]
    earlier.write_bytes(b"")
    history = restore(folder, GRAPHS)
    assert state_of(history) == end and history.checkpoints == [], "the log alone tells everything"
    assert [str(p) in d for p, d in zip((latest, earlier), history.damage, strict=True)] == [True, True]
    comes_to_its_end(go_on(folder))


def test_a_checkpoint_beyond_the_end_of_the_log_is_passed_over(tmp_path: Path):
    folder = tmp_path / "run"
    positions, first, _ = broken_run(folder)
    log = folder / LOG
    log.write_bytes(log.read_bytes()[: positions[0].offset])
    history = restore(folder, GRAPHS)
    assert state_of(history) == first and history.end == positions[0]
    assert len(history.damage) == 1 and f"byte {positions[1].offset} of the log" in history.damage[0]
    comes_to_its_end(go_on(folder))


def test_a_checkpoint_of_a_future_that_was_given_up_is_passed_over(tmp_path: Path):
    folder = tmp_path / "run"
    positions, _, _ = broken_run(folder)
    late = checkpoints(folder)[0]
    kept = late.read_bytes()
    driver = go_on(folder, at=positions[0])
    assert not late.exists(), "it is deleted when the run goes back"
    while driver.buffer.log.position.offset < positions[1].offset + 500:
        driver.step()
    driver.buffer.commit(sync=True)
    driver.buffer.log.close()
    late.write_bytes(kept)  # its deletion did not survive the loss of power
    history = restore(folder, GRAPHS)
    assert state_of(history) == state_of(driver.buffer) and late not in history.checkpoints
    assert any(str(late) in d for d in history.damage)


def test_a_damaged_log_is_used_up_to_the_damage_and_the_rest_is_kept(tmp_path: Path):
    folder = tmp_path / "run"
    positions, _, _ = broken_run(folder)
    data = bytearray((folder / LOG).read_bytes())
    byte = (positions[1].offset + len(data)) // 2
    data[byte] ^= 4
    (folder / LOG).write_bytes(data)
    driver = go_on(folder)
    (damage,) = driver.buffer.damage
    end = int(damage.split("byte ")[1].split(":")[0])
    assert positions[1].offset <= end <= byte and "checksum" in damage and "the state before it is used" in damage
    assert (folder / f"{LOG}.cut-{end}").read_bytes() == data[end:]
    comes_to_its_end(driver)


def test_a_run_goes_back_to_a_checkpoint_and_what_came_after_it_is_kept(tmp_path: Path):
    folder = tmp_path / "run"
    positions, first, _ = broken_run(folder)
    whole = (folder / LOG).read_bytes()
    history = restore(folder, GRAPHS, at=positions[0])
    assert state_of(history) == first and history.end == positions[0] and not history.damage
    driver = go_on(folder, at=positions[0])
    assert (folder / f"{LOG}.cut-{positions[0].offset}").read_bytes() == whole[positions[0].offset :]
    assert driver.buffer.damage == [] and len(checkpoints(folder)) == 1
    notes = json.loads(first)[1]
    assert driver.buffer.notes == notes
    comes_to_its_end(driver)


def test_a_run_that_ends_while_it_goes_back_can_go_back_again(tmp_path: Path):
    positions, first, _ = broken_run(tmp_path / "run")
    number = 0
    for number in range(60):
        folder = tmp_path / "again"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "run", folder)
        disk = FragileDisk(number // 3, ("before", 0.4, "after")[number % 3])
        try:
            go_on(folder, disk, at=positions[0]).buffer.log.close()
            break
        except Crash:
            disk.lose_power(random.Random(number))
        assert state_of(restore(folder, GRAPHS, at=positions[0])) == first
        driver = go_on(folder, at=positions[0])
        assert not driver.buffer.damage
        comes_to_its_end(driver)
    assert number >= 9


def test_a_position_that_is_not_in_the_log_is_named(tmp_path: Path):
    folder = tmp_path / "run"
    positions, _, _ = broken_run(folder)
    size = (folder / LOG).stat().st_size
    (damage,) = restore(folder, GRAPHS, at=Position(size + 5, 1)).damage
    assert damage == f"{folder / LOG} is sound to byte {size}: the state at byte {size + 5} is not there"
    assert restore(folder, GRAPHS, at=Position(positions[0].offset, 77)).damage


def test_a_run_can_be_looked_into_without_its_graphs(tmp_path: Path):
    folder = tmp_path / "run"
    positions, first, end = broken_run(folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert state_of(restore(folder)) == end and state_of(restore(folder, at=positions[0])) == first
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before, "it was only looked at"
    driver = Driver(SampleBuffer.recover(folder, check=fine), random.Random(1), [0.0], "looking")
    assert state_of(driver.buffer).count('"lease"') == 0


def test_the_graphs_must_be_those_of_the_run(tmp_path: Path):
    folder = tmp_path / "run"
    broken_run(folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for graphs, says in (
        (GRAPHS | {"train": train_graph(scorer="judge")}, "graph 'train' is not what it was .* see judge"),
        (GRAPHS | {"train": train_graph(quorum=False)}, "graph 'train' is not what it was"),
        ({"train": GRAPHS["train"]}, "the run has a graph 'eval', which is not given"),
        (
            GRAPHS | {"third": eval_graph()},
            r"is of a run of the graphs \['eval', 'train'\], not \['eval', 'third', 'train'\]",
        ),
    ):
        with pytest.raises(UserError, match=says):
            SampleBuffer.recover(folder, graphs, check=fine)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before, "nothing was changed"
    with pytest.raises(UserError, match="holds the buffer of a run already"):
        SampleBuffer.create(folder, GRAPHS)
    with pytest.raises(UserError, match="holds no log of a run"):
        SampleBuffer.recover(tmp_path / "else", GRAPHS)


def test_other_numbers_of_samples_are_no_other_graph(tmp_path: Path):
    folder = tmp_path / "run"
    _, _, end = broken_run(folder)
    graphs = GRAPHS | {"train": train_graph(samples=9)}
    assert state_of(restore(folder, graphs, clock=lambda: -5.0)) == end


# Columns


@dataclass
class Columns:
    """A run of one graph whose columns are really written, a file each."""

    folder: Path
    buffer: SampleBuffer
    writer: SegmentWriter
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = self.buffer.ledgers["train"]

    @classmethod
    def start(cls, folder: Path) -> "Columns":
        buffer = SampleBuffer.create(folder, {"train": train_graph(quorum=False)}, clock=lambda: 0.0)
        return cls(folder, buffer, SegmentWriter(buffer.segments, "driver", "w", file_bytes=1 << 10))

    def recover(self, name: str, **options: Any) -> "Columns":
        graphs = {"train": train_graph(quorum=False)}
        buffer = SampleBuffer.recover(self.folder, graphs, clock=lambda: 0.0, **options)
        return Columns(self.folder, buffer, SegmentWriter(buffer.segments, "driver", name, file_bytes=1 << 10))

    def segment(self, ids: list[int]) -> Segment:
        text = [f"{id} " + "x" * 900 for id in ids]
        return self.writer.append(Batch(pa.record_batch({"sample_id": ids, "text": text})))

    def do(self, name: str) -> list[Segment]:
        """All that is ready for a node, a segment for each group."""
        segments: list[Segment] = []
        n = next(n for n in self.ledger.graph.nodes if n.name.endswith(name))
        while lease := self.ledger.claim(n, max_rows=1, max_groups=1):
            ids = lease.ids.tolist()
            parents = None
            if n.makes_level is not None:
                ids = [lease.first_children[0] + k for k in range(2)]
                parents = np.array([lease.ids[0]] * 2)
            segment = self.segment(ids) if n.writes else None
            segments += [segment] if segment else []
            published = Published(np.array(ids, np.int64), np.ones(len(ids), np.int64), None, parents)
            self.buffer.publish(self.ledger, lease, published, segment)
            self.ledger.finish(lease)
        self.buffer.commit()
        return segments

    def close(self) -> None:
        self.writer.close()
        self.buffer.commit(sync=True)
        self.buffer.log.close()

    def readable(self, segments: list[Segment]) -> list[bool]:
        reader, found = SegmentReader(self.buffer.segments, "driver"), list[bool]()
        for segment in segments:
            try:
                found.append(len(reader.read(segment)) > 0)
            except DamagedSegment:
                found.append(False)
        reader.close()
        return found


def test_a_group_whose_columns_are_damaged_or_gone_is_issued_again_and_named(tmp_path: Path):
    run = Columns.start(tmp_path / "run")
    run.ledger.issue([7, 8, 9], [1, 1, 1], round=0)
    gone, damaged, sound = run.do("generate")
    run.close()
    (run.buffer.segments / gone.file).unlink()
    path = run.buffer.segments / damaged.file
    data = bytearray(path.read_bytes())
    data[damaged.offset + 300] ^= 1
    path.write_bytes(data)
    run = run.recover("w2")
    assert run.readable([gone, damaged, sound]) == [False, False, True]
    first, second = run.buffer.damage
    assert first.startswith("group 0 of graph 'train' is issued again") and f"{gone.file}" in first
    assert second.startswith("group 1 of graph 'train' is issued again") and "checksum" in second
    assert run.ledger.group_ids == [2, 3, 4] and run.ledger.dropped == {"lost": 6}
    assert [r["tokens"] for r in table(run.ledger).to_pylist() if r["group_id"] in (3, 4)] == [1, 1]
    lease = run.ledger.claim(run.ledger.graph.nodes[0])
    assert lease is not None and [r.position for r in lease.rows] == [7, 8]
    run.close()


def test_segments_of_a_checkpoint_outlive_their_rows_as_long_as_it_is_kept(tmp_path: Path):
    run = Columns.start(tmp_path / "run")
    run.ledger.issue([0, 1], [1, 1], round=0)
    segments = run.do("generate")
    position = run.buffer.checkpoint()
    for name in ("score", "advantages", "update"):
        segments += run.do(name)
    assert run.ledger.groups_in_flight == 0
    assert run.readable(segments)[:2] == [True, True] and not any(run.readable(segments)[2:-1])
    run.close()
    for name in ("w2", "w3"):  # it may be recovered as often as need be, and still go back
        run = run.recover(name)
        run.ledger.issue([5], [1], round=1)
        run.do("generate")
        assert run.readable(segments)[:2] == [True, True] and run.buffer.damage == []
        run.close()
    for name in ("w4", "w5"):
        run = run.recover(name, at=position)
        assert run.buffer.damage == [] and run.ledger.groups_in_flight == 2
        for node in ("score", "advantages", "update"):
            run.do(node)
        assert run.readable(segments)[:2] == [True, True]
        run.close()
    run = run.recover("w6")
    for kept in (True, False):  # two are kept
        run.ledger.issue([6], [1], round=2)
        run.buffer.checkpoint()
        assert run.readable(segments)[:2] == [kept, kept]
    run.close()


def test_the_source_is_kept_and_what_it_was_before_goes(tmp_path: Path):
    run = Columns.start(tmp_path / "run")
    first = run.segment([1, 2, 3])
    run.buffer.set_source("train", first)
    run.close()
    run = run.recover("w2")
    assert run.ledger.source == first and run.readable([first]) == [True]
    run.buffer.set_source("train", second := run.segment([1, 2]))
    run.buffer.set_source("train", second)
    assert run.readable([first, second]) == [True, True], "the log may be cut in front of the change"
    run.buffer.checkpoint()
    assert run.readable([first, second]) == [False, True]
    run.close()
    (run.buffer.segments / second.file).unlink()
    run = run.recover("w3")
    assert not run.buffer.damage and run.ledger.source is None
    run.close()


def test_the_segments_of_a_run_that_is_through_go(tmp_path: Path):
    run = Columns.start(tmp_path / "run")
    run.ledger.issue([0, 1], [1, 1], round=0)
    for name in ("generate", "score", "advantages", "update"):
        run.do(name)
    run.writer.close()
    run.buffer.close()
    run.buffer.close()
    assert not run.buffer.segments.exists()
    assert SampleBuffer.recover(run.folder, {"train": train_graph(quorum=False)}).ledgers["train"].counts()["done"] == 6


def test_a_checkpoint_with_a_lease_whose_first_groups_are_finished_can_be_loaded(tmp_path: Path):
    run = SampleBuffer.create(tmp_path, {"eval": eval_graph()}, clock=lambda: 0.0)
    ledger = run.ledgers["eval"]
    ledger.issue([0, 1], [1, 1], round=0)
    lease = ledger.claim(ledger.graph.nodes[0])
    assert lease is not None
    ids, parents = lease.first_children, lease.ids
    ledger.publish(lease, Published(ids, np.ones(2, int), None, parents), None)
    ledger.finish(lease)
    lease = ledger.claim(ledger.graph.nodes[1])
    assert lease is not None
    ledger.publish(lease, Published(ids[:1], np.ones(1, int)), None)
    assert ledger.group_ids == [1]
    run.checkpoint()
    run.log.close()
    again = SampleBuffer.recover(tmp_path, {"eval": eval_graph()}).ledgers["eval"]
    lease = again.claim(again.graph.nodes[1])
    assert lease is not None and lease.ids.tolist() == ids[1:].tolist()


# How much is let in


@dataclass
class Stream:
    """A producer that issues all that it may, workers, and a trainer that takes the oldest groups, several at a time."""

    folder: Path
    chance: random.Random
    config: BufferConfig
    staleness: int | None
    groups_per_update: int
    samples: int
    group_bytes: int
    shared: int
    """How many prompts are generated, and lie in a segment, together."""
    prompts: int = 60
    version: int = 0
    issued: int = 0
    trained: int = 0
    blind: int = -1
    """Last group that was let in before the size of any was known."""
    training: Lease | None = None
    oldest: int = 0

    def __post_init__(self) -> None:
        graph = train_graph(self.samples, quorum=False)
        self.buffer = SampleBuffer.create(self.folder, {"train": graph}, config=self.config, clock=lambda: 0.0)
        self.ledger = self.buffer.ledgers["train"]
        self.generate, self.score, self.advantages, self.update = graph.nodes
        self.at_work: list[tuple[Lease, int]] = []
        """With the version of the policy that they were claimed with."""

    def run(self) -> None:
        idle = 0
        while self.trained < self.prompts:
            moves = [self.produce, self.claim, self.complete, self.complete, self.train]
            self.chance.shuffle(moves)
            moved = [move() for move in moves]
            idle = 0 if any(moved) else idle + 1
            assert idle < 3, f"nobody can go on: {self.buffer.capacity('train')}, {self.ledger.counts()}"
            self.check()
        self.buffer.log.close()

    def produce(self) -> bool:
        room = self.buffer.capacity("train", staleness=self.staleness, groups_per_update=self.groups_per_update)
        number = min(room.groups, self.prompts - self.issued)
        if number:
            self.ledger.issue(range(number), [1] * number, round=0)
            self.issued += number
        if not self.ledger.largest_group_bytes:
            self.blind = self.issued
        return number > 0

    def claim(self) -> bool:
        n = self.chance.choice([self.generate, self.generate, self.score, self.advantages])
        lease = self.ledger.claim(n, max_rows=self.chance.randint(1, self.shared), max_groups=1)
        if lease is not None:
            self.at_work.append((lease, self.version))
        return lease is not None or self.claim_any()

    def claim_any(self) -> bool:
        leases = (
            self.ledger.claim(n, max_rows=self.shared, max_groups=1)
            for n in (self.generate, self.score, self.advantages)
        )
        lease = next((lease for lease in leases if lease), None)
        self.at_work += [(lease, self.version)] if lease else []
        return lease is not None

    def complete(self) -> bool:
        if not self.at_work:
            return False
        lease, version = self.at_work.pop(self.chance.randrange(len(self.at_work)))
        ids, parents, versions, num_bytes = lease.ids, None, None, 0
        if lease.node is self.generate:
            parents = np.repeat(lease.ids, self.samples)
            ids = np.add.outer(lease.first_children, np.arange(self.samples)).ravel()
            versions = np.full(len(ids), version)
            num_bytes = self.group_bytes * len(lease.rows)
        offset = self.buffer.log.position.offset
        into = Segment("driver", "w.0.000001.arrows", offset, num_bytes, 0)
        published = Published(ids, np.ones(len(ids), np.int64), versions, parents)
        self.buffer.publish(self.ledger, lease, published, into)
        self.ledger.finish(lease)
        return True

    def train(self) -> bool:
        if self.training is not None:
            self.end_update(self.training)
            return True
        waiting = self.prompts - self.trained
        number = min(self.groups_per_update, waiting)
        first = [g for g in self.ledger.group_ids if g >= self.trained][:number]
        done = {
            (r["group_id"], name)
            for r in table(self.ledger).to_pylist()
            if r["level"] == "generate"
            for name in r["done"]
        }
        if len(first) < number or not all((g, "advantages") in done for g in first):
            return False
        staleness = None if self.staleness is None else Staleness(self.version, self.staleness, "wait")
        self.training = self.ledger.claim(self.update, max_groups=number, staleness=staleness)
        assert self.training is not None and not self.ledger.stale, "a group is too old"
        assert sorted(set(self.training.group_ids.tolist())) == first
        self.oldest = max(self.oldest, self.version - int(self.training.versions.min()))
        return True

    def end_update(self, lease: Lease) -> None:
        number = len(set(lease.group_ids.tolist()))
        self.ledger.publish(lease, Published(lease.ids, np.ones(len(lease.ids), np.int64)), None)
        self.ledger.finish(lease)
        self.version, self.trained, self.training = self.version + 1, self.trained + number, None

    def check(self) -> None:
        if self.config.max_rows is not None:
            assert self.ledger.rows_in_flight <= self.config.max_rows
        if self.config.max_bytes is not None and self.trained >= self.blind >= 0:
            fits = self.ledger.num_bytes <= self.config.max_bytes
            assert fits or self.ledger.groups_in_flight <= self.groups_per_update, "but what one update takes is let in"
            if self.shared == 1:
                least = self.group_bytes * self.groups_per_update
                assert self.ledger.num_bytes <= max(self.config.max_bytes, least)
        if self.staleness is not None:
            assert self.oldest <= self.staleness


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_let_in_keeps_every_bound_and_the_run_goes_on(tmp_path_factory: pytest.TempPathFactory, seed: int):
    chance = random.Random(seed)
    per_update, samples = chance.randint(1, 5), chance.randint(1, 4)
    each = expected_rows(train_graph(samples, quorum=False))
    assert each == 1 + samples
    group_bytes = chance.choice([10, 100])
    config = BufferConfig(
        max_rows=chance.choice([None, each * per_update, each * per_update + chance.randint(0, 60)]),
        max_bytes=chance.choice([None, 1, group_bytes * per_update, group_bytes * chance.randint(1, 20)]),
    )
    staleness = chance.choice([None, 0, 0, 1, 2, 5])
    folder = tmp_path_factory.mktemp("run") / "buffer"
    Stream(folder, chance, config, staleness, per_update, samples, group_bytes, chance.choice([1, 3])).run()


def test_room_says_what_stands_against_more(tmp_path: Path):
    config = BufferConfig(max_rows=9, max_bytes=10_000)
    buffer = SampleBuffer.create(tmp_path, {"train": train_graph(2, quorum=False)}, config=config)
    assert buffer.capacity("train").groups == 3
    buffer.ledgers["train"].issue([0, 1], [1, 1], round=0)
    assert buffer.capacity("train").groups == 1
    assert buffer.capacity("train").reason == "2 rows in flight, max_rows=9, 3 a group"
    room = buffer.capacity("train", staleness=0, groups_per_update=2)
    assert (room.groups, room.reason) == (0, "2 groups wait to be trained on, max_staleness=0")
    buffer.log.close()
