from registry_server.api.openapi import openapi
from registry_server.api.routes import OPERATIONS
from scripts.registry_api_page import PAGE, page


def test_the_reference_page_is_the_one_that_the_operations_make() -> None:
    hint = "run `python -m scripts.registry_api_page`"
    assert PAGE.read_text(encoding="utf-8") == page(openapi(OPERATIONS, url="")), hint
