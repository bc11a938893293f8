"""Members of a group for weights meet before the group's first collective."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from weft.resharding.bucket_group import meet

NAMES = ["trainer rank 0", "trainer rank 1", "rollout, part 0"]


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def test_members_go_on_once_all_have_come(store: TCPStore):
    keys = PrefixStore("all", store)
    others = [TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False) for _ in NAMES]
    with ThreadPoolExecutor() as threads:
        each = [
            threads.submit(meet, PrefixStore("all", other), rank, NAMES, 60.0)
            for rank, other in enumerate(others)
        ]
        for done in each:
            done.result(60)
    assert all(keys.check([f"came/{rank}"]) for rank in range(3))


def test_a_member_that_does_not_come_is_named_after_the_deadline(store: TCPStore):
    keys = PrefixStore("some", store)
    keys.set("came/0", "")
    with pytest.raises(TimeoutError, match=r"no group after 0\.2 s: rollout, part 0 did not come"):
        meet(keys, 1, NAMES, 0.2)
