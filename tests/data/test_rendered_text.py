"""Text that a chat template rendered is a conversation again: its replies are supervised, not its markers."""

import pytest
from tiny import CHATML, prepare, write_jsonl, write_tiny_model

from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.masking.rendered import RenderedTextParser
from tunewell.data.rows.conversation import Rejected
from tunewell.data.templates.chat_template import BUILTIN_NAMES, ChatTemplate, builtin_template
from tunewell.data.tokenizers.load import load_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def parser() -> RenderedTextParser:
    return RenderedTextParser(ChatTemplate(CHATML, special_tokens=TOKENS, name="own"), TOKENS)


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_a_rendered_conversation_is_read_as_its_messages(parser, name):
    template = ChatTemplate(builtin_template(name), special_tokens=TOKENS)
    messages = [
        {"role": "user", "content": "Who sings?"},
        {"role": "assistant", "content": "Carlos.\n\nHe does."},
        {"role": "user", "content": "And who\n\nelse?"},
        {"role": "assistant", "content": "No one"},
    ]
    for some in (messages[:2], messages):
        text = template.render(some)
        conversation, found = parser.parse(text, "rows")
        assert conversation.messages == some
        assert found in (name, "own")
        assert parser.parse(text.removesuffix("</s>"), "rows")[0].messages == some


def test_a_system_message_is_read_too(parser):
    messages = [{"role": role, "content": f"the {role}"} for role in ("system", "user", "assistant")]
    text = ChatTemplate(CHATML, special_tokens=TOKENS).render(messages)
    conversation, found = parser.parse(text, "rows")
    assert (conversation.messages, found) == (messages, "own")


def test_plain_text_stays_plain_text(parser):
    texts = ["A story.", "user\nhi", "the marker <|im_start|> opens a turn", "[1] a list", "<b>bold</b> <i>x</i>", ""]
    texts += ["The user: he said hi. The assistant: hello.", "User manual\nAssistant: none", "### Humans\nmany"]
    assert [parser.parse(text, "rows") for text in texts] == [None] * len(texts)


def test_another_template_is_refused_and_a_broken_conversation_dropped(parser):
    with pytest.raises(UserError, match="unknown chat template") as caught:
        parser.parse("<|User|>hi<|End|><|Bot|>yo<|End|>", "rows.jsonl")
    assert "format: text" in str(caught.value)
    with pytest.raises(Rejected, match="does not match it; convert"):
        parser.parse("<|im_start|>user\nhi<|im_end|>\n", "rows.jsonl")


@pytest.mark.parametrize(
    "text",
    [
        "<s>[INST] What is it? [/INST] A fish. </s>",
        "<s>[INST]What is it?[/INST]A fish.</s>",
        "### Human: What is it?### Assistant: A fish.",
        "A chat between a curious user and an assistant. USER: What is it? ASSISTANT: A fish.</s>",
        "Human: What is it?\nAssistant: A fish.",
    ],
)
def test_conversations_of_templates_without_special_markers_are_refused(parser, text):
    """Such rows were trained as plain text, questions and markers included, without a word."""
    with pytest.raises(UserError, match="unknown chat template"):
        parser.parse(text, "rows.jsonl")


def test_text_for_another_model_may_end_with_its_end_token():
    """Zephyr's `</s>` is not the end token of a ChatML model."""
    own = RenderedTextParser(None, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    conversation, found = own.parse("<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n", "rows")
    assert found == "zephyr"
    assert [message["content"] for message in conversation.messages] == ["Hi", "Hello"]


def test_rendered_rows_give_the_ids_and_masks_of_their_messages(tmp_path):
    """Encoded as text, 97.7% of such rows was supervised, and the markers were cut into pieces."""
    model = write_tiny_model(tmp_path / "model")
    rows = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is number {n}."}]
        for n in range(6)
    ]
    template = ChatTemplate(CHATML, special_tokens={})
    as_messages = write_jsonl(tmp_path / "messages.jsonl", [{"messages": row} for row in rows])
    as_text = write_jsonl(tmp_path / "text.jsonl", [{"text": template.render(row)} for row in rows])
    corpora = []
    for name, path in (("a", as_messages), ("b", as_text)):
        (tmp_path / name).mkdir()
        report = prepare(tmp_path / name, model, path, sets=["data.held_out=0"])
        corpus = open_corpus(tmp_path / name / "corpus")
        corpora.append([(list(document.input_ids), list(document.labels)) for document in corpus])
    assert corpora[0] == corpora[1]
    assert report["sources"][0]["formats"] == {"text rendered by the model's own": 6}


