"""The state that all of the server shares: settings, database, blobs, the index key, counters."""

from dataclasses import dataclass, field

from sqlalchemy import select

from expertctl.durable import make_folders
from expertctl.errors import StoreError
from expertctl.trust.keys import PrivateKey
from registry_server.access.quota import check_used
from registry_server.database.connection import Database
from registry_server.database.tables import BLOBS
from registry_server.operation.metrics import Metrics
from registry_server.publishing.downloads import DownloadCounts
from registry_server.publishing.index_key import IndexSigner, demand_same_signer, load_index_key
from registry_server.settings import ServerSettings
from registry_server.storage.blob_digest import BlobDigest
from registry_server.storage.blobs import BlobStorage, disk_errors


@dataclass(frozen=True, slots=True)
class Registry:
    """One open registry."""

    settings: ServerSettings
    database: Database
    storage: BlobStorage
    index_key: PrivateKey
    metrics: Metrics = field(default_factory=Metrics)
    downloads: DownloadCounts = field(default_factory=DownloadCounts)

    @property
    def index_signer(self) -> IndexSigner:
        """What index documents are signed with, and how often at least."""
        return IndexSigner(self.index_key, self.settings.index_interval_days)

    def close(self) -> None:
        """Write what is only counted yet, and close the database."""
        self.downloads.flush(self.database)
        self.database.close()

    def check_integrity(self) -> None:
        """Check the database and its counts, and that every blob it knows lies there in its size.

        Raises:
            StoreError: when anything is damaged or missing.
        """
        self.database.check_integrity()
        with self.database.read() as connection:
            check_used(connection)
            rows = connection.execute(select(BLOBS.c.digest, BLOBS.c.size)).all()
        for digest, size in rows:
            if self.storage.size(BlobDigest.parse(digest)) != size:
                raise StoreError(f"blob {digest} is missing or has another size than {size}")


def open_registry(settings: ServerSettings) -> Registry:
    """Open a registry that was made before; its tables are brought up to date.

    Raises:
        StoreError: when its key or its database cannot be used.
        DiskFullError: when there is no room.
    """
    key = load_index_key(settings.index_key)
    with disk_errors():
        make_folders(settings.uploads, mode=0o700)
        make_folders(settings.blobs, mode=0o700)
    database = Database.open(settings.database)
    try:
        with database.read() as connection:
            demand_same_signer(connection, key)
    except StoreError:
        database.close()
        raise
    return Registry(settings, database, BlobStorage(settings.blobs), key)
