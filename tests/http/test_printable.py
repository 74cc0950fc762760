"""Whatever is in an error can be shown."""

from expertctl.errors import sanitise_error_text


def test_a_message_can_be_shown_on_any_terminal() -> None:
    shown = sanitise_error_text("a\x1b[31mb\r\x00\u202ec\ud800é" + "x" * 5000)
    assert shown.startswith("a?[31mb???c?é")
    assert len(shown) == 1001
