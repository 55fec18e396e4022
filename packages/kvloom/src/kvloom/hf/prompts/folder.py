"""The folder of a prompt store: which entries it has, how large they are, and which must go.

Each entry is a file, `{64 hex digits}.safetensors`. The index is a SQLite database, which processes
and threads share. It can be rebuilt from the files, except for the times of last use. A
file is renamed, and removed, inside a transaction that changes its row. A process that dies there
leaves a whole file without a row, or a row without a file; opening the folder mends both.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...errors import SavedCacheError, StoreError
from ...store import files
from .. import save

_T = TypeVar("_T")

INDEX = "index-1.sqlite"
"""The name of the database; the number is the version of its tables."""

_SUFFIX, _DAMAGED = ".safetensors", ".damaged"
_KEY_BYTES = 32
_KEY = f"[0-9a-f]{{{2 * _KEY_BYTES}}}"
_PATIENCE = 60  # seconds that a process waits for the transactions of others
_END_OF_TIME = 253402300800.0  # the year 10000, which no date reaches
_PAGE = 4096  # bytes, in which file systems allocate
_LOG_PAGES = 64  # of the database's log, which counts as a part of the folder
_LOG = 1 << 16  # bytes of the database's shared memory, and of a short log
_SEEN_BYTES = 100  # of the index, for a boundary that a prompt had
_SEEN_SHARE = 0.005  # of the largest size of a store, for these
_OF_PARENTS: list[Any] = []  # connections of processes that this one was forked from
_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    key BLOB PRIMARY KEY, tokens INTEGER, nbytes INTEGER, created REAL, used REAL, model TEXT,
    recipe TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON entries (used);
CREATE TABLE IF NOT EXISTS seen (number INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB UNIQUE);
"""


@dataclass(frozen=True)
class Entry:
    """A stored beginning of a prompt.

    Attributes:
        key: The digest of all that it depends on, in hex; its file has this name.
        tokens: How many tokens it covers.
        nbytes: The bytes of its file, in whole pages of 4 KiB.
        created: When it was stored, in seconds since 1970.
        used: When it was last used.
        model: The class of its model.
        recipe: The name of its recipe.
    """

    key: str
    tokens: int
    nbytes: int
    created: float
    used: float
    model: str
    recipe: str


