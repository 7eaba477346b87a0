"""Return the payload as it came. Must never keep or change anything."""

from typing import Any

from worker.sdk import Context, Intent


def run(intent: Intent, context: Context) -> dict[str, Any]:
    """Return the payload."""
    return intent.payload
