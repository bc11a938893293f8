"""Processes killed for lack of memory are distinguished from crashed ones."""

from pathlib import Path

from weft.controllers.backends.process_diagnostics import kills, said_by_kernel, said_by_ray


def test_the_kernels_count_of_the_own_cgroup_is_read(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    events = tmp_path / "sys/fs/cgroup/job/memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("low 0\noom 3\noom_kill 2\n")
    before = kills(tmp_path)
    assert before == {str(events): 2}
    assert said_by_kernel(before, kills(tmp_path)) == ""
    events.write_text("low 0\noom 4\noom_kill 3\n")
    assert "the kernel has killed a process" in said_by_kernel(before, kills(tmp_path))


def test_the_older_kind_of_cgroup_and_the_machine_are_read_too(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu:/job\n4:memory:/job\n")
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    control = tmp_path / "sys/fs/cgroup/memory/job/memory.oom_control"
    control.parent.mkdir(parents=True)
    control.write_text("under_oom 0\noom_kill 1\n")
    assert sorted(kills(tmp_path).values()) == [1, 7]
    assert kills(tmp_path / "nothing") == {}


def test_rays_memory_monitor_is_named_with_the_memory_in_use():
    said = said_by_ray(
        "ActorDiedError: The actor died because of memory pressure. Memory on the node (IP: 10.0.0.1, ID: 1f) where the actor was running "
        "was 15.20GB / 16.00GB (0.95), which exceeds the memory usage threshold of 0.95."
    )
    assert "Ray's memory monitor ended it" in said and "(15.20GB / 16.00GB were in use)" in said
    assert "Ray's memory monitor" in said_by_ray("OutOfMemoryError: ")
    assert said_by_ray("ActorDiedError: connection error code 2. End of file") == ""
