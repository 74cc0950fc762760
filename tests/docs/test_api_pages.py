import pytest

from scripts.api_pages import ApiPage, list_pages


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: page.name)
def test_a_reference_page_is_the_one_that_the_operations_make(page: ApiPage) -> None:
    assert page.path.read_text(encoding="utf-8") == page.text(), "run `python -m scripts.api_pages`"
