"""What reaches a terminal: no name of a site, error or answer steers it."""

import io
import sys

from fedweave.console import Console, printable, show

NAME = "north\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\r"


def test_control_characters_are_written_out_and_text_of_any_script_is_not():
    assert printable(NAME) == r"north\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\r"
    for text in ("two\nlines\tand a tab", "东部医院 Überlingen می\u200cخواهم 👩\u200d⚕️", ""):
        assert printable(text) == text


def test_messages_and_bars_never_steer_and_results_only_into_a_file():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    said = io.StringIO()
    console = Console(stream=said)
    console.warn(f"{NAME}: refused")
    bar = console.progress("round", 1, "steps")
    bar.advance(note=NAME)
    bar.close()
    assert "\x1b" not in said.getvalue() and said.getvalue().count("north") == 2
    before = sys.stdout
    try:
        for sys.stdout, steered in ((Terminal(), False), (io.StringIO(), True)):
            show(NAME)
            assert ("\x1b" in sys.stdout.getvalue()) == steered
    finally:
        sys.stdout = before
