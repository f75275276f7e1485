"""Files of everyday formats, made as their programs write them: read, masked, and every row accounted for."""

import json
import sys
import zipfile
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tiny import dropped_rows, prepare, write_jsonl

from tunewell import open_corpus
from tunewell.core.errors import UserError
from tunewell.data.sources.base import find_files
from tunewell.data.sources.blocks import ReadOptions, read_blocks
from tunewell.data.sources.recognise import recognise
from tunewell.data.tokenizers.load import load_tokenizer


def num_placed(ledger: dict) -> int:
    """Return the number of rows that a ledger accounts for."""
    return sum(ledger[use] for use in ("documents", "selected", "held_out")) + sum(ledger["dropped"].values())


def prepared(folder: Path, model: Path, data: str, *sets: str) -> dict:
    """Prepare a file without held-out rows, and check that the ledger closes."""
    report = prepare(folder, model, data, sets=["data.held_out=0.0", *sets])
    assert report["rows_in"] == num_placed(report)
    return report


def documents(folder: Path) -> list[tuple[str, str]]:
    """Each document as text, and what of it is supervised."""
    tokenizer = load_tokenizer(folder / "corpus" / "tokenizer").backend
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    return [
        (decode(document.input_ids), decode([label for label in document.labels if label != -100]))
        for document in open_corpus(folder / "corpus")
    ]


def supervised(folder: Path) -> list[str]:
    return [replies for _, replies in documents(folder)]


def source(**settings: str) -> list[str]:
    return [f"data.sources[0].{key}={value}" for key, value in settings.items()]


# --- OpenAssistant


def node(text: str, role: str, *replies: dict, rank: int | None = None, **more) -> dict:
    return {"message_id": text, "text": text, "role": role, "rank": rank, "replies": list(replies), **more}


TREE = node(
    "q1",
    "prompter",
    node("second best", "assistant", rank=1),
    node(
        "best",
        "assistant",
        node("q2", "prompter", node("unranked", "assistant"), node("top", "assistant", rank=0)),
        node("nobody answered", "prompter"),
        rank=0,
    ),
    node("deleted", "assistant", rank=2, deleted=True),
    node("refused", "assistant", rank=3, review_result=False),
)


def trees(shape: str) -> list[dict]:
    if shape == "tree":
        return [{"message_tree_id": "q1", "tree_state": "ready_for_export", "prompt": TREE}]
    if shape == "nested":
        return [TREE]
    flat: list[dict] = []

    def walk(message: dict, parent: str | None) -> None:
        flat.append({key: value for key, value in message.items() if key != "replies"} | {"parent_id": parent})
        for reply in message["replies"]:
            walk(reply, message["message_id"])

    walk(TREE, None)
    return flat


@pytest.mark.parametrize("shape", ["tree", "nested", "flat"])
def test_the_best_path_of_a_tree_is_a_conversation(tiny_model, tmp_path, shape):
    """Trees were dropped as `no known column names`, whole or one message per row."""
    write_jsonl(tmp_path / "trees.jsonl", [*trees(shape), *([] if shape == "flat" else [node("alone", "prompter")])])
    report = prepared(tmp_path, tiny_model, "trees.jsonl")
    assert supervised(tmp_path) == ["best<|im_end|>top<|im_end|>"]
    assert report["sources"][0]["formats"] == {"openassistant": 1}
    if shape != "flat":
        assert dropped_rows(tmp_path)[0]["detail"] == "the tree has no reply"


@pytest.mark.parametrize("shape", ["tree", "flat"])
def test_all_paths_of_a_tree_supervise_each_reply_once(tiny_model, tmp_path, shape):
    """A reply that three paths share would count three times in the loss."""
    write_jsonl(tmp_path / "trees.jsonl", trees(shape))
    report = prepared(tmp_path, tiny_model, "trees.jsonl", *source(paths="all"))
    assert report["rows_in"] == 3
    assert sorted(supervised(tmp_path)) == [
        "best<|im_end|>top<|im_end|>",
        "second best<|im_end|>",
        "unranked<|im_end|>",
    ]


# --- ChatGPT and Claude


