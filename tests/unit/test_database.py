"""Databases shared by processes: exclusion, errors in words, file systems that can't be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl import database
from pipelinerl.database import DamagedDatabaseError, Database, refuse_network_file_system

SCHEMA = "CREATE TABLE IF NOT EXISTS numbers (n INTEGER)"


def test_a_transaction_is_whole_or_nothing(tmp_path: Path) -> None:
    first, second = Database(tmp_path / "db", SCHEMA), Database(tmp_path / "db", SCHEMA)
    with first.transaction() as connection:
        connection.execute("INSERT INTO numbers VALUES (1)")
        assert first.rows("SELECT n FROM numbers") == [(1,)]
        assert second.rows("SELECT n FROM numbers") == []
    assert second.rows("SELECT n FROM numbers") == [(1,)]
    with pytest.raises(ZeroDivisionError), first.transaction() as connection:
        connection.executemany("INSERT INTO numbers VALUES (?)", ((2 // (1 - n),) for n in range(2)))
    assert first.rows("SELECT n FROM numbers WHERE n > ?", 0) == [(1,)]


def test_the_log_of_a_temporary_database_does_not_grow_with_the_number_of_transactions(tmp_path: Path) -> None:
    log = tmp_path / "db-wal"
    written = Database(tmp_path / "db", SCHEMA, temporary=True)
    sizes = []
    for _ in range(3):
        for number in range(1500):
            with written.transaction() as connection:
                connection.execute("INSERT INTO numbers VALUES (?)", (number,))
        sizes.append(log.stat().st_size)
    assert sizes[0] == sizes[1] == sizes[2]
    assert written.rows("SELECT count(*) FROM numbers") == [(4500,)]


def test_changes_of_any_process_are_noticed(tmp_path: Path) -> None:
    first, second = Database(tmp_path / "db", SCHEMA), Database(tmp_path / "db", SCHEMA)
    before = first.changes()
    assert first.changes() == before
    for changed in (first, second):
        with changed.transaction() as connection:
            connection.execute("INSERT INTO numbers VALUES (1)")
        assert first.changes() != before
        before = first.changes()
    with second.transaction():
        pass
    assert first.changes() == before


def test_a_database_that_stays_locked_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.02)
    first, second = Database(tmp_path / "db", SCHEMA), Database(tmp_path / "db", SCHEMA)
    with (
        first.transaction(),
        pytest.raises(TimeoutError, match="the process that holds it is stopped"),
        second.transaction(),
    ):
        pass
    with second.transaction():
        pass


def test_unusable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"text" * 1000)
    with pytest.raises(DamagedDatabaseError, match="db: file is not a database"):
        Database(tmp_path / "db", SCHEMA)
    with pytest.raises(OSError, match="unable to open") as caught:
        Database(tmp_path / "no such folder" / "db", SCHEMA)
    assert caught.value.filename == str(tmp_path / "no such folder" / "db")


@pytest.mark.parametrize(
    ("mounts", "refused"),
    [
        ("server:/home {0} nfs4 rw 0 0", True),
        ("server:/home / nfs4 rw 0 0\n/dev/sda {0} ext4 rw 0 0", False),
        ("/dev/sda / ext4 rw 0 0\nserver:/home {0}other nfs rw 0 0", False),
        (r"//server/share {0}/a\040b cifs rw 0 0", True),
    ],
)
def test_network_file_systems_are_refused(tmp_path: Path, mounts: str, refused: bool) -> None:
    table, folder = tmp_path / "mounts", tmp_path / "a b"
    folder.mkdir()
    table.write_text(mounts.format(tmp_path) + "\n")
    if refused:
        with pytest.raises(OSError, match=r"network file system .*choose a local disk"):
            refuse_network_file_system(folder, table)
    else:
        refuse_network_file_system(folder, table)


def test_without_a_table_of_mounts_nothing_is_refused(tmp_path: Path) -> None:
    refuse_network_file_system(tmp_path, tmp_path / "proc" / "mounts")
