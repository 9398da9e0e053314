"""What can go wrong, and what the scheduler should do about it.

* DrafterError        exit   1   unexpected; a retry may help
  x RecipeError       exit  64   the run is described wrongly, or is not the run found on disk
  x DataError         exit  65   the data is wrong
  x Busy              exit  75   something else holds the dataset, or the engine is not there
  x DeadlinePassed    exit 124   the job took longer than its own deadline
  x LeaseExpired      exit 142   nobody renewed the lease
  x Stopped           exit 143   a person said stop

The exit code is the whole contract with Airflow: no message is parsed. Codes 64, 65 and 75 follow
sysexits.h, 124 follows timeout(1), 142 and 143 are 128 + SIGALRM and 128 + SIGTERM. Standard
library only.
"""


class DrafterError(Exception):
    """One sentence: what was found, what is needed, what to do."""

    exit_code = 1


class RecipeError(DrafterError):
    exit_code = 64


class DataError(DrafterError):
    exit_code = 65


class Busy(DrafterError):
    exit_code = 75


class DeadlinePassed(DrafterError):
    exit_code = 124


class LeaseExpired(DrafterError):
    exit_code = 142


class Stopped(DrafterError):
    exit_code = 143


NEVER_RETRY = frozenset({RecipeError.exit_code, DataError.exit_code, Stopped.exit_code})
"""A second try would end the same way, or would undo what a person asked for."""

MEANING = {
    0: "done",
    1: "failed unexpectedly",
    RecipeError.exit_code: "recipe or identity wrong",
    DataError.exit_code: "data wrong",
    Busy.exit_code: "busy, or engine unavailable",
    DeadlinePassed.exit_code: "deadline passed",
    LeaseExpired.exit_code: "lease ran out",
    Stopped.exit_code: "stopped by a person",
}
