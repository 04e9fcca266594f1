"""Bad samples of a run: gathered from all ranks, listed once, and too many of them end it."""

from sslpipe.data.loader import Quarantined
from sslpipe.distributed import broadcast_object, gather_objects
from sslpipe.errors import DataError
from sslpipe.run.log import RunLog


class Quarantine:
    """Collects what the loader reports on this rank; rank 0's log lists it in quarantine.jsonl.

    samples: served in an epoch. most: the share of them that may be bad. Collective.
    """

    def __init__(self, log: RunLog, samples: int, most: float) -> None:
        self._log, self._samples, self._most = log, samples, most
        self._new: list[Quarantined] = []
        self._ids = set(broadcast_object(log.quarantined_ids()))  # of the starts before

    def add(self, record: Quarantined) -> None:
        """Called by the loader's threads."""
        self._new.append(record)

    def collect(self) -> int:
        """List what every rank found since the last call; how many samples are bad so far.

        Collective. Raises: DataError where they are more than the run allows.
        """
        new, self._new = self._new, []
        for records in gather_objects(new):
            self._ids.update(record.id for record in records)
            self._log.quarantined(records)
        if len(self._ids) > self._most * self._samples:
            raise DataError(
                f"{len(self._ids)} of {self._samples} samples are bad, more than "
                f"run.max_bad_fraction = {self._most}; see quarantine.jsonl, or raise the limit"
            )
        return len(self._ids)

    def write_own(self) -> None:
        """List what this rank found, if it is the one that writes: for an end without others."""
        self._log.quarantined(self._new)
