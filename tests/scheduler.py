"""Which worker of pytest-xdist gets which test file."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class Files(LoadFileScheduling):
    """Hand out files as xdist does, and end the run after a worker has died.

    When a worker dies, xdist 3.8 hands out all its files again, those that it had ended too. A worker begins a test when it
    knows the next one, or that there is none: given a file without tests to run it begins none, so it reports none, and xdist
    hands out files when a test is reported.
    """

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
