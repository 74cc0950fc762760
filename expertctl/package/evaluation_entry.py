"""A measured result as an entry of ``evaluation`` in ``expert.json``, put into a planned build.

The weights stay as they are; only the manifest changes, before anything is signed.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime

from expertctl.errors import UsageError
from expertctl.package.build import Plan
from expertctl.package.draft import encode
from expertctl.schema.manifest import MANIFEST_PATH, MAX_MANIFEST_BYTES, Evaluation, manifest_of
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object


def with_evaluation(plan: Plan, entry: Evaluation) -> Plan:
    """Return the plan with one more entry, in the place of one of the same data and metric.

    Raises:
        InvalidPackageError: when the manifest would not be valid with it.
    """
    document = load_object(plan.document, what=MANIFEST_PATH, max_bytes=MAX_MANIFEST_BYTES)
    document["evaluation"] = _merged(document.get("evaluation"), asdict(entry))
    return replace(plan, manifest=manifest_of(document), document=encode(document))


def build_date(environment: Mapping[str, str] = os.environ) -> str:
    """Return today in UTC, or the day of ``SOURCE_DATE_EPOCH`` so that a build can be repeated.

    See https://reproducible-builds.org/specs/source-date-epoch/.

    Raises:
        UsageError: when the variable is no number of seconds that has a date.
    """
    text = environment.get("SOURCE_DATE_EPOCH")
    if text is None:
        return datetime.now(UTC).date().isoformat()
    try:
        return _day(text)
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {text[:40]!r}, not a number of seconds since 1970",
            hint="SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)",
        ) from error


def _day(seconds: str) -> str:
    if not (seconds.isascii() and seconds.isdecimal()):
        raise ValueError(seconds)
    return datetime.fromtimestamp(int(seconds), UTC).date().isoformat()


def _merged(entries: JsonValue, new: JsonObject) -> list[JsonValue]:
    known = entries if isinstance(entries, list) else []
    kept = [entry for entry in known if not _is_about(entry, new)]
    place = next((i for i, entry in enumerate(known) if _is_about(entry, new)), len(kept))
    return [*kept[:place], new, *kept[place:]]


def _is_about(entry: JsonValue, new: JsonObject) -> bool:
    keys = ("dataset_sha256", "metric")
    return isinstance(entry, dict) and all(entry.get(key) == new[key] for key in keys)
