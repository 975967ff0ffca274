"""The course of a sync in a rollout engine: begin, receive, finish; whatever goes wrong leaves the engine dirty."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from tasks.engines.protocols import SyncError, SyncHeader, SyncPayload, TensorForm
from tasks.engines.rollout_checks import check_form


class StepwiseSync(ABC):
    """What both engines share. An engine fills in how it checks, installs, finishes and recovers."""

    name: str
    _version: int | None = None
    _header: SyncHeader | None = None
    """Of the sync that is under way."""
    _missing: frozenset[str] = frozenset()

    @abstractmethod
    def _check(self, header: SyncHeader) -> None:
        """`SyncError` for a header that does not fit; nothing is changed yet."""

    @abstractmethod
    def _start(self) -> None:
        """Make ready for tensors."""

    @abstractmethod
    def _install(self, tensors: Mapping[str, Tensor]) -> None:
        """Some tensors of the sync."""

    @abstractmethod
    def _finish(self, header: SyncHeader) -> None:
        """All tensors are there."""

    @abstractmethod
    def _forget(self) -> None:
        """Nothing of the last run may be there: scales, samples, caches. Weights come with the next sync."""

    @abstractmethod
    def _recover(self) -> None:
        """After a failure in `_start` or later: layers may be half loaded."""

    def forget(self) -> None:
        """See `tasks.engines.protocols.RolloutEngine`."""
        abandoned, self._header, self._version = self._header, None, None
        if abandoned is not None:
            self._recover()
        self._missing = frozenset()
        self._forget()

    def load_weights(self, payload: SyncPayload) -> None:
        """See `tasks.engines.protocols.RolloutEngine`."""
        self.begin_sync(payload.header)
        self.receive(payload.tensors)
        self.finish_sync()

    def begin_sync(self, header: SyncHeader) -> None:
        """See `tasks.engines.protocols.RolloutEngine`. One that was never finished is given up."""
        self._version = None
        self._check(header)
        abandoned, self._header = self._header, None
        with self._all_or_nothing(header):
            if abandoned is not None:
                self._recover()
            self._start()
        self._header, self._missing = header, frozenset(header.forms)

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """See `tasks.engines.protocols.RolloutEngine`."""
        header = self._under_way()
        with self._all_or_nothing(header):
            unknown = sorted(tensors.keys() - self._missing)
            if unknown:
                raise SyncError(f"{unknown[0]} was not announced, or comes twice")
            for name, tensor in tensors.items():
                check_form(name, TensorForm(tuple(tensor.shape), tensor.dtype), header.forms[name])
            self._install(tensors)
        self._missing = self._missing - tensors.keys()

    def finish_sync(self) -> None:
        """See `tasks.engines.protocols.RolloutEngine`."""
        header = self._under_way()
        with self._all_or_nothing(header):
            if self._missing:
                raise SyncError(f"{len(self._missing)} tensors never came, {min(self._missing)} among them")
            self._finish(header)
        self._header, self._version = None, header.version

    def _under_way(self) -> SyncHeader:
        if self._header is None:
            raise SyncError("no sync is under way: begin_sync comes first")
        return self._header

    @contextmanager
    def _all_or_nothing(self, header: SyncHeader) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Whatever it was, there is no way back to the weights before.
            self._header = None
            self._recover()
            label = f"the {self.name} engine failed during the sync of version {header.version}"
            raise SyncError(f"{label}: {error}") from error
