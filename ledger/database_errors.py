"""What a database's error means for the mesh, decided once for both databases.

Must never turn a bug into an operating error: what is not recognised stays what it is.
"""

import sqlite3

import psycopg
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from mesh.contract.errors import ErrorCode, MeshError, unavailable

_FULL = {"SQLITE_FULL", "SQLITE_IOERR", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_SHMSIZE"}
# Serialisation failure and deadlock: nothing happened, the same transaction may be run again.
_CONFLICT = {"40001", "40P01"}
# Statement and lock time-outs, too many connections, administrators and fail-overs.
_UNAVAILABLE_CLASSES = ("08", "57", "53", "55", "58", "25006")


def _original(error: BaseException) -> BaseException | None:
    return error.orig if isinstance(error, StatementError) else error


def sqlstate_of(error: BaseException) -> str | None:
    """Return PostgreSQL's code for an error, None for what has none."""
    original = _original(error)
    return original.sqlstate if isinstance(original, psycopg.Error) else None


def is_conflict(error: BaseException) -> bool:
    """Whether the database undid the transaction because of another: it may be run again at once."""
    return sqlstate_of(error) in _CONFLICT


def is_connection_lost(error: BaseException) -> bool:
    """Whether the conversation with the database ended, so that nobody knows what its last statement did."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    original = _original(error)
    state = sqlstate_of(error)
    if isinstance(original, psycopg.OperationalError):
        return state is None or state.startswith(("08", "57P"))
    return isinstance(original, ConnectionError)


def _map_sqlite(error: sqlite3.Error) -> MeshError | None:
    name = getattr(error, "sqlite_errorname", None) or ""
    if name in _FULL:
        return storage_full(f"the ledger's disk does not take more ({error})")
    if name == "SQLITE_TOOBIG":
        return MeshError(ErrorCode.TOO_LARGE, f"a value is larger than the ledger stores ({error})")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY")):
        return unavailable(f"the ledger's file does not answer ({error})")
    if isinstance(error, sqlite3.DataError | sqlite3.InterfaceError) or "binding parameter" in str(error):
        return unstorable(str(error))
    return None


def _map_postgres(error: psycopg.Error) -> MeshError | None:
    state = error.sqlstate
    if state in {"53100", "58030"}:
        return storage_full(f"the ledger's disk does not take more ({state})")
    if state is not None and state.startswith("22"):
        return unstorable(f"{error.diag.message_primary or error} ({state})")
    if state == "54000":
        return MeshError(ErrorCode.TOO_LARGE, f"a value is larger than the ledger stores ({state})")
    if state in _CONFLICT or (state is not None and state.startswith(_UNAVAILABLE_CLASSES)):
        return unavailable(f"the ledger's database does not answer ({state})")
    if state is None and isinstance(error, psycopg.DataError):
        return unstorable(str(error))
    if state is None and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return unavailable("the ledger's database does not answer")
    return None


def storage_full(detail: str) -> MeshError:
    """Return the error for a disk that is full or broken."""
    return MeshError(
        ErrorCode.STORAGE_FULL, detail, hint="free some space, then try again", retryable=True, retry_after_s=5.0
    )


def unstorable(detail: str) -> MeshError:
    """Return the error for a value that no attempt will ever be able to store."""
    return MeshError(ErrorCode.INVALID_REQUEST, f"a value cannot be stored: {detail}")


def mapped(error: BaseException) -> MeshError | None:
    """Return what an error of the database means for a caller, None when it is not an operating error."""
    if isinstance(error, PoolTimeout):
        return unavailable("all of the ledger's connections to its database are busy")
    original = _original(error)
    match original:
        case sqlite3.Error():
            return _map_sqlite(original)
        case psycopg.Error():
            return _map_postgres(original)
        case TimeoutError() | ConnectionError():
            return unavailable("the ledger's database does not answer")
        case OverflowError() | UnicodeEncodeError() if isinstance(error, StatementError):
            return unstorable(str(original))
        case ValueError() if isinstance(error, StatementError):  # NaN in a JSON column
            return unstorable(str(original))
        case _:
            return None
