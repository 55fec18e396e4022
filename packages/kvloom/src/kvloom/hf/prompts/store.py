"""`PromptStore`: caches of prompts in a folder, of which later prompts reuse the beginning.

Decides what is stored under which key, and that a file is what its key says before it is used.
`identity` makes the keys, `folder` keeps the folder, and `reading` uses the store in `generate()`.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import CacheMisuse, SavedCacheError, StoreError, first_line
from ...recipe.spec import Recipe
from ...units import parse_bytes, parse_seconds
from .. import save
from ..cache import Cache
from ..guard import outside_inference_mode
from ..routed_cache import RoutedCache
from ..token_hash import TokenHash
from .folder import Entry, PromptFolder, is_damaged, read_entry
from .identity import BLOCK, chain, seed

PAGE = "page"
"""What the file of a page says of its layers: see `pages`."""


@dataclass(frozen=True)
class StoreReport:
    """What a store did for `generate()` in this process, and what it holds: plain data.

    Attributes:
        prompts: How many were read.
        bypassed: How many of them did not use the store.
        given: Tokens of the prompts that used it.
        reused: Tokens of them that came from the store.
        read: Tokens of them that the model read, counted in its layers.
        entries: How many the folder has.
        nbytes: Bytes of the folder.
    """

    prompts: int
    bypassed: int
    given: int
    reused: int
    read: int
    entries: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"kvloom: {self.prompts:,} prompts, {self.bypassed:,} of them without the store; of "
            f"{self.given:,} tokens {self.reused:,} reused and {self.read:,} read; "
            f"{self.entries:,} entries, {self.nbytes / 2**20:,.1f} MiB"
        )


class PromptStore:
    """Caches of the beginnings of prompts, in a folder that processes share.

    With `kvloom.attach(model, recipe, store=store)`, `generate()` reuses the longest stored
    beginning of a prompt, and stores the prompt's whole blocks of 64 tokens. An entry is used only
    for the same tokens, weights, config, adapters, recipe, calibration, dtype, versions and tenant.

    Args:
        folder: Created if it is missing.
        max_bytes: The largest size of the folder, such as "20GiB". Beyond it, the entries of the
            longest disuse are removed.
        max_age: How long an unused entry stays, such as "30d".
        tenant: Prompts of one tenant are not reused for another; a secret word if its users must
            not find out which prompts others had.

    Raises:
        StoreError: The folder cannot be used.
        InputError: A size or an age cannot be read.
    """

    def __init__(
        self,
        folder: str | Path,
        max_bytes: int | str = "20GiB",
        max_age: float | str = "30d",
        tenant: str = "",
    ) -> None:
        self.folder, self.tenant = Path(folder), tenant
        self.max_bytes = parse_bytes(max_bytes, "max_bytes")
        self.max_age = parse_seconds(max_age, "max_age")
        self.index = PromptFolder(self.folder)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("prompts", "bypassed", "given", "reused", "read"), 0)
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple:
        """Copy and pickle as a new store of the same folder."""
        return PromptStore, (self.folder, self.max_bytes, self.max_age, self.tenant)

    def longest(
        self, model: PreTrainedModel, recipe: Recipe | str | Path, ids: Tensor
    ) -> tuple[Cache, int]:
        """Return a cache with the longest stored beginning of a prompt, and its tokens.

        Args:
            model: As for `Cache`.
            recipe: As for `Cache`.
            ids: The token ids of the prompt, [N] or [1, N]. Its last token is always left to read.

        Returns:
            The cache, empty if nothing is stored, and how many tokens it holds.

        Raises:
            StoreError: The folder cannot be used, or the model cannot be identified.
        """
        cache, row = Cache(model, recipe), _row(ids)
        chain = self.chain(cache, row[:, :-1])
        return cache, self.load(cache, chain, row)

    def put(self, cache: RoutedCache, ids: Tensor) -> None:
        """Store a cache of whole blocks of 64 tokens, unless it is stored.

        Args:
            cache: A cache of one row, which has read exactly these tokens with the model as it is.
            ids: Their token ids, [n] or [1, n].

        Raises:
            StoreError: It cannot be written, or is larger than the store; nothing is stored then.
            CacheMisuse: The cache does not hold these tokens, or not whole blocks. kvloom sees
                which tokens calls of the model have read since the cache was new, not those of a
                loaded or cropped cache.
        """
        row = _row(ids)
        tokens, likes = row.shape[1], [x.cache.like for x in cache.compressed]
        if cache.get_seq_length() != tokens or not tokens or tokens % BLOCK:
            raise CacheMisuse(
                f"put was given {tokens} token ids and a cache of {cache.get_seq_length()}; give a "
                f"cache of these tokens, a multiple of {BLOCK}"
            )
        if any(like is not None and len(like) != 1 for like in likes):
            raise CacheMisuse("put takes a cache of one row; give one prompt at a time")
        if problem := cache.token_hash.problem(row):
            raise CacheMisuse(f"put: {problem}; give a cache that has read these ids alone")
        chain = self.chain(cache, row)
        self.store(cache, chain[-1].hex(), row)

    def chain(self, cache: RoutedCache, ids: Tensor) -> list[bytes]:
        """Return the keys of the whole blocks of ids [1, N]; raises `StoreError`."""
        return chain(seed(cache, self.tenant), ids)

    @outside_inference_mode
    def load(self, cache: RoutedCache, chain: list[bytes], ids: Tensor) -> int:
        """Fill an empty cache with the longest entry of a chain; return its tokens."""
        while blocks := self.index.longest(chain):
            key, tokens = chain[blocks - 1].hex(), blocks * BLOCK
            try:
                self._fill(cache, key, ids[:, :tokens])
            except SavedCacheError as error:
                self.forget(key, error)
                chain = chain[: blocks - 1]
                continue
            self.index.touch(key)
            cache.token_hash = TokenHash.of(ids[:, :tokens])
            return tokens
        return 0

    def forget(self, key: str, error: SavedCacheError) -> None:
        """Set the file of an entry aside that is not what its key says, with a warning.

        One that cannot be read now, as memory or open files are lacking, stays.
        """
        exists = self.index.path(key).exists()  # or another process has removed it
        damaged = is_damaged(error)
        if exists and not damaged:
            self.warn(str(error))
        self.index.remove(key, str(error) if exists and damaged else None)

    def _fill(self, cache: RoutedCache, key: str, ids: Tensor) -> None:
        """Load an entry into an empty cache; raises `SavedCacheError`, and empties it again."""
        path = self.index.path(key)
        about = save.read(path)
        if about.get("prompt") != key:
            raise SavedCacheError(
                f"{str(path)!r} is the entry {about.get('prompt')}; remove the file"
            )
        try:
            if not torch.equal(save.prompt_ids(path)[None], ids.to("cpu", torch.int64)):
                raise ValueError("its token ids are others")
            save.fill(cache, path, about)
            if {layer.get_seq_length() for layer in cache.full_layers} - {ids.shape[1]}:
                raise ValueError("its layers have another number of tokens")
        except Exception as error:
            cache.reset()
            reason = first_line(error)
            raise SavedCacheError(f"{str(path)!r} is damaged ({reason}); remove it") from error
        for layer in cache.compressed:
            layer.cache.recording = False

    def store(self, cache: RoutedCache, key: str, ids: Tensor) -> None:
        """Write the entry of a key, unless there is one; raises `StoreError`."""
        with cache.guard.step():
            names = type(cache.owner.model).__name__, cache.recipe.name
            self.add(names, key, ids, cache.nbytes, partial(save.save, cache))
        self.prune()

    def add(
        self,
        names: tuple[str, str],
        key: str,
        ids: Tensor,
        nbytes: int,
        write: Callable[..., None],
    ) -> None:
        """Write the entry of a key and of ids [1, n], unless there is one; raises `StoreError`.

        names: of the model and the recipe. nbytes: about the size of its file. write: writes the
        file, as `save.save` does of a cache.
        """
        path, now = self.index.path(key), time.time()
        if path.exists() and self.index.longest([bytes.fromhex(key)]):
            return
        database = self.index.database_nbytes
        if nbytes + database > self.max_bytes:
            raise StoreError(
                f"a cache of {nbytes:,} bytes does not fit a prompt store of {self.max_bytes:,}, "
                f"of which its database takes {database:,}; set a larger max_bytes"
            )
        entry = Entry(key, ids.shape[1], 0, now, now, *names)
        prompt = key, ids[0].to("cpu", torch.int64).contiguous()
        try:
            write(path, StoreError, prompt, partial(self.index.publish, entry=entry))
        except SavedCacheError as error:
            raise StoreError(f"a prompt cannot be stored: {error}") from error

    def count(self, **counts: int) -> None:
        """Add to the numbers of the report."""
        with self._lock:
            for name, number in counts.items():
                self._counts[name] += number

    def warn(self, reason: str) -> None:
        """Warn once for a reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"kvloom: {reason}", stacklevel=2)

    def report(self) -> StoreReport:
        """Return what the store did in this process, and what it holds."""
        nbytes = self.index.nbytes
        return StoreReport(**self._counts, entries=len(self.entries()), nbytes=nbytes)

    def entries(self) -> list[Entry]:
        """Return what is stored, the last used ones first."""
        return self.index.entries()

    def entry(self, key: str) -> Entry:
        """Return an entry by its key, or by the beginning of its key.

        Raises:
            StoreError: No entry, or several, have such a key.
        """
        found = [entry for entry in self.entries() if entry.key.startswith(key)]
        if len(found) != 1:
            raise StoreError(f"{len(found)} entries have a key of {key!r}; give the key of one")
        return found[0]

    def describe(self, key: str) -> dict[str, Any]:
        """Return an entry, its recipe and its token ids, as plain data; `key`: as for `entry`."""
        entry = self.entry(key)
        path = self.index.path(entry.key)
        about = save.read(path, whole=False)
        names = "model", "recipe", "calibration"
        return {
            **asdict(entry), **{name: about[name] for name in names},
            "ids": save.prompt_ids(path).tolist(),
        }  # fmt: skip

    def verify(self) -> dict[str, str]:
        """Read every file whole, and set damaged ones aside; return what is wrong, by key."""
        problems = {}
        for entry in self.entries():
            path = self.index.path(entry.key)
            try:
                save.read(path)
                read_entry(path)
            except SavedCacheError as error:
                problems[entry.key] = str(error)
                self.forget(entry.key, error)
        return problems

    def prune(self) -> list[Entry]:
        """Remove what exceeds `max_age` and `max_bytes`, damaged files too; return the entries."""
        return self.index.evict(self.max_bytes, self.max_age)

    def export(self, key: str, path: str | Path) -> Entry:
        """Copy an entry to a file that `Cache.load` reads; `key`: as for `entry`.

        The file has the token ids of the prompt.

        Raises:
            StoreError: There is no such entry, it is a page, or the file cannot be written.
            SavedCacheError: The entry's file is missing or damaged.
        """
        entry = self.entry(key)
        if save.read(self.index.path(entry.key), whole=False)["layers"] == PAGE:
            raise StoreError(
                f"{entry.key} is a page of an engine that batches requests, which no cache reads; "
                "give the key of a prompt of generate()"
            )
        try:
            copyfile(self.index.path(entry.key), path)
        except OSError as error:
            raise StoreError(
                f"{str(path)!r} cannot be written ({error.strerror}); give another file"
            ) from error
        return entry


def _row(ids: Tensor) -> Tensor:
    """Return token ids as int64 [1, N]; raises `CacheMisuse` for anything else."""
    if not isinstance(ids, Tensor):
        given = f"a {type(ids).__name__}"
    else:
        row, given = ids[None] if ids.dim() == 1 else ids, f"{ids.dtype} {list(ids.shape)}"
        if row.dim() == 2 and row.shape[0] == 1 and row.dtype == torch.int64:
            return row
    raise CacheMisuse(
        f"a prompt store takes token ids int64 [N] or [1, N], and was given {given}; give one "
        "prompt without padding"
    )
