"""How commands end: status and message of a user's mistake, and of Ctrl-C."""

import pytest

from training.commands import run_command


def ends_with(error):
    def command():
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(command, when_interrupted="the same command goes on.")
    return ended.value.code


def test_a_mistake_is_a_message_and_no_traceback():
    assert ends_with(ValueError("`limit` must be at least 1, got 0.")) == "error: `limit` must be at least 1, got 0."


def test_a_file_or_a_hub_that_fails_is_a_message():
    assert ends_with(OSError("no space left")) == "error: no space left"


def test_ctrl_c_says_how_to_go_on(capsys):
    assert ends_with(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "\ninterrupted: the same command goes on.\n"


def test_a_defect_keeps_its_traceback():
    with pytest.raises(RuntimeError):
        run_command(lambda: (_ for _ in ()).throw(RuntimeError("defect")), when_interrupted="")
