"""Exit statuses: 2 where an option or an argument is wrong, as of Typer itself, and 1 where a command fails."""

from __future__ import annotations

import pytest

WRONG = [
    "tarin",
    "train",
    "train lm --epochs x",
    "train lm --epochs 0",
    "train lm --set foo=1",
    "train lm --set epochs",
    "train lm --recipe nope",
    "train lm --recipe damaged.toml",
    "train lm --recipe wrong.toml",
    "train lm --device tpu",
    "train lm --resume --overwrite",
    "train lm --train text.txt",
    "train lm --text text.txt --kernel nope",
    "train lm --text text.txt --train text.txt",
    "train classify --task ranking",
    "train nmt --from xx",
    "evaluate",
    "generate --checkpoint run --temperature -1",
    "translate --checkpoint run --beam-size 0",
    "convert a b --from nope",
    "recipes nope",
    "explain --hidden 8",
    "explain --input 5,3 --hidden 8",
    "explain --input 5,3,4 --hidden 8 --gpu nope",
    "explain nmt --lengths x",
    "explain nmt --memory-budget x",
    "tune --seconds 0",
    "tune --seconds x",
    "replay",
    "doctor --nope",
    "bench nope",
    "bench report nope",
    "bench lstm --dtype nope",
    "bench cells --cell nope",
    "bench lm --device tpu",
]
FAILED = [
    "train lm --text nothing.txt",
    "train lm --resume --output nothing",
    "train lm --text text.txt --output text.txt",
    "train classify --data nothing.csv",
    "evaluate --checkpoint nothing --data text.txt",
    "generate --checkpoint nothing",
    "translate --checkpoint nothing",
    "replay nothing",
    "explain --input 5,3,4 --hidden 8 --gpu cpu --kernel cudnn",
]


@pytest.mark.parametrize(
    ("words", "status"), [*((words, 2) for words in WRONG), *((words, 1) for words in FAILED)], ids=str
)
def test_the_status_tells_wrong_words_from_failures(gatewise, tmp_path, words, status):
    (tmp_path / "text.txt").write_text("a few words\n" * 200)
    (tmp_path / "damaged.toml").write_text("[training")
    (tmp_path / "wrong.toml").write_text("[training]\nepocs = 3")
    answer = gatewise(*words.split())
    assert answer.status == status, answer.err