def chatgpt(*turns: tuple[str, str | dict], branch: str | None = None) -> dict:
    """A conversation as ChatGPT exports it, with an edited last answer as a branch."""
    mapping: dict = {"root": {"id": "root", "message": None, "parent": None, "children": []}}
    parent = "root"
    for number, (role, content) in enumerate(turns):
        key = f"n{number}"
        body = content if isinstance(content, dict) else {"content_type": "text", "parts": [content]}
        message = {"author": {"role": role}, "content": body, "recipient": "all", "weight": 1.0, "metadata": {}}
        mapping[key] = {"id": key, "message": message, "parent": parent, "children": []}
        mapping[parent]["children"].append(key)
        parent = key
    if branch is not None:
        before = mapping[parent]["parent"]
        message = {"author": {"role": "assistant"}, "content": {"content_type": "text", "parts": [branch]}}
        mapping["b"] = {"id": "b", "message": message, "parent": before, "children": []}
        mapping[before]["children"].append("b")
    return {"title": "t", "create_time": 1.0, "mapping": mapping, "current_node": parent, "conversation_id": "c"}


CHATGPT = [
    chatgpt(
        ("system", ""),
        ("user", "What is 2 + 2?"),
        ("assistant", {"content_type": "thoughts", "thoughts": [{"summary": "s", "content": "let me add"}]}),
        ("assistant", "It is 4."),
        ("user", "Thanks!"),
        ("assistant", "You are welcome."),
        branch="Any time.",
    ),
    chatgpt(("user", "Draw a cat."), ("tool", "drawn"), ("assistant", "Here it is.")),
    chatgpt(
        (
            "user",
            {"content_type": "multimodal_text", "parts": [{"content_type": "image_asset_pointer"}, "What is it?"]},
        ),
        ("assistant", "A cat."),
    ),
    {"title": "empty", "mapping": {}},
]


def write_zip(path: Path, **files: str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "."), text)


@pytest.mark.parametrize("name", ["conversations.json", "export.zip"])
def test_a_chatgpt_export_is_read(tiny_model, tmp_path, name):
    """The branch that was open last is the conversation; an image is refused by name."""
    text = json.dumps(CHATGPT)
    if name.endswith(".zip"):
        write_zip(tmp_path / name, conversations__json=text, user__json='{"id": "u"}', chat__html="<html>")
    else:
        (tmp_path / name).write_text(text, encoding="utf-8")
    report = prepared(tmp_path, tiny_model, name)
    assert (report["documents"], report["dropped"]) == (2, {"has_media": 1, "not_a_conversation": 1})
    assert supervised(tmp_path) == ["It is 4.<|im_end|>You are welcome.<|im_end|>", "Here it is.<|im_end|>"]
    assert report["notes"] == {"tool_messages_left_out": 1, "thinking_not_rendered": 1}
    [media] = [row for row in dropped_rows(tmp_path) if row["reason"] == "has_media"]
    assert media["row"] == 3 and "image" in media["detail"]
    everything = prepared(tmp_path, tiny_model, name, *source(paths="all"))
    assert everything["documents"] == 3
    assert "Any time.<|im_end|>" in supervised(tmp_path)


def test_a_claude_export_is_read(tiny_model, tmp_path):
    """Content blocks and attachments become texts; files that are no text refuse the conversation."""

    def said(sender: str, text: str, **more) -> dict:
        return {"uuid": text, "sender": sender, "text": text, "content": [{"type": "text", "text": text}]} | more

    used = [{"type": "tool_use", "name": "search", "input": {}}, {"type": "text", "text": "Found it."}]
    rows = [
        {
            "uuid": "1",
            "name": "n",
            "chat_messages": [
                said(
                    "human", "Sum up.", attachments=[{"file_name": "a.txt", "extracted_content": "One two."}], files=[]
                ),
                said("assistant", "", content=used),
            ],
        },
        {"uuid": "2", "name": "", "chat_messages": [said("human", "See?", files=[{"file_name": "cat.png"}])]},
        {"uuid": "3", "name": "", "chat_messages": []},
        {
            "uuid": "4",
            "name": "edited",
            "chat_messages": [
                said("human", "old", parent_message_uuid="0"),
                said("assistant", "old answer", parent_message_uuid="old"),
                said("human", "new", parent_message_uuid="0"),
                said("assistant", "new answer", parent_message_uuid="new"),
            ],
        },
    ]
    (tmp_path / "conversations.json").write_text(json.dumps(rows), encoding="utf-8")
    report = prepared(tmp_path, tiny_model, "conversations.json")
    assert report["sources"][0]["formats"] == {"claude": 2}
    assert report["dropped"] == {"has_media": 1, "not_a_conversation": 1}
    (first, replies), (_, edited) = documents(tmp_path)
    assert "Sum up.\n\nOne two.<|im_end|>" in first
    assert (replies, edited) == ("Found it.<|im_end|>", "new answer<|im_end|>")


