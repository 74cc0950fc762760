"""The client and a server in a process of its own, over a socket."""

from pathlib import Path

import pytest

from expertctl.client import ExpertClient, InferOptions, Retries
from expertctl.errors import RateLimitError, UnreachableError
from tests.server.anthropic.client import run_socket_program
from tests.server.harness import ServedPackages

PROMPT = "Sort: 3, 1, 2"
ENDLESS: InferOptions = {"temperature": 0.0, "max_tokens": 100_000}


def submit_many(client: ExpertClient) -> None:
    for _ in range(20):
        client.jobs.submit(PROMPT, **ENDLESS)


@pytest.mark.all
def test_a_whole_visit(stock: ServedPackages, tmp_path: Path) -> None:
    stock.make_home(tmp_path / "home")
    with run_socket_program(tmp_path / "home", rows=1, queue=1) as url, ExpertClient(url) as client:
        whole = client.infer(PROMPT, temperature=0.0, max_tokens=9)
        with client.infer_stream(PROMPT, temperature=0.0, max_tokens=9) as stream:
            assert "".join(chunk.text for chunk in stream) == stream.result.text == whole.text
        with client.infer_stream(PROMPT, **ENDLESS) as left:
            next(left)
        assert client.infer(PROMPT, temperature=0.0, max_tokens=9).text == whole.text
        with ExpertClient(url, retries=Retries(attempts=1)) as other:
            with pytest.raises(RateLimitError) as busy:
                submit_many(other)
            assert busy.value.retry_after >= 1
    with ExpertClient(url) as late, pytest.raises(UnreachableError) as gone:
        late.infer(PROMPT)
    assert not gone.value.sent
