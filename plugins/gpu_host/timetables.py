"""When a DAG is due by the recipe's cron. Registered by ``plugins/drafter_plugin.py``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Self

from airflow.timetables.base import DagRunInfo, DataInterval, TimeRestriction
from airflow.timetables.trigger import CronTriggerTimetable
from pendulum import now

GRACE = timedelta(minutes=2)
"""A tick this young is still due: parsing computes the next one anew every half minute, and must
not skip one that the scheduler has not got to yet."""


class CronAhead(CronTriggerTimetable):
    """Airflow's cron trigger in UTC, but a tick that passed while the DAG was paused is over.

    Airflow itself makes up for the newest missed tick, also with ``catchup=False``: unpausing a DAG
    would start it.
    """

    def __init__(self, cron: str) -> None:
        super().__init__(cron, timezone="UTC")

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> Self:
        return cls(data["expression"])

    def serialize(self) -> dict[str, Any]:
        return {"expression": self._expression}

    def next_dagrun_info(
        self,
        *,
        last_automated_data_interval: DataInterval | None,
        restriction: TimeRestriction,
    ) -> DagRunInfo | None:
        info = super().next_dagrun_info(
            last_automated_data_interval=last_automated_data_interval, restriction=restriction
        )
        if info is None or info.run_after > now("UTC") - GRACE:
            return info
        return DagRunInfo.exact(self._get_next(now("UTC")))