def test_a_zip_with_several_row_files_is_refused(tmp_path):
    """Which of them is meant cannot be known."""
    write_zip(tmp_path / "two.zip", a__jsonl="{}", b__jsonl="{}")
    [file] = find_files("two.zip", base=tmp_path)
    with pytest.raises(UserError, match="several row files"):
        list(read_blocks(file, ReadOptions(1 << 20, 64)))
    (tmp_path / "two.zip").write_bytes(b"PK broken")
    with pytest.raises(UserError, match="not a complete"):
        list(read_blocks(file, ReadOptions(1 << 20, 64)))


# --- chats between people

ANDROID = """12/31/23, 9:05 PM - Messages and calls are end-to-end encrypted. Tap to learn more.
12/31/23, 9:05 PM - Anna: Are you coming?
12/31/23, 9:06 PM - Ben: Yes.
In an hour,
I think.
12/31/23, 9:07 PM - Ben: <Media omitted>
12/31/23, 9:08 PM - Anna: Good!
1/2/24, 8:00 AM - Ben: Morning: nice party.
1/2/24, 8:01 AM - Anna: It was.
1/2/24, 8:02 AM - Ben: Again soon
1/5/24, 10:00 AM - Anna: Hello?
"""
IPHONE = """\u200e[31.12.23, 21:05:10] Anna: \u200eMessages and calls are end-to-end encrypted.
[31.12.23, 21:05:10] Anna: Are you coming?
[31.12.23, 21:06:00] Ben: Yes.
In an hour,
I think.
\u200e[31.12.23, 21:07:00] Ben: \u200eimage omitted
[31.12.23, 21:08:00] Anna: Good!
[02.01.24, 08:00:00] Ben: Morning: nice party.
[02.01.24, 08:01:00] Anna: It was.
[02.01.24, 08:02:00] Ben: Again soon
[05.01.24, 10:00:00] Anna: Hello?
"""


@pytest.mark.parametrize(("name", "text"), [("_chat.txt", ANDROID), ("chat.txt", IPHONE), ("chat.zip", ANDROID)])
def test_a_whatsapp_chat_is_cut_at_long_pauses(tiny_model, tmp_path, name, text):
    """As plain text, the model would learn to write dates and both sides of a chat."""
    if name.endswith(".zip"):
        write_zip(tmp_path / name, **{"WhatsApp Chat with Anna__txt": text, "IMG-1__jpg": "x"})
    else:
        (tmp_path / name).write_text(text, encoding="utf-8")
    refused = prepare(tmp_path, tiny_model, name, code=2)["error"]
    assert (
        "whose messages" in refused["what"] and "`Ben` (4)" in refused["where"] and "assistant: NAME" in refused["fix"]
    )
    report = prepared(tmp_path, tiny_model, name, *source(assistant="Ben"))
    assert report["sources"][0]["formats"] == {"whatsapp": 2}
    assert report["dropped"] == {"not_a_conversation": 1}  # nobody answered
    assert report["notes"] == {"media_left_out": 1, "openings_left_out": 1}
    assert not report["remarks"]  # it said that the chat was cut into paragraphs
    assert supervised(tmp_path) == ["Yes.\nIn an hour,\nI think.<|im_end|>", "Again soon<|im_end|>"]
    assert not any("encrypted" in text for text, _ in documents(tmp_path))
    unknown = prepare(tmp_path, tiny_model, name, sets=source(assistant="Carl"), code=2)["error"]
    assert "`Carl` wrote nothing" in unknown["what"]


