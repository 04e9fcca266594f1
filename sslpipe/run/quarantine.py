"""Bad samples that a run has met: each is listed once, and they may not be too many."""

from pathlib import Path

from sslpipe.data.reader import Quarantined
from sslpipe.distributed import broadcast_object, gather_objects
from sslpipe.errors import DataError
from sslpipe.run.log import quarantined_ids
from sslpipe.run.reporter import Reporter


class Quarantine:
    """Collects the bad samples that the loader reports; rank 0's log lists them once. Collective.

    `samples` are served in an epoch; earlier starts of the run may have listed some bad ones.
    """

    def __init__(
        self, reporter: Reporter, run_dir: Path, samples: int, max_fraction: float
    ) -> None:
        self._reporter = reporter
        self._samples = samples
        self._limit = max_fraction
        self._new: list[Quarantined] = []
        self._ids = broadcast_object(quarantined_ids(run_dir) if reporter.writes else set())

    def add(self, record: Quarantined) -> None:
        """Note a bad sample; safe to call from the loader's threads."""
        self._new.append(record)

    def collect(self) -> int:
        """List what every rank reported since the last call; return how many are bad. Collective.

        Raises:
            DataError: They are more than the run allows.
        """
        new = self._new
        self._new = []
        self._list([record for records in gather_objects(new) for record in records])
        if len(self._ids) > self._limit * self._samples:
            raise DataError(
                f"{len(self._ids)} of {self._samples} samples are bad, more than "
                f"run.max_bad_fraction = {self._limit}; see quarantine.jsonl, or raise it"
            )
        return len(self._ids)

    def write_own(self) -> None:
        """List what this rank reported, if it writes: for an end without the others."""
        self._list(self._new)

    def _list(self, records: list[Quarantined]) -> None:
        new: dict[int, Quarantined] = {}
        for record in records:
            if record.id not in self._ids:
                new.setdefault(record.id, record)  # as it was seen first
        self._ids |= new.keys()
        self._reporter.quarantined([*new.values()])
