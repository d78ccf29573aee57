"""Numbers of a run: where they are logged, what an epoch prints, the progress bar."""

from trainfast.log.bar import progress
from trainfast.log.epochs import EpochReport
from trainfast.log.logger import Logger

__all__ = ["EpochReport", "Logger", "progress"]