def test_marks_that_whatsapp_adds_are_not_learned(tiny_model, tmp_path):
    """In a German chat, the model learned to reply that it has deleted or edited its message."""
    lines = ["Anna: Bist du da?", "Ben: Du hast diese Nachricht gelöscht."]
    lines += ["Ben: Ja, gleich <Diese Nachricht wurde bearbeitet.>"]
    text = "".join(f"31.12.23, 21:0{number} - {line}\n" for number, line in enumerate(lines))
    (tmp_path / "chat.txt").write_text(text, encoding="utf-8")
    report = prepared(tmp_path, tiny_model, "chat.txt", *source(assistant="Ben"))
    assert supervised(tmp_path) == ["Ja, gleich<|im_end|>"]
    assert report["notes"] == {"deleted_messages_left_out": 1}


LEFT_OUT = {
    "deleted_messages_left_out": ["Anna: Diese Nachricht wurde gelöscht.", "Anna: This message was deleted"],
    "calls_left_out": ["Anna: Verpasster Sprachanruf", "Anna: Missed voice call at 9:05 PM", "Verpasster Videoanruf"],
    "media_left_out": [
        "Anna: IMG-20240312-WA0001.jpg (Datei angehängt)",
        "Anna: <Medien ausgeschlossen>\nSchau mal",
        "Anna: <Anhang: 0001-PHOTO.jpg>",
    ],
}


@pytest.mark.parametrize(("note", "line"), [(note, line) for note, lines in LEFT_OUT.items() for line in lines])
def test_replies_around_a_message_that_is_left_out_are_not_joined(tiny_model, tmp_path, note, line):
    """The reply to a deleted question was joined to the reply before, and calls became turns."""
    lines = [
        "Anna: Are you there?",
        "Ben: Yes.",
        line,
        "Ben: No way!",
        "Anna: Why?",
        "Ben: No time. Missed call yours?",
    ]
    text = "".join(f"31.12.23, 21:0{number} - {line}\n" for number, line in enumerate(lines))
    (tmp_path / "chat.txt").write_text(text, encoding="utf-8")
    report = prepared(tmp_path, tiny_model, "chat.txt", *source(assistant="Ben"))
    assert report["notes"] == {note: 1, "openings_left_out": 1}
    assert supervised(tmp_path) == ["Yes.<|im_end|>", "No time. Missed call yours?<|im_end|>"]


@pytest.mark.parametrize("is_whole_account", [False, True])
def test_a_telegram_export_is_read(tiny_model, tmp_path, is_whole_account):
    """One chat, or all chats of an account; formatted texts are lists of parts."""

    def said(number: int, sender: str, date: str, text, **more) -> dict:
        stamp = {"date": date, "date_unixtime": "1", "from": sender, "from_id": f"user{sender}"}
        return {"id": number, "type": "message", **stamp, "text": text} | more

    messages = [
        {"id": 1, "type": "service", "date": "2024-01-01T09:00:00", "action": "phone_call"},
        said(2, "Anna", "2024-01-01T10:00:00", "Look at this"),
        said(3, "Anna", "2024-01-01T10:00:05", "", photo="photos/1.jpg"),
        said(4, "Ben", "2024-01-01T10:01:00", ["See ", {"type": "link", "text": "the page"}, "."]),
        said(5, "Anna", "2024-01-02T10:00:00", "Good morning"),
        said(6, "Ben", "2024-01-02T10:00:30", "Morning!"),
    ]
    chat = {"name": "Anna", "type": "personal_chat", "id": 7, "messages": messages}
    other = {"name": "News", "type": "public_channel", "messages": [said(1, "News", "2024-01-01T10:00:00", "Sale!")]}
    export = {"about": "Here is the data", "chats": {"about": "", "list": [chat, other]}} if is_whole_account else chat
    (tmp_path / "result.json").write_text(json.dumps(export, indent=1), encoding="utf-8")
    report = prepared(tmp_path, tiny_model, "result.json", *source(assistant="Ben"))
    assert (report["documents"], report["notes"]) == (2, {"media_left_out": 1})
    assert report["sources"][0]["formats"] == {"telegram": 2}
    assert supervised(tmp_path) == ["See the page.<|im_end|>", "Morning!<|im_end|>"]
    refused = prepare(tmp_path, tiny_model, "result.json", code=2)["error"]  # it said that the file is empty
    assert "whose messages" in refused["what"] and "`Ben` (2)" in refused["where"]
    for message in messages:
        message.pop("date_unixtime", None)  # as in exports of 2020
    (tmp_path / "result.json").write_text(json.dumps(chat), encoding="utf-8")
    assert prepared(tmp_path, tiny_model, "result.json", *source(assistant="Ben"))["documents"] == 2


