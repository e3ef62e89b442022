"""Who waits for programs is told what is being made ready, while it lasts."""

from __future__ import annotations

import time

import pytest

from fednorm.engines.stack.making_ready import making_ready


def test_what_takes_long_is_told_while_it_lasts_and_afterwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fednorm.engines.stack.making_ready.WORTH_A_LINE", 0.0)
    said = ""
    with making_ready("'train' round, 5 clients, batches of 20"):
        while not said.endswith("\n"):
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said == "stacked engine: making ready: 'train' round, 5 clients, batches of 20\n"
    after = capsys.readouterr().err
    assert after.startswith("stacked engine: 'train' round, 5 clients, batches of 20 made ready in ")


def test_what_is_soon_done_or_fails_is_not_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fednorm.engines.stack.making_ready.WORTH_A_LINE", 3.0)
    with making_ready("nothing"):
        pass
    with pytest.raises(ValueError, match="no"), making_ready("nothing"):
        raise ValueError("no")
    assert not capsys.readouterr().err
