"""Times by place and kind are sums, told for one pass."""

from expertctl.engine.decoding import LayerTimer


def test_the_times_of_programs_add_up_by_place_and_by_kind() -> None:
    times = LayerTimer()
    for _ in range(2):
        times.add_all(
            ("embedding", "layers.0.mlp", "layers.0.mlp"), ("embed", "norm", "multiply"), (1, 2, 4)
        )
    times.add("head", 6.0)
    assert times.places == {"embedding": 2, "layers.0.mlp": 12, "head": 6}
    assert times.kinds == {"embed": 2, "norm": 4, "multiply": 8}
    assert times.seconds == 20
    assert times.to_json(passes=2) == {
        "places": {"embedding": 1000.0, "layers.0.mlp": 6000.0, "head": 3000.0},
        "kinds": {"embed": 1000.0, "norm": 2000.0, "multiply": 4000.0},
    }
