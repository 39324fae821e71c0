"""Training settings: values that are refused, and what the errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.config.loader import load_as
from tangram.errors import InvalidConfig
from tangram.rl.config.training_settings import TrainSettings


def test_the_old_name_of_the_mode_fails_with_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[training]\nmode = "rollart"\n')
    with pytest.raises(InvalidConfig, match=r'mode: expected "async", which is the new name of "rollart"'):
        load_as(TrainSettings, path)
    path.write_text('[training]\nmode = "asynchronous"\n')
    with pytest.raises(InvalidConfig, match=r'one of "sync", .*"async", got'):
        load_as(TrainSettings, path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[outside]\nbackend = "process"\n', r"expected resources, which is the new name of outside"),
        ('[[engines]]\ndialect = "sglang"\n', r"engines\[0\]: expected server, which is the new name of dialect"),
    ],
)
def test_the_old_name_of_a_key_fails_with_the_new_one(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=message):
        load_as(TrainSettings, path)
