"""The codec of a tokenizer: a chat is what the template makes of it, and what was written is not tokenised again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.extras import LazyExtra

from tangram.errors import InvalidConfig
from tangram.rl.trajectories.tokenizer import MARK, TextCodec, has_tokenizer

transformers = LazyExtra("transformers")

TEMPLATE = (
    "{% for message in messages %}<im> {{ message.role }} {{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<im> assistant {% endif %}"
)


def folder_of(tmp_path: Path, *, chats: bool, end: str | None = "<end>", template: str = TEMPLATE) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<im>", "<end>", "user", "assistant", "go", "left", "right", "wall", "\n", MARK, "<eot>"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    made.add_special_tokens(["<im>", "<end>", "<eot>"])
    made.add_tokens(["\n"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token=end)
    if chats:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_chat_put_together_piece_by_piece_is_what_the_template_makes_of_the_whole(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, chats=True)
    codec = TextCodec(folder)
    pieces = (
        *codec.encode_observation("wall left", first=True),
        *codec.encode_action("go right"),
        *codec.encode_observation("wall right", first=False),
        *codec.encode_action("go left"),
    )
    whole = transformers.PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        [
            {"role": "user", "content": "wall left"},
            {"role": "assistant", "content": "go right"},
            {"role": "user", "content": "wall right"},
            {"role": "assistant", "content": "go left"},
        ],
        return_dict=False,
    )
    assert list(pieces) == whole[: len(pieces)]
    assert codec.decode_action(codec.encode_action("go right")) == "go right" and codec.stop == (2,)


def test_a_turn_ends_once_also_where_its_end_is_not_that_of_the_text(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, chats=True, template=TEMPLATE.replace("<end>", "<eot>"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    codec = TextCodec(folder)
    assert codec.stop == (2, 11) and codec.encode_action("go") == (5, 11)
    follows = codec.encode_observation("wall", first=False)
    assert 11 not in follows[: follows.index(8)], "the action has it already"
    assert codec.encode_observation("wall", first=False, cut=True) == (11, *follows)


def test_an_answer_that_was_cut_is_ended_by_what_follows_it(tmp_path: Path) -> None:
    codec = TextCodec(folder_of(tmp_path, chats=True))
    whole = codec.encode_observation("wall", first=False, cut=True)
    assert whole == (*codec.stop, *codec.encode_observation("wall", first=False))


def test_without_a_template_observations_are_lines(tmp_path: Path) -> None:
    codec = TextCodec(folder_of(tmp_path, chats=False))
    line = codec.encode_action("\n")[0]
    assert codec.encode_observation("wall", first=True) == (8, line)
    assert codec.encode_observation("wall", first=False) == (line, 8, line)


def test_an_observation_that_holds_the_mark_is_kept_whole(tmp_path: Path) -> None:
    codec = TextCodec(folder_of(tmp_path, chats=True))
    assert codec.encode_observation(f"wall {MARK} left", first=False).count(10) == 1


def test_all_end_of_sequence_tokens_are_known(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, chats=True)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1], "temperature": 0.7}')
    codec = TextCodec(folder)
    assert codec.stop == (2, 1) and codec.encode_action("go") == (5, 2)
    codec.save(tmp_path / "saved")
    assert TextCodec(tmp_path / "saved").stop == (2, 1)
    (folder / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(InvalidConfig, match="generation_config"):
        TextCodec(folder)


def test_a_folder_without_a_tokenizer_or_an_end_is_refused(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(InvalidConfig, match="a folder with a tokenizer"):
        TextCodec(tmp_path)
    folder = folder_of(tmp_path / "endless", chats=False, end=None)
    assert has_tokenizer(folder)
    with pytest.raises(InvalidConfig, match="eos_token"):
        TextCodec(folder)