def test_a_group_names_who_asks(tiny_model, tmp_path):
    """Three people in two roles would be one voice."""
    lines = ["Anna: Lunch?", "Carl: Pizza?", "Ben: Pasta."]
    text = "".join(f"[01.01.24, 12:0{number}:00] {line}\n" for number, line in enumerate(lines))
    (tmp_path / "chat.txt").write_text(text, encoding="utf-8")
    prepared(tmp_path, tiny_model, "chat.txt", *source(assistant="Ben"))
    assert "Anna: Lunch?\nCarl: Pizza?<|im_end|>" in documents(tmp_path)[0][0]


def test_a_function_of_the_user_gets_the_rows_of_an_export_as_they_are(tiny_model, tmp_path):
    """Someone who converts an export with `map` must not get converted rows."""
    (tmp_path / "conversations.json").write_text(json.dumps(CHATGPT[:1]), encoding="utf-8")
    code = "def convert(row): return {'question': row['title'], 'answer': str(len(row['mapping']))}"
    (tmp_path / "rows.py").write_text(code, encoding="utf-8")
    prepared(tmp_path, tiny_model, "conversations.json", *source(map="rows.py:convert"))
    assert supervised(tmp_path) == ["8<|im_end|>"]


# --- Excel


def write_workbook(path: Path, sheets: dict[str, list[list]]) -> None:
    """Write the smallest workbook that Excel opens: inline texts and numbers."""

    def cell(value, column: int, row: int) -> str:
        place = f'r="{chr(65 + column)}{row}"'
        if isinstance(value, str):
            return f'<c {place} t="inlineStr"><is><t xml:space="preserve">{value}</t></is></c>'
        return f"<c {place}><v>{value}</v></c>"

    main = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
    numbers = range(1, len(sheets) + 1)
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{kind}.sheet.main+xml"/>'
        + "".join(
            f'<Override PartName="/xl/worksheets/sheet{n}.xml" ContentType="{kind}.worksheet+xml"/>' for n in numbers
        )
        + "</Types>",
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships">'
        f'<Relationship Id="rId1" Type="{office}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook {main} xmlns:r="{office}"><sheets>'
        + "".join(
            f'<sheet name="{name}" sheetId="{n}" r:id="rId{n}"/>' for n, name in zip(numbers, sheets, strict=True)
        )
        + "</sheets></workbook>",
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships">'
        + "".join(
            f'<Relationship Id="rId{n}" Type="{office}/worksheet" Target="worksheets/sheet{n}.xml"/>' for n in numbers
        )
        + "</Relationships>",
    }
    for number, rows in zip(numbers, sheets.values(), strict=True):
        lines = "".join(
            f'<row r="{row}">' + "".join(cell(value, column, row) for column, value in enumerate(values)) + "</row>"
            for row, values in enumerate(rows, start=1)
        )
        parts[f"xl/worksheets/sheet{number}.xml"] = f"<worksheet {main}><sheetData>{lines}</sheetData></worksheet>"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, '<?xml version="1.0" encoding="UTF-8"?>' + text)


def test_a_workbook_is_read_sheet_by_sheet(tiny_model, tmp_path):
    """Most people keep questions and answers in Excel."""
    pytest.importorskip("python_calamine")
    first = [["question", "answer", "id"], ["How many?", 4, 1], ["", "", ""], ["Where?", "Köln &amp; Bonn", 2]]
    write_workbook(tmp_path / "rows.xlsx", {"one": first, "empty": [], "two": [["Frage", "Antwort"], ["Wer?", "Wir."]]})
    report = prepared(tmp_path, tiny_model, "rows.xlsx")
    assert report["dropped"] == {"not_a_conversation": 1}  # German names
    assert supervised(tmp_path) == ["4<|im_end|>", "Köln & Bonn<|im_end|>"]
    assert report["remarks"] == ["`rows.xlsx`: unused columns: `id`"]
    write_workbook(tmp_path / "bad.xlsx", {"one": [["q", "q"], ["a", "b"]]})
    assert "has 2 columns named `q`" in prepare(tmp_path, tiny_model, "bad.xlsx", code=2)["error"]["what"]
    write_workbook(tmp_path / "bad.xlsx", {"one": [["Our FAQ", ""], ["question", "answer"], ["a", "b"]]})
    assert "delete the rows above the header" in prepare(tmp_path, tiny_model, "bad.xlsx", code=2)["error"]["fix"]
    (tmp_path / "bad.xlsx").write_bytes(b"PK not a workbook")
    assert "cannot be read" in prepare(tmp_path, tiny_model, "bad.xlsx", code=2)["error"]["what"]


