"""A process that was ended for want of memory is told from one that crashed."""

from pathlib import Path

from weft.controllers.backends.out_of_memory import kills, why_ended


def test_the_kernels_count_of_the_own_cgroup_is_read(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    events = tmp_path / "sys/fs/cgroup/job/memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("low 0\noom 3\noom_kill 2\n")
    before = kills(tmp_path)
    assert before == {str(events): 2}
    assert why_ended(RuntimeError("gone"), before, kills(tmp_path)) is None
    events.write_text("low 0\noom 4\noom_kill 3\n")
    assert "the kernel has ended a process" in str(why_ended(RuntimeError("gone"), before, kills(tmp_path)))


def test_the_older_kind_of_cgroup_and_the_machine_are_read_too(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu:/job\n4:memory:/job\n")
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    control = tmp_path / "sys/fs/cgroup/memory/job/memory.oom_control"
    control.parent.mkdir(parents=True)
    control.write_text("under_oom 0\noom_kill 1\n")
    assert sorted(kills(tmp_path).values()) == [1, 7]
    assert kills(tmp_path / "nothing") == {}


def test_rays_memory_monitor_is_named():
    class OutOfMemoryError(Exception):
        """As Ray calls it."""

    assert "Ray's memory monitor ended it" in str(why_ended(OutOfMemoryError(), {}, {}))
    assert "Ray's memory monitor" in str(
        why_ended(RuntimeError("killed due to the node running low: memory pressure"), {}, {})
    )
    assert why_ended(RuntimeError("connection error code 2. End of file"), {}, {}) is None
