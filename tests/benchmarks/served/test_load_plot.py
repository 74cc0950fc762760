"""The picture of `benchmarks.served.saturation` is a picture."""

from pathlib import Path

from benchmarks.served.saturation import LoadPoint, Saturation, draw_saturation


def test_a_picture_is_written(tmp_path: Path) -> None:
    points = tuple(
        LoadPoint(
            rate, min(rate, 2.0), 48 * min(rate, 2.0), p50=rate, p99=3 * rate, requests=9, refused=0
        )
        for rate in (0.5, 1.0, 2.0, 4.0)
    )
    draw_saturation(Saturation(2.2, points), tmp_path / "load.png", tokens=48, what="a server")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG\r\n")