def test_a_workbook_without_the_library_says_what_to_install(tiny_model, tmp_path, monkeypatch):
    """The library is optional."""
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    write_workbook(tmp_path / "rows.xlsx", {"one": [["question", "answer"], ["q", "a"]]})
    assert '[excel]"' in prepare(tmp_path, tiny_model, "rows.xlsx", code=2)["error"]["fix"]


# --- preferences


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q?", "chosen": "good", "rejected": "bad"},
        {"system": "s", "question": "q?", "chosen": "good", "rejected": "bad"},
        {"chosen": "\n\nHuman: q?\n\nAssistant: good", "rejected": "\n\nHuman: q?\n\nAssistant: bad"},
        {
            "prompt": "q?",
            "chosen": [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "good"}],
            "rejected": [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "bad"}],
        },
        {
            "prompt": [{"role": "user", "content": "q?"}],
            "chosen": [{"role": "assistant", "content": "good"}],
            "rejected": [{"role": "assistant", "content": "bad"}],
        },
        {
            "chosen": "\n\nHuman: a?\n\nAssistant: earlier\n\nHuman: q?\n\nAssistant: good",
            "rejected": "\n\nHuman: a?\n\nAssistant: earlier\n\nHuman: q?\n\nAssistant: bad",
        },
        {"prompt": "q?", "completion": "good", "label": True},
    ],
)
def test_the_preferred_reply_of_a_preference_set_is_trained_with_a_note(tiny_model, tmp_path, row):
    """The rows had no known format, or the reply that people rejected was trained."""
    write_jsonl(tmp_path / "rows.jsonl", [row])
    report = prepared(tmp_path, tiny_model, "rows.jsonl")
    assert supervised(tmp_path) == ["good<|im_end|>"]
    assert report["notes"] == {"chosen_replies": 1}
    assert "bad" not in documents(tmp_path)[0][0]


def test_completions_that_were_not_preferred_are_dropped(tiny_model, tmp_path):
    """`label: false` marks what a model must not say."""
    row = {"prompt": "q?", "completion": "bad", "label": False}
    write_jsonl(tmp_path / "rows.jsonl", [row, {**row, "completion": "good", "label": True}])
    assert prepared(tmp_path, tiny_model, "rows.jsonl")["dropped"] == {"not_preferred": 1}


# --- images and audio


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "audio"),
        ({"question": "What is it?", "answer": "A cat.", "image": {"bytes": "AAAA", "path": None}}, "`image`"),
        ({"question": "What is it?", "answer": "A cat.", "audio_path": "meow.wav"}, "`audio_path`"),
        ({"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "images": ["cat.jpg"]}, "`images`"),
    ],
)
def test_images_and_audio_are_refused_by_name_with_the_row(tiny_model, tmp_path, row, name):
    """The question would be trained without the picture that it is about."""
    if "messages" in row:
        row["messages"].append({"role": "assistant", "content": "A cat."})
    elif "conversations" in row:
        row["conversations"].append({"from": "gpt", "value": "A cat."})
    good = {"question": "q?", "answer": "a", "image": None}
    write_jsonl(tmp_path / "rows.jsonl", [good, row])
    assert prepared(tmp_path, tiny_model, "rows.jsonl")["dropped"] == {"has_media": 1}
    [dropped] = dropped_rows(tmp_path)
    assert dropped["row"] == 2 and name in dropped["detail"]
    refused = prepare(tmp_path, tiny_model, "rows.jsonl", sets=["data.clean.bad_rows=error"], code=2)["error"]
    assert refused["where"] == "rows.jsonl row 2"
    write_jsonl(tmp_path / "only.jsonl", [row])
    assert "cannot be trained on" in prepare(tmp_path, tiny_model, "only.jsonl", code=2)["error"]["fix"]


