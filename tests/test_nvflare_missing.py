"""`fednorm nvflare` where NVFlare is not installed: one line that says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import fednorm
from fednorm.errors import ConfigError, is_installed

FEDBN = Path(__file__).parents[1] / "examples" / "nvflare" / "fedbn.toml"
pytestmark = pytest.mark.skipif(is_installed("nvflare"), reason="NVFlare is installed here")


@pytest.mark.parametrize("words", [["run", FEDBN], ["export", FEDBN, "job"], ["check"]])
def test_the_extra_is_named(words: list[object]) -> None:
    done = fednorm("nvflare", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err == 'error: fednorm nvflare needs nvflare: pip install "fednorm[nvflare]"\n'


def test_from_python_too() -> None:
    import fednorm.nvflare

    with pytest.raises(
        ConfigError, match=r'a federation on NVIDIA FLARE needs nvflare: pip install "fednorm\[nvflare\]"'
    ):
        fednorm.nvflare.Recipe  # noqa: B018
