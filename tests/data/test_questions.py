"""The question in a prompt is what the user wrote, however much of it all prompts share."""

import pytest

from tunewell.data.templates.chat_template import BUILTIN_NAMES, ChatTemplate, builtin_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
QUESTION = "What is the colour of ball number 10?"


@pytest.mark.parametrize("name", BUILTIN_NAMES)
@pytest.mark.parametrize("before", [[], ["Hello.", "Good morning!"]])
def test_the_question_is_found_whole_in_every_builtin_template(name: str, before: list[str]) -> None:
    """`What is the colour of ball number 10?` was shown as `10?`, because all prompts began alike."""
    template = ChatTemplate(builtin_template(name), special_tokens=SPECIAL, name=name)
    roles = ("user", "assistant") * len(before)
    turns = [{"role": role, "content": text} for role, text in zip(roles, before, strict=False)]
    prompt = template.render([*turns, {"role": "user", "content": QUESTION}], add_generation_prompt=True)
    assert template.question_in(prompt) == QUESTION
    assert template.question_in(" ".join(prompt.split(" "))) == QUESTION
    # Tokenizers of the SentencePiece family decode markers with spaces around them.
    assert template.question_in(prompt.replace("<|", " <|").replace("|>", "|> ")) == QUESTION


def test_a_default_system_prompt_is_not_part_of_the_question() -> None:
    source = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = ChatTemplate(source, special_tokens={})
    for messages in ([], [{"role": "system", "content": "Be brief."}]):
        prompt = template.render([*messages, {"role": "user", "content": QUESTION}], add_generation_prompt=True)
        assert template.question_in(prompt) == QUESTION
        assert template.question_in(prompt + "<think>\n\n</think>\n\n") == QUESTION


def test_a_prompt_without_the_frame_of_the_template_is_shown_whole() -> None:
    template = ChatTemplate(builtin_template("chatml"), special_tokens=SPECIAL)
    assert template.question_in(f" {QUESTION}\n") == QUESTION