def test_reading_is_lazy_about_formats(tiny_model, tmp_path, monkeypatch):
    """Plain rows must not pay for the formats of others: none of their modules is imported."""
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}])
    loaded = {name for name in sys.modules if "sources.exports" in name}
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    prepared(tmp_path, tiny_model, "rows.jsonl")
    assert not [name for name in sys.modules if "sources.exports" in name]


@pytest.mark.shared
@pytest.mark.parametrize("paths", ["best", "all"])
def test_trees_and_three_other_shapes_in_one_config_close_the_ledger(tiny_model, tmp_path, shared_data, paths):
    """Real OpenAssistant trees and GSM8K, with Alpaca and Dolly rows, each counted by its format."""
    trees_file = shared_data / "oasst_en_100" / "en_100_tree.jsonl"
    seeds = (shared_data / "self_instruct" / "seed_tasks.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in seeds]
    parts = [(task["instruction"], task["instances"][0]["input"], task["instances"][0]["output"]) for task in tasks]
    write_jsonl(
        tmp_path / "alpaca.jsonl", [dict(zip(("instruction", "input", "output"), part, strict=True)) for part in parts]
    )
    dolly = [
        dict(zip(("instruction", "context", "response"), part, strict=True)) | {"category": "qa"} for part in parts
    ]
    write_jsonl(tmp_path / "dolly.jsonl", [row | {"instruction": f"Please: {row['instruction']}"} for row in dolly])
    gsm8k = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:500]
    math = [{"question": row["question"], "solution": row["answer"]} for row in map(json.loads, gsm8k)]
    write_jsonl(tmp_path / "math.jsonl", math)
    sets = [f"data.sources[0].paths={paths}", "packing.long_documents=split"]
    report = prepare(tmp_path, tiny_model, trees_file, "alpaca.jsonl", "dolly.jsonl", "math.jsonl", sets=sets)
    assert report["rows_in"] == num_placed(report)
    formats = [list(source["formats"]) for source in report["sources"]]
    assert formats == [["openassistant"], ["alpaca"], ["dolly"], ["question_answer"]]
    for entry in report["sources"]:
        assert entry["rows"] == num_placed(entry)
    num_trees = report["sources"][0]["rows"]
    assert num_trees == 100 if paths == "best" else num_trees > 400
    assert "`dolly.jsonl`: unused columns: `category`" in report["remarks"]


def chat_with_pauses(hours: list[float]) -> str:
    """Return a WhatsApp chat of Anna and Ben in turns, with these pauses before the messages."""
    time, lines = datetime(2024, 3, 1, 8, 0), list[str]()
    for number, pause in enumerate(hours):
        time += timedelta(hours=pause)
        lines.append(f"{time:%d.%m.%y, %H:%M} - {('Anna', 'Ben')[number % 2]}: message {number}\n")
    return "".join(lines)


def test_the_pause_is_chosen_from_the_chat_itself(tmp_path, monkeypatch):
    """68 of 100 conversations had no reply because of `gap_hours: 8`, which no screen named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.txt").write_text(chat_with_pauses([30, 10, 30, 10, 30, 10, 30, 11]), encoding="utf-8")
    found = recognise(find_files("slow.txt", base=tmp_path), {"assistant": "Ben"})
    assert found.settings["gap_hours"] == 12 and "8 keeps 0 of 8, 12 keeps 4 of 4" in found.pauses
    given = recognise(find_files("slow.txt", base=tmp_path), {"assistant": "Ben", "gap_hours": 2.0})
    assert given.settings["gap_hours"] == 2 and "12 keeps 4 of 4" in given.pauses  # the user's value, and the others
    (tmp_path / "usual.txt").write_text(chat_with_pauses([30, 0.1, 30, 0.1, 30, 0.1]), encoding="utf-8")
    usual = recognise(find_files("usual.txt", base=tmp_path), {"assistant": "Ben"})
    assert "gap_hours" not in usual.settings and not usual.pauses


def test_a_reason_that_drops_many_rows_is_explained_with_its_setting(tiny_model, tmp_path):
    (tmp_path / "slow.txt").write_text(chat_with_pauses([30, 10, 30, 10, 30, 0.1]), encoding="utf-8")
    prepared(tmp_path, tiny_model, "slow.txt", *source(assistant="Ben"))
    cautions = " ".join(open_corpus(tmp_path / "corpus").manifest.cautions())
    assert "not_a_conversation: The row is not" in cautions and "`data.sources.gap_hours`" in cautions