ASKED = "<|im_start|>user\nQ{n}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {
    "chatml": (ASKED, "A reply<|im_end|>", "prompt_completion rendered by the model's own"),
    "two turns": (f"{ASKED}An earlier reply<|im_end|>\n{ASKED}", "A reply", "rendered by the model's own"),
    "alpaca": ("### Instruction:\nQ{n}\n\n### Response:\n", "A reply</s>", "prompt_completion rendered by alpaca"),
    "one line": ("### Instruction: Q{n} ### Response:", " A reply", "prompt_completion rendered by alpaca"),
}


@pytest.mark.parametrize("form", PROMPTS)
def test_a_rendered_prompt_is_read_as_its_messages(tmp_path, form):
    """The prompt became a question with markers as text, inside of the template's own markers."""
    prompt, completion, name = PROMPTS[form]
    model = write_tiny_model(tmp_path / "model")
    rows = [{"prompt": prompt.replace("{n}", str(n)), "completion": completion} for n in range(3)]
    report = prepare(tmp_path, model, write_jsonl(tmp_path / "rows.jsonl", rows), sets=["data.held_out=0"])
    [(found, number)] = report["sources"][0]["formats"].items()
    assert found.endswith(name) and number == 3
    assert not report["notes"]
    tokenizer = load_tokenizer(tmp_path / "corpus" / "tokenizer").backend
    supervised = [[label for label in row.labels if label != -100] for row in open_corpus(tmp_path / "corpus")]
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in supervised] == ["A reply<|im_end|>"] * 3


def test_a_prompt_of_an_unknown_template_is_refused_unless_the_format_is_named(tmp_path):
    """`format` keeps the texts as they are."""
    model = write_tiny_model(tmp_path / "model")
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "<|User|>hi<|End|><|Bot|>", "completion": "yo"}])
    error = prepare(tmp_path, model, rows, code=2)["error"]
    assert "unknown chat template" in error["what"] and "format: prompt_completion" in error["fix"]
    sets = ["data.held_out=0", "data.sources[0].format=prompt_completion"]
    assert prepare(tmp_path, model, rows, sets=sets)["sources"][0]["formats"] == {"prompt_completion": 1}


def test_the_input_of_an_alpaca_prompt_belongs_to_the_question(parser):
    prompt = "Below is an instruction, with an input.\n\n### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n"
    conversation, _ = parser.parse(prompt, "rows", completion="3", format_name="prompt_completion")
    assert [message["content"] for message in conversation.messages] == ["Add\n\n1 2", "3"]
    own = RenderedTextParser(ChatTemplate(builtin_template("alpaca"), special_tokens=TOKENS, name="own"), TOKENS)
    conversation, _ = own.parse(prompt, "rows", completion="3", format_name="prompt_completion")
    assert conversation.messages[0] == {"role": "user", "content": "Add\n\n### Input:\n1 2", "has_input": True}


def test_questions_that_start_with_a_sign_or_a_name_stay_questions(parser):
    questions = ["# A heading", "[1] or [2]?", "<b>bold</b>?", "User: he said hi. Why?", "### Instructions\nNone"]
    assert [
        parser.parse(question, "rows", completion="Yes.", format_name="question_answer") for question in questions
    ] == [None] * 5


def test_learn_from_on_plain_text_is_refused(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "A story without any reply."}])
    report = prepare(tmp_path, model, rows, sets=["template.learn_from=last_response"], code=2)
    assert "cannot apply to plain text" in report["error"]["what"]
    prepare(tmp_path, model, rows, sets=["data.held_out=0", "template.learn_from=everything"])
