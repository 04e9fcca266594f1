"""Bad samples of a run: gathered from all ranks, listed once, and too many of them end it."""

from sslpipe.data.store import Quarantined
from sslpipe.distributed import broadcast_object, gather_objects
from sslpipe.errors import DataError
from sslpipe.run.log import RunLog


class Quarantine:
    """Collects what the loader reports on this rank; rank 0's log lists it in quarantine.jsonl.

    Collective.

    Args:
        log: Writes the list.
        samples: Served in an epoch.
        max_fraction: The share of them that may be bad.
    """

    def __init__(self, log: RunLog, samples: int, max_fraction: float) -> None:
        self._log, self._samples, self._limit = log, samples, max_fraction
        self._new: list[Quarantined] = []
        self._ids = set(broadcast_object(log.quarantined_ids()))  # of the starts before

    def add(self, record: Quarantined) -> None:
        """Note a bad sample; safe to call from the loader's threads."""
        self._new.append(record)

    def collect(self) -> int:
        """List what every rank reported since the last call. Collective.

        Returns:
            How many samples are bad so far.

        Raises:
            DataError: They are more than the run allows.
        """
        new, self._new = self._new, []
        for records in gather_objects(new):
            self._ids.update(record.id for record in records)
            self._log.quarantined(records)
        if len(self._ids) > self._limit * self._samples:
            raise DataError(
                f"{len(self._ids)} of {self._samples} samples are bad, more than "
                f"run.max_bad_fraction = {self._limit}; see quarantine.jsonl, or raise it"
            )
        return len(self._ids)

    def write_own(self) -> None:
        """List what this rank reported, if it writes: for an end without the others."""
        self._log.quarantined(self._new)