class PromptFolder:
    """The entries of a folder, which is created if it is missing.

    Raises `StoreError` wherever the folder or the database cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.database = folder, folder / INDEX
        self._lock, self._process = threading.Lock(), os.getpid()
        self._db: sqlite3.Connection | None = None
        self._opened: int | None = None  # the database that `_db` has open
        self._run(lambda db: None)

    def path(self, key: str) -> Path:
        """Return the file of an entry."""
        return self.folder / f"{key}{_SUFFIX}"

    def longest(self, chain: Sequence[bytes]) -> int:
        """Return how many digests of a chain the longest entry covers; 0: no entry does."""
        return self._run(lambda db: _last(db, "SELECT key FROM entries WHERE key IN", chain))

    def last_seen(self, chain: Sequence[bytes]) -> int:
        """Return how many digests of a chain an earlier prompt had at least; 0: no prompt."""
        return self._run(lambda db: _last(db, "SELECT digest FROM seen WHERE digest IN", chain))

    def note(self, chain: Sequence[bytes], max_bytes: int) -> None:
        """Note the chain of a prompt for `last_seen`, and forget the oldest ones."""

        def work(db: sqlite3.Connection) -> None:
            with _transaction(db):
                db.executemany("REPLACE INTO seen (digest) VALUES (?)", [(x,) for x in chain])
                newest = db.execute("SELECT max(number) FROM seen").fetchone()[0] or 0
                oldest = newest - int(max_bytes * _SEEN_SHARE / _SEEN_BYTES)
                db.execute("DELETE FROM seen WHERE number <= ?", (oldest,))

        self._run(work)

    def entries(self) -> list[Entry]:
        """Return all entries, the last used ones first."""
        return self._run(
            lambda db: [_entry(row) for row in db.execute(f"{_ALL} ORDER BY used DESC")]
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the folder's files, in whole pages."""
        return sum(_nbytes(path) for path in self._files(lambda _: True))

    @property
    def database_nbytes(self) -> int:
        """Bytes of the database, in whole pages, with its shared memory and a short log."""
        return _nbytes(self.database) + _LOG

    def touch(self, key: str) -> None:
        """Note that an entry was used."""
        self._run(
            lambda db: db.execute(
                "UPDATE entries SET used = ? WHERE key = ?", (time.time(), bytes.fromhex(key))
            )
        )

    def publish(self, temporary: str, entry: Entry) -> None:
        """Give a temporary file its name and a row; the first of two with one key stays."""
        path = self.path(entry.key)

        def work(db: sqlite3.Connection) -> None:
            renamed = False
            try:
                with _transaction(db):
                    if not path.exists():
                        os.replace(temporary, path)
                        renamed = True
                        files.sync_folder(self.folder)
                    _insert(db, replace(entry, nbytes=_nbytes(path)))
            except BaseException:
                if renamed:
                    os.replace(path, temporary)
                raise

        self._run(work)

    def evict(self, max_bytes: int, max_age: float) -> list[Entry]:
        """Remove entries that are too old, then those of the longest disuse; return them."""

        def others() -> list[Path]:
            return self._files(lambda name: not name.endswith(_SUFFIX))

        def surplus_of(db: sqlite3.Connection) -> int:
            (stored,) = db.execute("SELECT total(nbytes) FROM entries").fetchone()
            return int(stored) + sum(map(_nbytes, others())) - max_bytes

        def work(db: sqlite3.Connection) -> list[Entry]:
            oldest = time.time() - max_age
            if surplus_of(db) > 0:
                _shorten_log(db)
            with _transaction(db):
                for path in others():
                    if path.suffix == _DAMAGED and _modified(path) < oldest:
                        path.unlink(missing_ok=True)
                surplus, evicted = surplus_of(db), list[Entry]()
                too_old = db.execute("SELECT total(used < ?) FROM entries", (oldest,)).fetchone()
                if surplus <= 0 and too_old == (0,):
                    return evicted
                for row in db.execute(f"{_ALL} ORDER BY used").fetchall():
                    entry = _entry(row)
                    if entry.used >= oldest and surplus <= 0:
                        break
                    self.path(entry.key).unlink(missing_ok=True)
                    _delete(db, entry.key)
                    surplus -= entry.nbytes
                    evicted.append(entry)
            if evicted:
                _shorten_log(db)
            return evicted

        return self._run(work)

    def remove(self, key: str, damage: str | None = None) -> None:
        """Forget an entry whose file is missing; set the file aside, with a warning, for a damage.

        The name of a file that is set aside is no entry's.
        """

        def work(db: sqlite3.Connection) -> None:
            with _transaction(db):
                exists = self.path(key).exists()
                if exists and damage is not None:
                    _set_aside(self.path(key), damage)
                if not exists or damage is not None:
                    _delete(db, key)

        self._run(work)

    def _reconcile(self, db: sqlite3.Connection) -> None:
        """Remove the temporary files of killed writers; give each file a row, and no other."""
        files.remove_abandoned(self.folder, _KEY + re.escape(_SUFFIX))
        rows = {_entry(row).key for row in db.execute(_ALL)}
        entry_name = re.compile(_KEY + re.escape(_SUFFIX)).fullmatch
        stored = {path.stem: path for path in self._files(lambda name: bool(entry_name(name)))}
        new = []
        for key in stored.keys() - rows:
            try:
                new.append(read_entry(stored[key]))
            except SavedCacheError as error:
                if stored[key].exists() and is_damaged(error):
                    _set_aside(stored[key], str(error))
        with _transaction(db):
            for entry in new:
                if self.path(entry.key).exists():
                    _insert(db, entry)
            for key in rows - stored.keys():
                if not self.path(key).exists():
                    _delete(db, key)

    def _files(self, wanted: Callable[[str], bool]) -> list[Path]:
        """Return the files of the folder whose names are wanted."""
        try:
            with os.scandir(self.folder) as found:
                return [Path(x.path) for x in found if wanted(x.name) and x.is_file()]
        except OSError as error:
            raise _unusable(self.folder, error) from error

    def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Call work with the database, and again with a new one if the database is damaged."""
        if self._process != os.getpid():  # a fork, which must not touch the connection
            _OF_PARENTS.append(self._db)
            self._lock, self._process, self._db = threading.Lock(), os.getpid(), None
        with self._lock:
            try:
                return work(self._connected())
            except (sqlite3.Error, UnicodeError) as error:
                if not _is_damage(error):
                    raise _unusable(self.folder, error) from error
            self._discard()
            try:
                return work(self._connected())
            except (sqlite3.Error, UnicodeError) as error:
                raise _unusable(self.folder, error) from error

    def _connected(self) -> sqlite3.Connection:
        """Return the database; makes it again where it was removed, or the whole folder."""
        if self._db is not None and self._opened != _inode(self.database):
            self._db.close()
            self._db = None
        if self._db is None:
            _make(self.folder)
            if not _may_be_database(self.database):  # else SQLite waits for those who have it open
                self._discard()
            self._db = self._open()
            self._opened = _inode(self.database)
            self._reconcile(self._db)
        return self._db

    def _open(self) -> sqlite3.Connection:
        """Open the database; in a folder that cannot be written to, one in memory."""
        writable = os.access(self.folder, os.W_OK)
        db = sqlite3.connect(
            self.database if writable else ":memory:",
            timeout=_PATIENCE, isolation_level=None, check_same_thread=False,
        )  # fmt: skip
        db.text_factory = bytes  # `_entry` decodes, and knows damaged text
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                db.execute(f"PRAGMA wal_autocheckpoint={_LOG_PAGES}")
                db.execute(f"PRAGMA journal_size_limit={_LOG_PAGES * _PAGE}")
                db.executescript(_TABLES)
                return db
            except sqlite3.OperationalError as error:
                # SQLite does not wait for others where it changes the mode of a database
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _discard(self) -> None:
        """Remove a damaged database."""
        if self._db is not None:
            self._db.close()
            self._db = None
        for end in ("", "-wal", "-shm"):
            with suppress(OSError):
                os.unlink(f"{self.database}{end}")


def is_damaged(error: SavedCacheError) -> bool:
    """Return whether a file is damaged; False: memory or open files are lacking to read it now."""
    cause = error.__cause__
    lacks = isinstance(cause, (OSError, MemoryError, torch.OutOfMemoryError))
    return not lacks and "unable to open file" not in str(cause)


def read_entry(path: Path) -> Entry:
    """Return what the header of an entry's file says of it; raises `SavedCacheError`."""
    about = save.read(path, whole=False)
    key = about.get("prompt")
    if key != path.stem:
        raise SavedCacheError(f"{str(path)!r} is not the entry of this name, but {key}; remove it")
    try:
        tokens = len(save.prompt_ids(path))
        names = str(about["model"]["model"]), str(about["recipe"]["name"])
    except Exception as error:
        raise SavedCacheError(f"{str(path)!r} is damaged ({error}); remove it") from error
    modified = _modified(path)
    return Entry(path.stem, tokens, _nbytes(path), modified, modified, *names)


