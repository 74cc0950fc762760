"""A traced run as a person sees it: a row for each layer, in milliseconds of one pass."""

from expertctl.cli.run_view import format_trace
from expertctl.engine.decoding import LayerTimer
from expertctl.engine.result import AllocationCounts, GenerationTrace


def times(scale: float) -> LayerTimer:
    """Two layers, of which a plan changes the second; seconds."""
    found = LayerTimer()
    found.add("embedding", 0.001 * scale, kind="embed")
    for layer in (0, 1):
        found.add(f"layers.{layer}.attention", 0.002 * scale, kind="multiply")
        found.add(f"layers.{layer}.mlp", 0.004 * scale, kind="multiply")
    found.add("layers.1.attention.experts", 0.003 * scale, kind="reduce")
    found.add("layers.1.mlp.experts", 0.005 * scale, kind="reduce")
    found.add("head", 0.006 * scale, kind="multiply")
    return found


def test_layers_and_kinds_are_told_for_the_prompt_and_for_one_token() -> None:
    steps = [AllocationCounts(size, 0, 2 * size) for size in (100, 300, 200)]
    trace = GenerationTrace(prefill=times(10), decode=times(2), timed_steps=2, allocations=steps)
    trace.decode.add("layers.0.attention", 0.0, kind="attend step")
    lines = [line.split() for line in format_trace(trace).splitlines()]
    assert lines[0] == ["A", "TOKEN,", "ms", "attention", "mlp", "experts", "together"]
    assert lines[1] == ["embedding", "1.000"]
    assert lines[2] == ["layer", "0", "2.000", "4.000", "6.000"]
    assert lines[3] == ["layer", "1", "2.000", "4.000", "8.000", "14.000"]
    assert lines[4] == ["head", "6.000"]
    assert lines[5] == ["all", "4.000", "8.000", "8.000", "27.000"]
    assert ["layer", "1", "20.000", "40.000", "80.000", "140.000"] in lines
    assert ["multiply", "18.000", "180.000"] in lines
    assert ["reduce", "8.000", "80.000"] in lines
    assert ["attend", "step", "0.000", "0.000"] in lines
    told = "a token allocates 200 B in Python, 400 B natively and 0 arrays in compiled code"
    assert " ".join(lines[-1]).startswith(told)


def test_a_decoder_that_knows_no_kinds_and_an_answer_of_one_token_are_told_as_such() -> None:
    known = LayerTimer()
    known.add("layers.0.mlp", 0.001)
    text = format_trace(GenerationTrace(prefill=known))
    assert "OPERATION" not in text
    assert "the time of experts is included in that of their layers" in text.splitlines()
    assert "A TOKEN" not in text
    assert text.endswith("allocations per token were not counted: too few tokens were generated")
