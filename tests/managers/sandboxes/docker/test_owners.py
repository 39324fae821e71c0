"""Whether the owner of a container is dead."""

from __future__ import annotations

from tangram.managers.sandboxes.docker.owners import is_dead, new_owner_name


def test_an_owner_without_a_record_counts_as_alive() -> None:
    name = new_owner_name()
    host, boot, namespace, pid, started, nonce = name.split("/")
    assert not is_dead(name)
    assert is_dead("/".join([host, boot, namespace, pid, str(int(started) + 1), nonce])), "its number is another's now"
    assert is_dead("/".join([host, "another-boot", namespace, pid, started, nonce]))
    assert not is_dead("/".join(["another-host", boot, namespace, pid, "1", nonce]))
    assert not is_dead("/".join([host, boot, "another-namespace", pid, "1", nonce]))
    assert not is_dead("someone")
