"""What a registry answers to a search is not trusted to be a name."""

import pytest

from expertctl.cli.connection import is_package_name


def test_a_name_of_a_package_may_be_suggested() -> None:
    assert is_package_name("acme/sorting")


@pytest.mark.parametrize(
    "text", ["", "sorting", "acme/sorting@1.0.0", "acme/sorting\nhint: x", "acme/$(id)", " acme/x"]
)
def test_no_other_text_of_a_registry_gets_into_a_hint(text: str) -> None:
    assert not is_package_name(text)
