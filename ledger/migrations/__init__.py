"""The schema's history, as Alembic runs it; a released revision must never be changed."""
