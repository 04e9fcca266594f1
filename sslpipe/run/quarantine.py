"""Bad samples that a run has met: each is listed once, and they may not be too many."""

from dataclasses import dataclass
from pathlib import Path

from sslpipe.data.reader import Quarantined
from sslpipe.distributed import broadcast_object, gather_objects
from sslpipe.errors import DataError
from sslpipe.run.log import quarantined_ids
from sslpipe.run.reporter import Reporter


@dataclass(eq=False)
class Quarantine:
    """Collects the bad samples that the loader reports; rank 0 lists them once. Collective."""

    reporter: Reporter
    run_dir: Path  # whose earlier starts may have listed some
    samples: int  # served in an epoch
    max_fraction: float  # of them that may be bad

    def __post_init__(self) -> None:
        self._new: list[Quarantined] = []
        listed = quarantined_ids(self.run_dir) if self.reporter.writes else set()
        self._ids = broadcast_object(listed)

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
        if len(self._ids) > self.max_fraction * self.samples:
            raise DataError(
                f"{len(self._ids)} of {self.samples} samples are bad, more than "
                f"run.max_bad_fraction = {self.max_fraction}; see quarantine.jsonl, or raise it"
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
        self.reporter.quarantined([*new.values()])
