"""CPU quotas of containers limit the CPUs that Weft counts."""

import os
from pathlib import Path

import pytest

from weft.dataflow.cgroups import cpu_quota, usable_cpus


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("", {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        # Without a namespace of its own, the container's group is below the root.
        ("0::/kubepods/pod1", {"kubepods/pod1/cpu.max": "3200000 100000", "cpu.max": "max 100000"}, 32),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "800000 100000"}, 4),
        ("1:name=x:/\n4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "200000"}, 2),
        ("4:cpu,cpuacct:/docker/x", {"cpu/docker/x/cpu.cfs_quota_us": "50000"}, 0.5),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1"}, None),
    ],
)
def test_the_tightest_quota_of_either_version_counts(
    own: str, files: dict[str, str], quota: float | None, tmp_path: Path
):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        path.with_name("cpu.cfs_period_us").write_text("100000\n")
    there = len(os.sched_getaffinity(0))
    assert cpu_quota(tmp_path) == quota
    assert usable_cpus(tmp_path) == (there if quota is None else max(1, min(there, int(quota))))
