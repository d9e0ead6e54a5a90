"""Tell a rank that waits for others which one failed, where, and of what."""

import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from nvme_offload.aio_native.finalizing import finalize
from nvme_offload.aio_native.starting import Flag, start
from nvme_offload.offload._torch_private import store_of_all_ranks
from nvme_offload.offload.errors import OffloadError, PeerError
from .collective import this_rank

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_BE_READ = 3.0

_COUNT = "nvme_offload/failures"
_ENTRY = "nvme_offload/failure/{}"
_READ = "nvme_offload/failure/{}/read"


class Peers:
    """The other ranks of a model, and what they say of their failures.

    A rank that fails alone leaves the others in a collective, where gloo keeps them until its timeout: it cannot be
    aborted. So the rank puts a line on a board, and on the others a thread reads it and logs it while they wait. With
    one rank there is neither board nor thread.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._board: _Board | None = None
        self._is_awaited = False
        self._finalizer: weakref.finalize[[Flag, threading.Thread], Peers] | None = None
        if others := set(ranks) - {dist.get_rank()}:
            self._board, ended = _Board(others), Flag()
            # A daemon, for it must not keep the process; the finalizer ends it before the interpreter is gone.
            thread = threading.Thread(target=_watch, args=(self._board, ended), name="nvme-offload-peers", daemon=True)
            self._ending = ended, thread
            self._finalizer = finalize(self, _end, *self._ending)
            start(thread)

    def tell(self, where: str, error: BaseException, *, goes_on: bool) -> None:
        """Let the other ranks know of an error that came out of a call, `where`.

        `goes_on`: calling it again may succeed, so that the others wait for good reason, until `tell_done`.
        """
        if self._board is not None:
            self._board.put(f"{this_rank()}, failed in {where}: {type(error).__name__}: {error}", goes_on)
            self._is_awaited = goes_on

    def tell_done(self) -> None:
        """Let the other ranks know that a step has ended which they wait for; nothing where they wait for none."""
        if self._board is not None and self._is_awaited:
            self._board.put("", goes_on=True)
            self._is_awaited = False

    @contextmanager
    def named(self) -> Iterator[None]:
        """Raise PeerError, with what the failed rank said, if a collective in here fails because another rank did."""
        try:
            yield
        except RuntimeError as error:
            if (said := self.instead_of(error)) not in (None, error):
                raise said from error
            raise

    def instead_of(self, error: BaseException) -> PeerError | None:
        """Return the error to raise if a collective failed because another rank did; `error` itself, if it is that."""
        if isinstance(error, PeerError):
            return error
        is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, OffloadError)  # gloo has no own kind
        said = self._board.said() if is_of_torch and self._board is not None else ""
        return PeerError(said) if said else None

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._finalizer is not None:
            _end(*self._ending)  # not through the finalizer, which forgets before it calls
            self._finalizer.detach()


class _Board:
    """The store of the process group, as the failures of all ranks that have this model."""

    def __init__(self, others: set[int]) -> None:
        self._others = others
        self._store = store_of_all_ranks()
        self._seen = self._store.add(_COUNT, 0)
        self._lost = ""
        self._awaited: dict[int, str] = {}
        """The words of ranks that have not repeated their call yet."""
        self._lock = threading.Lock()

    def put(self, said: str, goes_on: bool) -> None:
        entry = json.dumps({"rank": dist.get_rank(), "said": said, "goes_on": goes_on})
        try:
            number = self._store.add(_COUNT, 1)
            self._store.set(_ENTRY.format(number), entry)
            # Until the others have read it, or a while: the store may end with this process.
            end = time.monotonic() + _SECONDS_TO_BE_READ
            while self._store.add(_READ.format(number), 0) < len(self._others) and time.monotonic() < end:
                time.sleep(0.01)
        except RuntimeError:  # whoever keeps the store has ended, and then the collectives of all end, too
            logger.warning("the other ranks cannot be told that %s", said)

    def look(self) -> None:
        """Log what is new."""
        with self._lock:
            while self._store.check([_ENTRY.format(self._seen + 1)]):
                self._seen += 1
                entry = json.loads(self._store.get(_ENTRY.format(self._seen)))
                if entry["rank"] in self._others:
                    self._say(**entry)
                    self._store.add(_READ.format(self._seen), 1)

    def said(self) -> str:
        """Return what a rank said that cannot go on, or has not gone on so far; or nothing."""
        with suppress(RuntimeError):  # whoever keeps the store has ended
            self.look()
        return self._lost or next(filter(None, self._awaited.values()), "")

    def _say(self, rank: int, said: str, goes_on: bool) -> None:
        if goes_on:
            self._awaited[rank] = said
        if not said:
            return
        if goes_on:
            logger.warning("%s. This rank waits in its next collective until that rank has repeated the call", said)
            return
        self._lost = self._lost or said
        logger.error(
            "%s. This rank waits for it in its next collective, until the timeout of the process group: end all ranks "
            "and resume from a checkpoint",
            said,
        )


def _watch(board: _Board, ended: Flag) -> None:
    while not ended.wait(SECONDS_BETWEEN_LOOKS):
        try:
            board.look()
        except RuntimeError:  # whoever keeps the store has ended, and then the collectives of all end, too
            return


def _end(ended: Flag, thread: threading.Thread) -> None:
    ended.set()
    if thread is not threading.current_thread():
        thread.join()
