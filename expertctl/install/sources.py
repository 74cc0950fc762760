"""`RegistrySources`: the versions that registries offer, from their signed index documents.

A reference typed by the user chooses its registry; a package or a project file cannot move a
namespace (`expertctl.registry.registry_trust`). Each index is requested once per command. Its
content is stored in this order, so that a process may be killed at any point: the index document
(`expertctl.registry.index_store`), its revocations (``trust.json``) and, once the signatures of
everything to install were verified, the publisher keys (`pin_verified_keys`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TypeVar

from expertctl.digest import Digest
from expertctl.errors import (
    WARNING_PREFIX,
    ExpertError,
    NotFoundError,
    Notify,
    RegistryError,
    RevokedError,
    StoreError,
    TrustError,
    UnreachableError,
    UsageError,
    ignore_notification,
)
from expertctl.install.candidate import (
    InstallCandidate,
    JudgeSigner,
    SignerVerdict,
    candidates_from_index,
)
from expertctl.install.resolve import ResolvedPackage
from expertctl.package.read import VersionContent
from expertctl.reference import FROM_FILE, PackageName, Reference, Version
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import ApiClient, OciClient, has_expert_api
from expertctl.registry.http import RegistryHttp, open_http
from expertctl.registry.index_document import IndexDocument, Release, SignedForm
from expertctl.registry.index_store import IndexStore, fetch_index
from expertctl.registry.registry_trust import (
    PinnedKey,
    apply_revocations,
    check_authority,
    choose_registry,
    choose_required_registry,
    find_known_registry,
    find_signer_problem,
    known_registry_address,
    pin_index_keys,
    pin_verified_keys,
)
from expertctl.settings import Settings
from expertctl.store.preference import read_yanks, record_yanks
from expertctl.store.refs import StoredExpert
from expertctl.store.store import Store
from expertctl.trust.grants import KnownRegistry, Revocation
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore

T = TypeVar("T")
MAX_PARALLEL_QUERIES = 8
"""How many indexes are requested at once."""


class RegistrySources:
    """The answers of registries, cached during one command."""

    def __init__(
        self,
        http: RegistryHttp,
        trust: TrustStore,
        settings: Settings,
        *,
        notify: Notify = ignore_notification,
    ) -> None:
        """Ask through ``http``; nothing is sent yet. ``notify`` gets changes of trust at once."""
        self.http = http
        self.settings = settings
        self.told: list[str] = []
        self.pinned: list[PinnedKey] = []
        self._notify = notify
        self._trust = trust
        self._before = trust.read()
        self._record = self._before
        self._indexes = IndexStore(settings.home.registries)
        self._yanks = read_yanks(settings.home.yanked)
        self._documents: dict[tuple[str, PackageName], IndexDocument] = {}
        self._plain: set[str] = set()
        self._unanswered: dict[tuple[str, PackageName], ExpertError] = {}

    def find_candidates(self, wanted: Reference, by_hand: bool = False) -> list[InstallCandidate]:
        """Return all versions of a package; ``by_hand`` says that the user named the registry.

        Raises:
            NotFoundError: when its registry does not have it, or none is set.
            TrustError: when the registry is not known, or may not have the namespace.
            RegistryError: when it cannot be reached, or has no index.
        """
        if wanted.package.namespace == FROM_FILE:
            hint = "give its .expert file to the same `expertctl install`"
            raise NotFoundError(f"{FROM_FILE}/* comes from files, never from a registry", hint=hint)
        address = self.resolve_address(wanted, by_hand)
        document = self._load_document(self._find_known(address, wanted), wanted.package)
        return candidates_from_index(
            document, address.host, self._make_judge(wanted.package, address.host)
        )

    def prefetch(self, wanted: Iterable[tuple[Reference, bool]]) -> None:
        """Request several indexes at once; a refused one is requested again alone and reported.

        Each reference comes with whether the user named its registry.

        Raises:
            UnreachableError: when a registry cannot be reached.
        """
        with ThreadPoolExecutor(MAX_PARALLEL_QUERIES) as pool, self.http.interrupt_on_ctrl_c():
            jobs: dict[tuple[str, PackageName], Future[IndexDocument]] = {}
            try:
                for reference, by_hand in wanted:
                    known = self._before.find_registry(
                        self.resolve_address(reference, by_hand).host
                    )
                    if known is not None and reference.package.namespace != FROM_FILE:
                        job = pool.submit(self._fetch_document, known, reference.package)
                        jobs[known.host, reference.package] = job
                for (host, package), job in jobs.items():
                    self._accept_document(self._before.find_registry(host), package, job.result())
            except UnreachableError:  # another attempt would take as long
                raise
            except ExpertError:
                return
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def query_quietly(self, packages: Iterable[tuple[str, PackageName]]) -> None:
        """Ask hosts once each about packages with versions here already, without retries.

        Failures to answer are in `unanswered`.

        Raises:
            TrustError: when an index cannot be trusted.
            InvalidPackageError: when an index is malformed.
            StoreError: when an answer cannot be remembered.
        """
        for error in self.query_each(packages):
            if not isinstance(error, NotFoundError | RegistryError):
                raise error

    def query_each(self, packages: Iterable[tuple[str, PackageName]]) -> list[ExpertError]:
        """Ask as `query_quietly` does; return all failures, which are in `unanswered` too."""
        unqueried = [key for key in dict.fromkeys(packages) if self._needs_query(*key)]
        if not unqueried:
            return []
        failed: dict[tuple[str, PackageName], ExpertError] = {}
        with ThreadPoolExecutor(MAX_PARALLEL_QUERIES) as pool, self.http.interrupt_on_ctrl_c():
            jobs = {
                (host, package): pool.submit(
                    self._fetch_document, self._before.find_registry(host), package, attempts=1
                )
                for host, package in unqueried
            }
            for key, job in jobs.items():
                try:
                    self._accept_document(self._before.find_registry(key[0]), key[1], job.result())
                except ExpertError as error:
                    failed[key] = error
        self._unanswered |= failed
        return list(failed.values())

    @property
    def unanswered(self) -> Mapping[tuple[str, PackageName], ExpertError]:
        """Why there is no index, by host and package; empty offline, where nothing was asked."""
        return {} if self.settings.offline else self._unanswered

    def find_index(self, host: str, package: PackageName) -> IndexDocument | None:
        """Return the index of a package, or the last stored one where its registry does not answer.

        None when it was not asked in this command, or never answered.
        """
        key, known = (host, package), self._before.find_registry(host)
        if key in self._documents or key not in self._unanswered or known is None:
            return self._documents.get(key)
        remembered = self._indexes.load(known, package)
        return remembered.document if remembered else None

    def find_first_content(
        self, host: str, package: PackageName, version: Version
    ) -> VersionContent | None:
        """Return the content of a version before the registry changed it; None if it never did."""
        known = self._before.find_registry(host)
        contents = self._indexes.first_contents(known, package) if known else {}
        return contents.get(version)

    def accept_contents(self, chosen: Iterable[ResolvedPackage], refs: Collection[str]) -> None:
        """Store that the user accepts the registries' current contents of versions."""
        for candidate in (item.candidate for item in chosen):
            known = self._before.find_registry(candidate.registry)
            if known is not None and candidate.ref in refs:
                self._indexes.accept_content(known, candidate.package, candidate.version)

    def find_yank_reason(self, expert: StoredExpert) -> str | None:
        """Return why an installed version was yanked, as far as is known; None: it was not."""
        document = self._documents.get((expert.registry, expert.package))
        if document is None:
            return self._yanks.get((expert.registry, expert.ref))
        release = document.find_release(expert.version)
        return release.yanked if release else None

    def record_yanks(self) -> None:
        """Store which installed versions were yanked, for the router; a failure is a warning."""
        stated = {
            key: {r.version: r.yanked for r in document.releases if r.yanked is not None}
            for key, document in self._documents.items()
        }
        home = self.settings.home
        store = Store(home.store)
        try:
            record_yanks(
                home.yanked, stated, installed=store.list_experts, locked=store.begin_transaction
            )
        except (StoreError, OSError) as error:
            text = f"{home.yanked} cannot be written, so yanked versions may still be used: {error}"
            self._notify_all([f"{WARNING_PREFIX}{text}"])

    def resolve_address(self, wanted: Reference, by_hand: bool) -> RegistryAddress:
        """Return the registry that a reference means.

        Raises:
            NotFoundError: when none is set.
            TrustError: when it may not have the namespace.
        """
        choose = choose_registry if by_hand else choose_required_registry
        allow_http = self.settings.allow_http
        if wanted.registry is not None and wanted.registry in self._plain:
            return choose_registry(wanted, self._before, None, allow_http=allow_http)
        try:
            return choose(wanted, self._before, self.settings.registry, allow_http=allow_http)
        except UsageError as error:
            if wanted.registry is None and self.settings.registry is None:
                raise NotFoundError(error.message, hint=error.hint) from error
            raise

    @property
    def default_host(self) -> str | None:
        """The host of the configured registry, if there is one."""
        if self.settings.registry is None:
            return None
        allow_http = self.settings.allow_http
        return RegistryAddress.parse(self.settings.registry, allow_http=allow_http).host

    def resolve_project_host(self, wanted: Reference) -> str:
        """Return the host that a project file's reference means; a key trusted there is enough.

        Raises:
            NotFoundError: when it names no registry, and none is set.
            TrustError: when the registry is not known, or may not have the namespace.
        """
        if wanted.registry is not None:
            address = self.resolve_address(wanted, by_hand=True)
            if not self.knows_host(address.host) and self.has_trusted_key(address, wanted.package):
                self.require_authority(wanted, address)
                return address.host
        return self.resolve_address(wanted, by_hand=False).host

    def require_authority(self, wanted: Reference, address: RegistryAddress) -> None:
        """Refuse a project file that moves a namespace to a registry without an index.

        Raises:
            TrustError: when it moves one.
        """
        hint = f"if you know that it is right: `expertctl install {wanted}`"
        check_authority(wanted, address, self._before, hint=hint)

    def check_namespace_claims(self, chosen: Sequence[ResolvedPackage]) -> None:
        """Refuse a package that assigns a registry to a namespace which has none yet.

        Otherwise later requests of the user for that namespace would go to that registry, not to
        the default one.

        Raises:
            TrustError: when a package assigns one.
        """
        claims = {
            _package_origin(item)
            for item in chosen
            if any(need.is_from_user for need in item.needs)
        }
        for item in chosen:
            host, namespace = _package_origin(item)
            is_default = item.candidate.is_local or self.default_host in {host, None}
            if (
                is_default
                or (host, namespace) in claims
                or self._before.list_registries_for(namespace)
            ):
                continue
            need = next((need for need in item.needs if need.wanted.registry), item.needs[0])
            raise TrustError(
                f"{need}, but here {namespace}/* comes from {self.default_host}, and nothing says "
                f"that it is to come from {host}",
                hint=f"if that is right: `expertctl install {host}/{item.candidate.package}` first",
            )

    def knows_host(self, host: str) -> bool:
        """Tell whether the user accepted the index key of a host."""
        return self._before.find_registry(host) is not None

    def has_trusted_key(self, address: RegistryAddress, package: PackageName) -> bool:
        """Tell whether the user trusts a key for the namespace of a package from a registry."""
        return bool(self._before.list_vouching_keys(address.host, package.namespace))

    def note_unindexed(self, address: RegistryAddress) -> None:
        """Remember that packages came from a registry without an index."""
        self._plain.add(address.host)

    def open_client(self, host: str) -> OciClient:
        """Return the client of a registry."""
        known = self._before.find_registry(host)
        allow_http = self.settings.allow_http
        address = (
            known_registry_address(known)
            if known
            else RegistryAddress.parse(host, allow_http=allow_http)
        )
        return OciClient(self.http, address)

    def find_release(self, candidate: InstallCandidate) -> tuple[IndexDocument, Release] | None:
        """Return the index entry of a candidate; None when it does not come from an index."""
        document = self._documents.get((candidate.registry, candidate.package))
        release = document.find_release(candidate.version) if document else None
        return (document, release) if document and release else None

    def list_offered(self, candidate: InstallCandidate) -> list[InstallCandidate]:
        """Return every version of a candidate's package in its index, if that was read."""
        document = self._documents.get((candidate.registry, candidate.package))
        judge = self._make_judge(candidate.package, candidate.registry)
        return candidates_from_index(document, candidate.registry, judge) if document else []

    def check_signer(self, candidate: InstallCandidate, digest: Digest) -> None:
        """Require that the signer of a form may sign it.

        Raises:
            TrustError: when it may not, or the index has no such form.
        """
        found = self.find_release(candidate)
        form = found[1].find_form(digest) if found else None
        if found is None or form is None:
            message = f"{candidate.registry} has no {candidate.ref} with the digest {digest}"
            raise RegistryError(message, hint="`expertctl lock` writes expert.lock anew")
        host, package = candidate.registry, candidate.package
        problem = find_signer_problem(
            form, found[1], package=package, host=host, record=self._record
        )
        if problem is not None:
            raise problem

    def find_revocation(
        self, key_id: str | None, package: PackageName, registry: str
    ) -> Revocation | None:
        """Return the revocation of a key for a namespace; None when there is none."""
        if key_id is None:
            return None
        return self._record.find_revocation(key_id, namespace=package.namespace, registry=registry)

    def find_authorities(self, package: PackageName, registry: str) -> list[str]:
        """Return the hosts whose revocations apply to packages from a registry or a file."""
        return sorted(self._record.find_authoritative_hosts(package.namespace, registry))

    def is_pinned(self, candidate: InstallCandidate) -> bool:
        """Tell whether the publisher keys of a candidate's namespace were pinned before."""
        return self._before.is_pinned(candidate.registry, candidate.package.namespace)

    def verify_and_pin(
        self, chosen: Iterable[ResolvedPackage], verify: Callable[[TrustRecord], T]
    ) -> T:
        """Verify the chosen packages, then pin and announce the publisher keys of their namespaces.

        Raises:
            ExpertError: as ``verify``; nothing is pinned then.
        """
        indexes = []
        for item in chosen:
            known = self._before.find_registry(item.candidate.registry)
            document = self._documents.get((item.candidate.registry, item.candidate.package))
            if known is not None and document is not None:
                indexes.append((document, known))
        result, keys = pin_verified_keys(indexes, self._trust, verify)
        self.pinned += keys
        self._notify_all(key.message for key in keys)
        return result

    def _notify_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.told.append(text)
            self._notify(text)

    def _needs_query(self, host: str, package: PackageName) -> bool:
        key = host, package
        queried = key in self._documents or key in self._unanswered
        return self.knows_host(host) and not queried

    def _load_document(self, known: KnownRegistry, package: PackageName) -> IndexDocument:
        key = known.host, package
        if key not in self._documents:
            self._accept_document(known, package, self._fetch_document(known, package))
        return self._documents[key]

    def _fetch_document(
        self, known: KnownRegistry | None, package: PackageName, attempts: int | None = None
    ) -> IndexDocument:
        assert known is not None
        offline = self.settings.offline
        return fetch_index(
            self.http, known, package, self._indexes, offline=offline, attempts=attempts
        )

    def _accept_document(
        self, known: KnownRegistry | None, package: PackageName, document: IndexDocument
    ) -> None:
        assert known is not None
        self._notify_all(apply_revocations(document, known, self._trust))
        days = document.overdue_days(datetime.now(UTC))
        if days is not None:
            interval = document.interval_days
            every = "day" if interval == 1 else f"{interval} days"
            text = (
                f"the index of {package} from {known.host} is {days} days old, and it is "
                f"updated every {every}: versions, yanks and revocations may be missing"
            )
            self._notify_all([f"{WARNING_PREFIX}{text}"])
        self._record = pin_index_keys(self._record, document, known)
        self._documents[known.host, package] = document
        self._unanswered.pop((known.host, package), None)  # it answered the second request

    def _find_known(self, address: RegistryAddress, wanted: Reference) -> KnownRegistry:
        host, package = address.host, wanted.package
        if host in self._plain:
            hint = f"name its exact bytes too: {host}/{package}@sha256:…"
            raise NotFoundError(f"{host} has no index to find {package} in", hint=hint)
        known = self.knows_host(host) or self.settings.offline
        if known or has_expert_api(ApiClient(self.http, address)):
            return find_known_registry(address, self._before)
        raise RegistryError(
            f"{host} has no index of experts: it is a plain OCI registry, so nothing there tells "
            f"which versions of {package} are right",
            hint=f"name the exact bytes, {host}/{package}@sha256:…, or trust its publisher, "
            f"`expertctl trust add KEY.pem --namespace {package.namespace} --registry {host}`, "
            f"and name an exact version",
        )

    def _make_judge(self, package: PackageName, host: str) -> JudgeSigner:
        def judge(release: Release, form: SignedForm) -> SignerVerdict:
            problem = find_signer_problem(
                form, release, package=package, host=host, record=self._record
            )
            if problem is None:
                return "trusted"
            return "revoked" if isinstance(problem, RevokedError) else "unknown"

        return judge


@contextmanager
def open_sources(
    settings: Settings, trust: TrustStore, *, notify: Notify | None = None
) -> Iterator[RegistrySources]:
    """Open the `RegistrySources` of this user; nothing is sent while offline.

    At the end the yanks learnt from indexes are stored, also after an error.
    """
    with open_http(settings, notify=notify) as http:
        sources = RegistrySources(http, trust, settings, notify=notify or ignore_notification)
        try:
            yield sources
        finally:
            sources.record_yanks()


def _package_origin(item: ResolvedPackage) -> tuple[str, str]:
    return item.candidate.registry, item.candidate.package.namespace
