"""Step rows: flat records of plain scalars, appended as JSON lines while a trial runs, one parquet table at the end.

Numbers are kept bit for bit on both ways. In JSON a double is Python's shortest repr, which reads back to the same double;
NaN and the infinities are the tokens `NaN`, `Infinity` and `-Infinity`, which `json.loads` reads back (NaN without its payload).
pandas' own JSON reader is not exact.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accumulation_harness.results.record import FILE_MODE, read_file

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Scalar = str | int | float | bool | None
Row = Mapping[str, Scalar]

_EXACT_INTEGERS = 2**53  # every integer up to this one is a double


class RowError(ValueError):
    """A row that cannot be kept, or a line that is no row; the message names the column, or the file and the line."""


class RowFile:
    """Appends rows to a new JSONL file in unbuffered writes: the death of the process loses no row that was appended."""

    def __init__(self, path: Path) -> None:
        self.num_rows = 0
        self._kinds: dict[str, str] = {}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        self._file = open(descriptor, "wb", buffering=0)  # noqa: SIM115 - closed in `close`

    def append(self, *rows: Row) -> None:
        """All in one write. RowError when a value is no scalar or its column held another type; OSError from the disk."""
        for row in rows:
            for name, value in row.items():
                if value is not None:
                    self._kinds[name] = _joined_kind(name, self._kinds.get(name), value)
        lines = b"".join(json.dumps(dict(row)).encode() + b"\n" for row in rows)
        try:
            if self._file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.close()  # a row after a torn one would be damage in the middle of the file
            raise
        self.num_rows += len(rows)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Scalar]]:
    """Rows of a JSONL file, also of one that is being written. A last line without its newline is dropped.

    Any other line that is not a JSON object raises RowError with file and line.
    """
    *lines, _torn = read_file(path).split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RowError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise RowError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
        rows.append(row)
    return rows


def to_parquet(rows: Sequence[Row]) -> bytes:
    """One table, columns in the order of their first appearance; a column that a row does not have is a gap there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def from_parquet(content: bytes) -> pd.DataFrame:
    """The table of `to_parquet`. Gaps: NaN among doubles, pd.NA among integers (as Int64), None among texts and truth values."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(pa.BufferReader(content))
    frame: pd.DataFrame = table.to_pandas()
    for name in table.column_names:  # pandas would turn integers with gaps into doubles, which is inexact above 2**53
        if pa.types.is_integer(table.schema.field(name).type) and table.column(name).null_count:
            frame[name] = pd.array(table.column(name).to_pylist(), dtype="Int64")
    return frame


def _column(values: Sequence[Scalar]) -> pa.Array:
    """One type for the column, from all its values: integers become doubles where doubles are among them."""
    import pyarrow as pa

    kinds = {type(value) for value in values} - {type(None)}
    if float in kinds:
        # from_pandas=False: a NaN is a value, not a gap.
        return pa.array([None if value is None else float(value) for value in values], pa.float64(), from_pandas=False)
    for kind, arrow in ((bool, pa.bool_()), (int, pa.int64()), (str, pa.string())):
        if kind in kinds:
            return pa.array(values, arrow)
    return pa.nulls(len(values), pa.float64())


def _joined_kind(name: str, known: str | None, value: Scalar) -> str:
    """The kind of a column after one more value; small integers may join doubles or large integers, nothing else mixes."""
    kind = _kind(value)
    if kind is None:
        raise RowError(f"column {name!r}: expected a 64-bit number, text, bool or None, got {type(value).__name__} {value!r}")
    if known is None or kind == known:
        return kind
    if "small integer" in (kind, known) and {kind, known} & {"double", "large integer"}:
        return kind if known == "small integer" else known
    raise RowError(f"column {name!r}: expected one type, got {kind} after {known}")


def _kind(value: object) -> str | None:
    match value:
        case bool():
            return "bool"
        case int() if abs(value) <= _EXACT_INTEGERS:
            return "small integer"
        case int() if -(2**63) <= value < 2**63:
            return "large integer"
        case float():
            return "double"
        case str() if value.isascii() or _is_unicode(value):
            return "text"
        case _:
            return None


def _is_unicode(value: str) -> bool:
    """No lone surrogates, which JSON would take and parquet would not."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
