"""A project in a folder, and a person who works in it."""

from pathlib import Path

from expertctl.install.locked import install_locked
from expertctl.install.order import Done
from expertctl.install.outdated import Standing, outdated
from expertctl.install.release_age import ReleaseAge
from expertctl.install.sources import open_sources
from expertctl.install.worklist import (
    Worklist,
    find_worklist,
    install_list,
    lock_list,
    resolve_list,
)
from expertctl.reference import PackageName, Reference
from tests.install.market import Buyer, lend

AGE = ReleaseAge()


class Team:
    """A project, and people who work in it."""

    def __init__(self, folder: Path, buyer: Buyer) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.buyer = buyer

    @property
    def worklist(self) -> Worklist:
        return find_worklist(self.buyer.house.home, self.folder)

    @property
    def lock_path(self) -> Path:
        return self.folder / "expert.lock"

    def wants(self, text: str) -> "Team":
        (self.folder / "experts.toml").write_text(text)
        return self

    def lock(self) -> list[str]:
        with open_sources(self.buyer.settings, self.buyer.house.trust) as sources:
            resolved = resolve_list(self.worklist, self.buyer.target, sources, AGE)
            return lock_list(self.worklist, resolved)[0]

    def install(self, *fresh: str, everything: bool = False) -> tuple[Done, list[str]]:
        names = None if everything else [PackageName.parse(text) for text in fresh]
        with open_sources(self.buyer.settings, self.buyer.house.trust) as sources:
            return install_list(self.worklist, self.buyer.target, sources, lend, AGE, fresh=names)

    def install_locked(self, *refs: str) -> Done:
        wanted = [Reference.parse(text) for text in refs]
        with open_sources(self.buyer.settings, self.buyer.house.trust) as sources:
            return install_locked(self.worklist, wanted, self.buyer.target, sources, lend)

    def outdated(self) -> list[Standing]:
        with open_sources(self.buyer.settings, self.buyer.house.trust) as sources:
            return outdated(self.worklist, self.buyer.target, sources, AGE)

    def joined_by(self, buyer: Buyer) -> "Team":
        """The same project in the hands of somebody else."""
        return Team(self.folder, buyer)
