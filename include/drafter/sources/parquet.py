"""Rows of a Parquet file in bounded memory, as what JSON knows.

Row groups are read a batch at a time, and only the columns that are wanted. A value without a place
in JSON becomes text (dates in ISO 8601, bytes as UTF-8 or else base64) or seconds; one that cannot
be read at all (text that is no UTF-8, a date beyond the calendar) costs its row, not the file.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import types
from pyarrow.parquet import ParquetFile

from drafter.errors import DataError
from drafter.sources.compression import SourceFile, damaged

UNREADABLE = "unreadable value"

_BATCH_BYTES = 8 << 20
_MAX_BATCH_ROWS = 1024
_BUFFER_BYTES = 4 << 20
"""Per column, and per request to the hub: more requests cost time, larger ones memory."""


def rows(
    file: SourceFile, span: tuple[int, int] | None = None, columns: Collection[str] | None = None
) -> Iterator[dict[str, Any] | str]:
    """Each row of the row groups ``span`` (begin, end) of ``file``, or of all.

    A row has those of ``columns`` that the file has. Raises DataError for a damaged file.
    """
    with _opened(file) as parquet:
        names = [name for name in parquet.schema_arrow.names if columns is None or name in columns]
        groups = range(*span) if span else range(parquet.num_row_groups)
        num_rows = _batch_rows(parquet, groups)
        for batch in parquet.iter_batches(num_rows, list(groups), names, use_threads=False):
            try:
                yield from _rows(batch)
            except (ValueError, OverflowError):
                for i in range(len(batch)):
                    yield _row(batch.slice(i, 1))


def spans(file: Path, num_bytes: int) -> list[tuple[int, int]]:
    """Neighbouring row groups of ``file`` that have about ``num_bytes`` together."""
    with _opened(file) as parquet:
        num_groups = parquet.num_row_groups
        begins, size = [0], 0
        for group in range(num_groups):
            if size >= num_bytes:
                begins.append(group)
                size = 0
            described = parquet.metadata.row_group(group)
            columns = range(described.num_columns)
            size += sum(described.column(i).total_compressed_size for i in columns)
        return list(zip(begins, [*begins[1:], num_groups], strict=True))


@contextmanager
def _opened(file: SourceFile) -> Iterator[ParquetFile]:
    try:
        with (
            file.open("rb", buffering=0) as raw,
            ParquetFile(raw, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet,
        ):
            yield parquet
    except pyarrow.ArrowNotImplementedError as error:
        raise DataError(
            f"{file} holds what pyarrow cannot read ({error}): write it as JSON lines"
        ) from None
    except pyarrow.ArrowException as error:
        raise damaged(file, error) from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise damaged(file, error) from None


def _batch_rows(parquet: ParquetFile, groups: range) -> int:
    """So many that a batch has about ``_BATCH_BYTES``."""
    described = [parquet.metadata.row_group(group) for group in groups]
    row_bytes = max(
        (group.total_byte_size / max(group.num_rows, 1) for group in described), default=0
    )
    return max(1, min(_MAX_BATCH_ROWS, int(_BATCH_BYTES / max(row_bytes, 1))))


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    names = batch.schema.names
    if not names:
        return ({} for _ in range(len(batch)))
    values = [
        column.to_pylist() if _is_json(column.type) else [_as_json(v) for v in column.to_pylist()]
        for column in batch.columns
    ]
    return (dict(zip(names, row, strict=True)) for row in zip(*values, strict=True))


def _row(batch: Any) -> dict[str, Any] | str:
    try:
        return next(_rows(batch))
    except (ValueError, OverflowError):
        return UNREADABLE


def _is_json(kind: Any) -> bool:
    """Does Arrow give its values as what JSON knows?"""
    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        return _is_json(kind.value_type)
    if types.is_struct(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    return any(
        is_such(kind)
        for is_such in (
            *(types.is_string, types.is_large_string, types.is_string_view),
            *(types.is_boolean, types.is_integer, types.is_floating, types.is_null),
        )
    )


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    return str(value)
