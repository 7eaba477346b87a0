"""A port that only remembers what the ledger told it."""

from collections.abc import Sequence

from mesh.contract.messages import Announcement, Notice


class RecordingPort:
    """What was announced, forgotten and noticed, in order."""

    def __init__(self) -> None:
        self.announced: list[Announcement] = []
        self.forgotten: list[Announcement] = []
        self.notices: list[Notice] = []

    async def announce(self, announcements: Sequence[Announcement]) -> None:
        """Remember them."""
        self.announced += announcements

    async def forget(self, announcements: Sequence[Announcement]) -> None:
        """Remember them."""
        self.forgotten += announcements

    async def notify(self, notices: Sequence[Notice]) -> None:
        """Remember them."""
        self.notices += notices

    @property
    def announced_ids(self) -> list[str]:
        """The intents that were announced, in order."""
        return [announcement.intent_id for announcement in self.announced]