_ALL = "SELECT key, tokens, nbytes, created, used, model, recipe FROM entries"


def _entry(row: Sequence[Any]) -> Entry:
    """Return the entry of a row; raises an error for what `_insert` never writes."""
    key, tokens, nbytes, created, used, *names = row
    if not (
        isinstance(key, bytes)
        and len(key) == _KEY_BYTES
        and all(isinstance(x, int) and x >= 0 for x in (tokens, nbytes))
        and all(isinstance(x, float) and 0 <= x < _END_OF_TIME for x in (created, used))
        and all(isinstance(name, bytes) for name in names)
    ):
        raise sqlite3.DatabaseError("a row is damaged")
    try:
        model, recipe = (name.decode() for name in names)
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError("a row is damaged") from error
    return Entry(key.hex(), tokens, nbytes, created, used, model, recipe)


def _insert(db: sqlite3.Connection, x: Entry) -> None:
    key = bytes.fromhex(x.key)
    row = key, x.tokens, x.nbytes, x.created, x.used, x.model, x.recipe
    db.execute("REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def _delete(db: sqlite3.Connection, key: str) -> None:
    db.execute("DELETE FROM entries WHERE key = ?", (bytes.fromhex(key),))


def _last(db: sqlite3.Connection, select: str, chain: Sequence[bytes]) -> int:
    """Return the place, from 1 on, of the last digest of a chain that a query finds, else 0."""
    for end in range(len(chain), 0, -_PAGE):
        part = chain[max(0, end - _PAGE) : end]
        marks = ",".join("?" * len(part))
        found = {row[0] for row in db.execute(f"{select} ({marks})", part)}
        if found:
            return end - next(i for i, x in enumerate(reversed(part)) if x in found)
    return 0


def _shorten_log(db: sqlite3.Connection) -> None:
    """Write the database's log to the database, and empty it, unless others read it now."""
    db.execute("PRAGMA busy_timeout=0")
    try:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        db.execute(f"PRAGMA busy_timeout={1000 * _PATIENCE}")


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run a block as one change, alone among all processes."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _is_damage(error: Exception) -> bool:
    """Return whether an error means that the database is damaged, or has other tables.

    Python cannot decode the messages of SQLite about damaged names.
    """
    messages = "no such", "unsupported file format"
    return not isinstance(error, sqlite3.OperationalError) or any(x in str(error) for x in messages)


def _unusable(folder: Path, error: Exception) -> StoreError:
    return StoreError(
        f"the prompt store {str(folder)!r} cannot be used ({error}); check its permissions and its "
        "disk"
    )


def _make(folder: Path) -> None:
    """Create a folder if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"{str(folder)!r} cannot be a prompt store: {error.strerror}; give another folder"
        ) from error


def _set_aside(path: Path, reason: str) -> None:
    warnings.warn(f"prompt store: {reason}; the file is set aside", stacklevel=2)
    with suppress(OSError):  # a read-only folder: the file will be refused again
        os.replace(path, path.with_suffix(_DAMAGED))
        os.utime(path.with_suffix(_DAMAGED))


def _may_be_database(path: Path) -> bool:
    """Return whether a file is missing, empty, or begins as those of SQLite do."""
    try:
        with path.open("rb") as file:
            return file.read(16) in (b"", b"SQLite format 3\0")
    except OSError:
        return True


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _nbytes(path: Path) -> int:
    """Return the size of a file in whole pages; 0: it has gone."""
    try:
        return -(-path.stat().st_size // _PAGE) * _PAGE
    except OSError:
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
