"""The manifest: any damage to a file below its folder is found, and the file named."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.dataflow.runs.files import Disk
from weft.dataflow.runs.manifest import MANIFEST, verify_manifest, write_manifest

CONTENT = bytes(range(240))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step_000012"
    (folder / "actor" / "state").mkdir(parents=True)
    (folder / "actor" / "state" / "rank_0.safetensors").write_bytes(CONTENT)
    (folder / "actor" / "rank_0.json").write_text("{}")
    (folder / "empty").write_bytes(b"")
    write_manifest(folder)
    return folder


def replace(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def flip(name: str, byte: int) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[byte] ^= 4
        (folder / name).write_bytes(content)

    return change


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


STATE = "actor/state/rank_0.safetensors"
DAMAGES = {
    "truncated": (replace(STATE, CONTENT[:120]), [f"{STATE} is 120 bytes, not 240"]),
    "emptied": (replace(STATE, b""), [f"{STATE} is 0 bytes, not 240"]),
    "longer": (replace(STATE, CONTENT + b"x"), [f"{STATE} is 241 bytes, not 240"]),
    "lost to zeros": (replace(STATE, bytes(240)), [f"{STATE} has checksum "]),
    "first bit": (flip(STATE, 0), [f"{STATE} has checksum "]),
    "last bit": (flip(STATE, 239), [f"{STATE} has checksum "]),
    "missing": (remove(STATE), [f"{STATE} is missing"]),
    "half-written beside": (
        replace("actor/state/rank_1.partial", b"x"),
        ["actor/state/rank_1.partial is not in the "],
    ),
    "hidden beside": (replace("actor/.x", b""), ["actor/.x is not in the manifest"]),
    "without manifest": (remove(MANIFEST), ["manifest.json is missing"]),
    "empty manifest": (replace(MANIFEST, b""), ["manifest.json is damaged: its 0 bytes"]),
    "manifest of something else": (
        replace(MANIFEST, b'{"files": {}}'),
        ["manifest.json is damaged: its 13 bytes"],
    ),
}


def test_an_untouched_folder_is_intact(folder: Path):
    assert verify_manifest(folder) == []
    write_manifest(folder)
    assert verify_manifest(folder) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(folder: Path, damage: str):
    change, expected = DAMAGES[damage]
    change(folder)
    found = verify_manifest(folder)
    assert len(found) == len(expected)
    assert all(one.startswith(start) for one, start in zip(found, expected, strict=True)), found


def test_all_damaged_files_are_named_at_once(folder: Path):
    remove("empty")(folder)
    flip("actor/rank_0.json", 1)(folder)
    replace("zzz", b"")(folder)
    assert [damage.split()[0] for damage in verify_manifest(folder)] == [
        "actor/rank_0.json",
        "empty",
        "zzz",
    ]


def test_any_changed_or_lost_byte_of_the_manifest_is_found(folder: Path):
    whole = (folder / MANIFEST).read_bytes()
    for byte in range(len(whole)):
        for changed in (whole[:byte], whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :]):
            (folder / MANIFEST).write_bytes(changed)
            (damage,) = verify_manifest(folder)
            assert damage.startswith(f"{MANIFEST} is damaged")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_named(folder: Path):
    (folder / STATE).chmod(0)
    assert verify_manifest(folder) == [f"{STATE} cannot be read: Permission denied"]


class NotingDisk(Disk):
    """Notes in order what survives a power failure; optionally full."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.done: list[str] = []

    def write(self, descriptor: int, data: bytes) -> None:
        if self.full:
            super().write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self.done.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.done.append(f"{source.name} -> {target.name}")
        super().rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        self.done.append(f"{folder.name}/")
        super().sync_folder(folder)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_manifest_comes_after_everything_that_it_names_is_synced(folder: Path):
    disk = NotingDisk()
    write_manifest(folder, disk=disk)
    assert sorted(disk.done[:3]) == ["empty", "rank_0.json", "rank_0.safetensors"]
    assert disk.done[3:6] == ["state/", "actor/", "step_000012/"]
    assert disk.done[6:] == [
        "manifest.json.partial",
        "manifest.json.partial -> manifest.json",
        "step_000012/",
    ]


def test_a_full_disk_leaves_no_manifest(folder: Path):
    with pytest.raises(OSError, match="No space left"):
        write_manifest(folder, disk=NotingDisk(full=True))
    assert verify_manifest(folder) == [f"{MANIFEST} is missing"]
    assert not list(folder.glob("manifest*"))
    write_manifest(folder)
    assert verify_manifest(folder) == []
